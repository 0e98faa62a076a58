"""Read a sealed batch (`wire.learner_link.BATCH_FORMAT`): digest first, then form, then meaning. Nothing is repaired.

A batch that is not exactly what the request says is refused whole; the learner's state is untouched by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from coordinator.domain.staleness import StalenessError, staleness
from coordinator.learner.errors import BatchInvalid
from coordinator.wire.learner_link import BATCH_FORMAT

PER_PROMPT_TOKEN = {"prompt_ids": np.int32}
PER_TOKEN = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
OPTIONAL_PER_TOKEN = {"sampled": np.bool_}
PER_ROLLOUT = {
    "prompt_lengths": np.int32,
    "lengths": np.int32,
    "rewards": np.float32,
    "group": np.int32,
    "truncated": np.uint8,
    "weight": np.float32,
}
_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """One sealed batch: N rollouts, P prompt tokens and T completion tokens in all, group-major, slot-minor."""

    step: int
    prompt_ids: NDArray[np.int32]  # [P]
    prompt_lengths: NDArray[np.int32]  # [N]
    token_ids: NDArray[np.int32]  # [T]
    lengths: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [T]
    versions: NDArray[np.int32]  # [T]
    rewards: NDArray[np.float32]  # [N], NaN: no score
    group: NDArray[np.int32]  # [N]
    truncated: NDArray[np.uint8]  # [N]
    weight: NDArray[np.float32]  # [N]
    sampled: NDArray[np.bool_]  # [T], False: put in by the environment; its log-prob and version mean nothing

    @property
    def rollouts(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[N], the tokens of each rollout that the policy sampled; at least one."""
        starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return np.add.reduceat(self.sampled, starts, dtype=np.int64)

    def staleness(self) -> list[int]:
        """Of each rollout: the step minus the oldest version of any of its sampled tokens."""
        ends = np.cumsum(self.lengths)
        versions = np.where(self.sampled, self.versions, self.step)
        return [
            staleness(self.step, int(versions[end - length : end].min())) for end, length in zip(ends, self.lengths, strict=True)
        ]


def read(path: Path, *, digest: str, job_id: str, step: int, vocab_size: int) -> Batch:
    """The batch at `path`. Raises BatchInvalid unless it is whole, well formed, and the one of this job and step."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BatchInvalid(f"batch_path {path} cannot be read: {error}; send the path of the sealed batch file") from error
    found = blake3(data).hexdigest()
    if found != digest:
        raise BatchInvalid(f"batch_digest is {digest} but {path} has {found}: the file changed after the seal, seal it again")
    batch = parse(data, job_id=job_id, step=step)
    _check_meaning(batch, vocab_size)
    return batch


def parse(data: bytes, *, job_id: str, step: int) -> Batch:
    """The arrays of a batch file, checked for form (names, dtypes, lengths that add up) and for whose they are."""
    try:
        arrays = load(data)
        (length,) = np.frombuffer(data[:_HEADER_LENGTH_BYTES], dtype="<u8")
        header = json.loads(data[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + int(length)])
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BatchInvalid(f"the batch file is not safetensors: {error}") from error
    expected = {"format": BATCH_FORMAT, "job": job_id, "step": str(step)}
    metadata = header.get("__metadata__", {})
    if metadata != expected:
        raise BatchInvalid(f"the batch's metadata is {metadata}, expected {expected}: send the batch sealed for this job and step")
    _check_form(arrays)
    everything = np.ones(len(arrays["token_ids"]), np.bool_)
    return Batch(step=step, **{"sampled": everything, **arrays})


def _check_form(arrays: Mapping[str, NDArray[np.generic]]) -> None:
    dtypes = {**PER_PROMPT_TOKEN, **PER_TOKEN, **PER_ROLLOUT}
    if set(arrays) - set(OPTIONAL_PER_TOKEN) != set(dtypes):
        raise BatchInvalid(
            f"the batch holds arrays {sorted(arrays)}, expected exactly {sorted(dtypes)}, and perhaps {', '.join(OPTIONAL_PER_TOKEN)}"
        )
    for name, array in arrays.items():
        dtype = (dtypes | OPTIONAL_PER_TOKEN)[name]
        if array.dtype != dtype or array.ndim != 1:
            raise BatchInvalid(f"array {name} is {array.dtype} of shape {array.shape}, expected one-dimensional {np.dtype(dtype)}")
    rollouts = len(arrays["lengths"])
    if rollouts == 0:
        raise BatchInvalid("the batch holds no rollouts: a step needs at least one group")
    for name in PER_ROLLOUT:
        if len(arrays[name]) != rollouts:
            raise BatchInvalid(f"array {name} has {len(arrays[name])} entries, lengths has {rollouts}: one per rollout is needed")
    _check_sum(arrays, "lengths", tuple(name for name in (*PER_TOKEN, *OPTIONAL_PER_TOKEN) if name in arrays))
    _check_sum(arrays, "prompt_lengths", tuple(PER_PROMPT_TOKEN))


def _check_sum(arrays: Mapping[str, NDArray[np.generic]], counts: str, names: tuple[str, ...]) -> None:
    lengths = arrays[counts].astype(np.int64)
    if int(lengths.min()) < 1:
        raise BatchInvalid(f"array {counts} holds {int(lengths.min())}: every rollout has at least one token")
    for name in names:
        if len(arrays[name]) != int(lengths.sum()):
            raise BatchInvalid(f"array {name} has {len(arrays[name])} entries, {counts} adds up to {int(lengths.sum())}")


def _check_meaning(batch: Batch, vocab_size: int) -> None:
    for name, ids in (("prompt_ids", batch.prompt_ids), ("token_ids", batch.token_ids)):
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise BatchInvalid(f"array {name} holds ids from {ids.min()} to {ids.max()}, the vocabulary is 0..{vocab_size - 1}")
    if int(batch.sampled_lengths.min()) < 1:
        raise BatchInvalid("array sampled has a rollout without a sampled token: there is nothing of the policy's in it")
    logprobs, versions = batch.logprobs[batch.sampled], batch.versions[batch.sampled]
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > 0:
        raise BatchInvalid(f"array logprobs must be finite and <= 0; its largest value is {logprobs.max()}")
    if np.isinf(batch.rewards).any():
        raise BatchInvalid("array rewards holds an infinity: rewards are finite, or NaN for no score")
    if not np.isfinite(batch.weight).all() or float(batch.weight.min()) < 0:
        raise BatchInvalid(f"array weight must be finite and >= 0; its least value is {batch.weight.min()}")
    if int(batch.truncated.max()) > 1:
        raise BatchInvalid(f"array truncated holds {batch.truncated.max()}: it must be 0 or 1")
    steps = np.diff(batch.group)
    if batch.group[0] != 0 or (len(steps) and not ((steps == 0) | (steps == 1)).all()):
        raise BatchInvalid("array group must count up from 0 without gaps: rollouts are group-major")
    try:
        for version in (int(versions.min()), int(versions.max())):
            staleness(batch.step, version)
    except StalenessError as error:
        raise BatchInvalid(f"array versions: {error}") from error
