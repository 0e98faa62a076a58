"""Greedy completions with the published bits, for held-out evaluation: batched, bounded in memory, deterministic.

Ranks each complete chunks of their own, one token at a time in step with each other, since a sharded layer is gathered by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from coordinator.learner.collate import PAD_ID
from coordinator.learner.model import Policy, published_bits
from coordinator.learner.team import Team

Ids = tuple[int, ...]
ABSENT = -1  # no token: the row has stopped before


def greedy(
    policy: Policy,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: Sequence[int],
    stop_token_ids: Ids,
    token_budget: int,
    team: Team | None = None,
) -> tuple[Ids, ...]:
    """The most likely tokens after each prompt, in order, up to and with the first stop token, at most so many as `max_new_tokens` says for each.

    At most `token_budget` tokens (prompts and completions, padded) are held at once by a rank, but always one prompt.
    """
    team = team or Team(device=str(next(policy.model.parameters()).device))
    table = torch.zeros(len(prompts), max(max_new_tokens, default=0), dtype=torch.int64)  # ids + 1, 0 where there is none
    chunks = _chunks(prompts, max_new_tokens, token_budget)
    with published_bits(policy):
        for begin in range(0, len(chunks), team.size):
            together = chunks[begin : begin + team.size]
            is_busy = team.rank < len(together)
            places = together[team.rank] if is_busy else together[0][:1]
            rows = _complete(
                policy, [prompts[place] for place in places], [max_new_tokens[place] for place in places], stop_token_ids, team
            )
            if is_busy:
                table[places, : rows.shape[1]] = rows.cpu() - ABSENT
    team.add_up(table)
    return tuple(tuple(token + ABSENT for token in row if token + ABSENT != ABSENT) for row in table.tolist())


def _chunks(prompts: Sequence[Ids], max_new_tokens: Sequence[int], token_budget: int) -> list[list[int]]:
    """Places of prompts that go together: those that may take as many tokens as another, and are as long."""
    order = sorted(range(len(prompts)), key=lambda place: (-max_new_tokens[place], -len(prompts[place]), place))
    chunks: list[list[int]] = []
    longest = 0  # prompt of the newest chunk; its first place may take the most tokens
    for place in order:
        length = max(longest, len(prompts[place]))
        if chunks and (len(chunks[-1]) + 1) * (length + max_new_tokens[chunks[-1][0]]) <= token_budget:
            chunks[-1].append(place)
            longest = length
        else:
            chunks.append([place])
            longest = len(prompts[place])
    return chunks


def _complete(policy: Policy, prompts: list[Ids], limits: list[int], stop_token_ids: Ids, team: Team) -> Tensor:
    """Decode one chunk, [rows, tokens]: prompts padded on the left, a token for every row at a time until all of all ranks have stopped.

    `limits`: the most tokens of each row.
    """
    ids, mask = _left_padded(prompts, team.device)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=team.device)
    cache = DynamicCache(config=policy.model.config)
    most = torch.tensor(limits, dtype=torch.int64, device=team.device)
    done = most <= 0
    columns: list[Tensor] = []
    while not team.least([float(done.all())])[0]:
        fed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "cache": cache}
        chosen = policy.call(partial(_next, **fed))
        columns.append(torch.where(done, ABSENT, chosen))
        done = done | torch.isin(chosen, stops) | (most <= len(columns))
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return torch.stack(columns, dim=1) if columns else ids.new_empty(len(prompts), 0)


def _next(model: nn.Module, **fed: Any) -> Tensor:
    """The most likely next token of every row, [rows]; the cache grows by the columns fed."""
    logits = model(**fed, use_cache=True, logits_to_keep=1).logits[:, -1]
    chosen: Tensor = logits.float().argmax(dim=-1)
    return chosen


def _left_padded(prompts: list[Ids], device: str) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = [[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, dtype=torch.int64, device=device), torch.tensor(mask, dtype=torch.int64, device=device)
