"""From a batch to micro-batches: pure. Which tokens are trained is decided here, once, before the first forward pass.

Two layouts of the same rollouts. Packed, they stand one behind the other, [1, T], and nothing is padding. Padded, prompts are padded
on the left and completions on the right, so that all completions begin in the same column:

    column       0 ......... p-1 | p ............ p+c-1
                 pad pad prompt  | completion pad pad

What the losses see is the same in both: a rectangle [b, c] of completion tokens, a rollout a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coordinator.learner import advantages, aggregation
from coordinator.learner.attention import Segments
from coordinator.learner.batch_file import Batch
from coordinator.wire.job import JobConfig

PAD_ID = 0  # padding is masked out, so any id in the vocabulary does
MOST_SPREAD = 2  # cells of the rectangle that attention spreads packed rollouts over, for each token of the budget


@dataclass(frozen=True, slots=True)
class Signal:
    """What each rollout teaches."""

    advantages: Tensor  # float64 [N]
    weights: Tensor  # float64 [N], of each of its tokens in the batch's loss; 0: not trained
    trained_tokens: int  # tokens with weight > 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass over b rollouts with completions of at most c tokens, n of them sampled."""

    input_ids: Tensor  # int64 [r, s]: [1, T], or [b, p + c]
    position_ids: Tensor  # int64 [r, s]
    attention_mask: Tensor | None  # int64 [r, s]; None: packed
    segments: Segments | None  # None: padded
    before: Tensor  # int64 [n], the flat place in [r, s] after which each sampled token came
    cells: Tensor  # int64 [n], its flat place in [b, c]
    targets: Tensor  # int64 [b, c]
    sampled: Tensor  # bool [b, c]: a token that the policy sampled: not padding, not put in by the environment
    sampler: Tensor  # float32 [b, c]
    age: Tensor  # int32 [b, c], the step minus the version that sampled the token
    advantages: Tensor  # float64 [b]
    weights: Tensor  # float64 [b, c]; 0: not sampled or not trained


def signal_of(batch: Batch, config: JobConfig) -> Signal:
    """Advantages over all scored rollouts; then who is trained, and what a token of each counts.

    Out of the loss, and of the aggregation's counts, are rollouts without a score, with weight 0, and (truncated = "mask": DAPO's
    overlong filter, arXiv 2503.14476) those that hit the length cap; the last two stay in their group's baseline.
    """
    rule = config.algorithm
    rewards = torch.from_numpy(batch.rewards)
    given = torch.from_numpy(batch.weight).double()
    trained = ~torch.isnan(rewards) & (given > 0)
    if rule.truncated == "mask":
        trained &= torch.from_numpy(batch.truncated) == 0
    group = torch.from_numpy(batch.group.astype(np.int64))
    lengths = torch.from_numpy(batch.sampled_lengths)
    shares = aggregation.RULES[rule.aggregation](aggregation.Rollouts(lengths, trained, group, config.sampling.max_new_tokens))
    return Signal(advantages.RULES[rule.advantage](rewards, group), given * shares, int(lengths[trained].sum()))


def split(batch: Batch, token_budget: int) -> list[list[int]]:
    """Which rollouts are padded together: similar lengths, at most `token_budget` padded tokens, at least one rollout each."""
    order = sorted(range(batch.rollouts), key=lambda row: (-int(batch.prompt_lengths[row]), -int(batch.lengths[row]), row))
    parts: list[list[int]] = []
    prompt = completion = 0
    for row in order:
        wider = max(prompt, int(batch.prompt_lengths[row])), max(completion, int(batch.lengths[row]))
        if parts and (len(parts[-1]) + 1) * sum(wider) <= token_budget:
            parts[-1].append(row)
            prompt, completion = wider
        else:
            parts.append([row])
            prompt, completion = int(batch.prompt_lengths[row]), int(batch.lengths[row])
    return parts


