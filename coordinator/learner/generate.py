"""Greedy completions with the published bits, for held-out evaluation: batched, bounded in memory, deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from coordinator.learner.collate import PAD_ID
from coordinator.learner.model import Policy, published_bits

Ids = tuple[int, ...]


def greedy(
    policy: Policy,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: int,
    stop_token_ids: Ids,
    token_budget: int,
    device: str = "cpu",
) -> tuple[Ids, ...]:
    """The most likely tokens after each prompt, in order, up to and with the first stop token, at most `max_new_tokens`.

    At most `token_budget` tokens (prompts and completions, padded) are held at once, but always one prompt.
    """
    completions: dict[int, Ids] = {}
    with published_bits(policy.model):
        for places in _chunks(prompts, max_new_tokens, token_budget):
            chunk = [prompts[place] for place in places]
            rows = _complete(policy, chunk, max_new_tokens, stop_token_ids, device)
            completions |= dict(zip(places, rows, strict=True))
    return tuple(completions[place] for place in range(len(prompts)))


def _chunks(prompts: Sequence[Ids], max_new_tokens: int, token_budget: int) -> list[list[int]]:
    """Places of prompts that go together, longest first, so that the first of a chunk sets its width."""
    order = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place]), place))
    chunks: list[list[int]] = []
    room = 0
    for place in order:
        if room == 0:
            chunks.append([])
            room = max(1, token_budget // (len(prompts[place]) + max_new_tokens))
        chunks[-1].append(place)
        room -= 1
    return chunks


def _complete(policy: Policy, prompts: list[Ids], max_new_tokens: int, stop_token_ids: Ids, device: str) -> list[Ids]:
    """Decode one chunk: prompts padded on the left, one token for every row at a time until all have stopped."""
    ids, mask = _left_padded(prompts, device)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
    cache = DynamicCache(config=policy.model.config)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    columns: list[Tensor] = []
    while len(columns) < max_new_tokens and not bool(done.all()):
        logits = policy.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        chosen = logits.float().argmax(dim=-1)
        columns.append(torch.where(done, -1, chosen))
        done = done | torch.isin(chosen, stops)
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    if not columns:
        return [() for _ in prompts]
    return [tuple(token for token in row if token >= 0) for row in torch.stack(columns, dim=1).tolist()]


def _left_padded(prompts: list[Ids], device: str) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = [[PAD_ID] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, dtype=torch.int64, device=device), torch.tensor(mask, dtype=torch.int64, device=device)
