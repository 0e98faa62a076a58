"""From a batch to padded micro-batches: pure. Which tokens are trained is decided here, once, before the first forward pass.

Prompts are padded on the left and completions on the right, so that all completions of a micro-batch start in the same
column and the model needs to give logits for that rectangle only:

    column       0 ......... p-1 | p ............ p+c-1
                 pad pad prompt  | completion pad pad
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coordinator.learner import advantages, aggregation
from coordinator.learner.batch_file import Batch
from coordinator.wire.job import JobConfig

PAD_ID = 0  # padding is masked out, so any id in the vocabulary does


@dataclass(frozen=True, slots=True)
class Signal:
    """What each rollout teaches."""

    advantages: Tensor  # float64 [N]
    weights: Tensor  # float64 [N], of each of its tokens in the batch's loss; 0: not trained
    trained_tokens: int  # tokens with weight > 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass: b rollouts, prompts padded to p and completions to c tokens."""

    input_ids: Tensor  # int64 [b, p + c]
    attention_mask: Tensor  # int64 [b, p + c]
    position_ids: Tensor  # int64 [b, p + c]
    targets: Tensor  # int64 [b, c]
    present: Tensor  # bool [b, c]: a token, not padding
    sampler: Tensor  # float32 [b, c]
    age: Tensor  # int32 [b, c], the step minus the version that sampled the token
    advantages: Tensor  # float64 [b]
    weights: Tensor  # float64 [b, c]; 0: padding or not trained


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
    lengths = torch.from_numpy(batch.lengths.astype(np.int64))
    shares = aggregation.RULES[rule.aggregation](aggregation.Rollouts(lengths, trained, group, config.sampling.max_new_tokens))
    return Signal(advantages.RULES[rule.advantage](rewards, group), given * shares, int(lengths[trained].sum()))


def split(batch: Batch, token_budget: int) -> list[list[int]]:
    """Which rollouts go together: similar lengths, at most `token_budget` padded tokens, at least one rollout each."""
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


def collate(batch: Batch, signal: Signal, rows: list[int], *, device: str = "cpu") -> MicroBatch:
    """The padded tensors of the given rollouts, in that order."""
    prompts = _pieces(batch.prompt_ids, batch.prompt_lengths, rows)
    ids = _pieces(batch.token_ids, batch.lengths, rows)
    left = _padded(prompts, left=True)
    targets = _padded(ids, left=False)
    present = _padded([np.ones(len(piece), np.bool_) for piece in ids], left=False)
    prompt_mask = _padded([np.ones(len(piece), np.bool_) for piece in prompts], left=True)
    attention_mask = torch.cat([prompt_mask, present], dim=1).long()
    moved = {
        "input_ids": torch.cat([left, targets], dim=1).long(),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp_min(0),
        "targets": targets.long(),
        "present": present,
        "sampler": _padded(_pieces(batch.logprobs, batch.lengths, rows), left=False),
        "age": _padded(_pieces(batch.step - batch.versions, batch.lengths, rows), left=False),
        "advantages": signal.advantages[rows],
        "weights": signal.weights[rows][:, None] * present,
    }
    return MicroBatch(**{name: tensor.to(device) for name, tensor in moved.items()})


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