def split_packed(batch: Batch, token_budget: int) -> list[list[int]]:
    """Which rollouts are packed together: similar lengths, at most `token_budget` tokens, at least one rollout each.

    A long rollout among many short ones would make attention's rectangle far larger than the tokens, so that is bounded as well.
    """
    lengths = (batch.prompt_lengths + batch.lengths).tolist()
    parts: list[list[int]] = []
    room = most = 0
    for row in sorted(range(batch.rollouts), key=lambda row: (-lengths[row], row)):
        if not parts or lengths[row] > room or len(parts[-1]) == most:
            parts.append([])
            room, most = token_budget, max(1, MOST_SPREAD * token_budget // lengths[row])
        parts[-1].append(row)
        room -= lengths[row]
    return parts


def collate(batch: Batch, signal: Signal, rows: list[int], *, device: str = "cpu") -> MicroBatch:
    """The given rollouts, padded, in that order."""
    prompts = _pieces(batch.prompt_ids, batch.prompt_lengths, rows)
    ids = _pieces(batch.token_ids, batch.lengths, rows)
    left, right = _padded(prompts, left=True), _padded(ids, left=False)
    masks = [_padded([np.ones(len(each), np.bool_) for each in prompts], left=True)]
    masks.append(_padded([np.ones(len(each), np.bool_) for each in ids], left=False))
    attention_mask = torch.cat(masks, dim=1).long()
    taught = _taught(batch, signal, rows)
    row, place = taught["sampled"].nonzero(as_tuple=True)
    moved = {
        **taught,
        "input_ids": torch.cat([left, right], dim=1).long(),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp_min(0),
        "before": row * attention_mask.shape[1] + left.shape[1] - 1 + place,
    }
    return MicroBatch(**{name: tensor.to(device) for name, tensor in moved.items()}, segments=None)


def pack(batch: Batch, signal: Signal, rows: list[int], *, device: str = "cpu") -> MicroBatch:
    """The given rollouts, one behind the other, in that order."""
    prompts = _pieces(batch.prompt_ids, batch.prompt_lengths, rows)
    ids = _pieces(batch.token_ids, batch.lengths, rows)
    lengths = [len(before) + len(after) for before, after in zip(prompts, ids, strict=True)]
    starts = np.cumsum(lengths) - lengths
    firsts = torch.from_numpy(starts + [len(each) for each in prompts])  # of the completions
    taught = _taught(batch, signal, rows)
    row, place = taught["sampled"].nonzero(as_tuple=True)
    positions = np.concatenate([np.arange(length) for length in lengths])
    moved = {
        **taught,
        "input_ids": torch.from_numpy(
            np.concatenate([each for pair in zip(prompts, ids, strict=True) for each in pair])[None]
        ).long(),
        "position_ids": torch.from_numpy(positions[None]),
        "before": firsts[row] - 1 + place,
    }
    cells = torch.from_numpy(np.repeat(np.arange(len(rows)) * max(lengths), lengths) + positions)
    segments = Segments(cells, rows=len(rows), width=max(lengths)).to(device)
    return MicroBatch(**{name: tensor.to(device) for name, tensor in moved.items()}, attention_mask=None, segments=segments)


def _taught(batch: Batch, signal: Signal, rows: list[int]) -> dict[str, Tensor]:
    """What the losses see of the given rollouts: the rectangle, and which of its cells hold sampled tokens."""
    sampled = _padded(_pieces(batch.sampled, batch.lengths, rows), left=False)
    return {
        "cells": sampled.flatten().nonzero()[:, 0],
        "targets": _padded(_pieces(batch.token_ids, batch.lengths, rows), left=False).long(),
        "sampled": sampled,
        "sampler": _padded(_pieces(np.where(batch.sampled, batch.logprobs, 0), batch.lengths, rows), left=False),
        "age": _padded(_pieces(np.where(batch.sampled, batch.step - batch.versions, 0), batch.lengths, rows), left=False),
        "advantages": signal.advantages[rows],
        "weights": signal.weights[rows][:, None] * sampled,
    }


def _pieces(values: NDArray[np.generic], lengths: NDArray[np.int32], rows: list[int]) -> list[NDArray[np.generic]]:
    """The values of the given rollouts, out of their concatenation."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return [values[ends[row] - lengths[row] : ends[row]] for row in rows]


def _padded(pieces: list[NDArray[np.generic]], *, left: bool) -> Tensor:
    """One row per piece, zeros (PAD_ID, False) where it is shorter than the longest."""
    width = max(len(piece) for piece in pieces)
    rows = np.full((len(pieces), width), PAD_ID, dtype=pieces[0].dtype)
    for row, piece in zip(rows, pieces, strict=True):
        if left:
            row[width - len(piece) :] = piece
        else:
            row[: len(piece)] = piece
    return torch.from_numpy(rows)
