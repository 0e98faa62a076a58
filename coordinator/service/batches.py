"""Assembles the batch file that the learner trains on, from settled rollouts and their stored arrays.

The file is a pure function of the rows and blobs: group-major, slot-minor, in ascending group number. A replay therefore
reads the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from coordinator.domain.model import Group, Rollout, RolloutState, Turn
from coordinator.wire.frames import decode_frame
from coordinator.wire.learner_link import BATCH_FORMAT

Arrays = Mapping[str, NDArray[np.generic]]
_LENGTH_BYTES = 8  # of the header, as safetensors begins; its data is aligned to as many


def carried(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of a group that have tokens, by slot."""
    return sorted((r for r in rollouts if r.blob is not None), key=lambda r: r.slot)


def tokens_of(arrays: Arrays, rollout: Rollout | Turn) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """Token ids, log-probs and versions of one rollout inside its submission's arrays."""
    span = slice(rollout.blob_start, rollout.blob_start + rollout.length)
    return arrays["token_ids"][span], arrays["logprobs"][span], arrays["versions"][span]


def batch_file(
    job_id: str,
    step: int,
    groups: Sequence[Group],
    rollouts: Mapping[str, Sequence[Rollout]],
    *,
    frames: Mapping[str, bytes],
    zero: set[int],
    turns: Mapping[tuple[str, int], Sequence[Turn]] | None = None,
) -> bytes:
    """The safetensors bytes described at `coordinator.wire.learner_link.BATCH_FORMAT`.

    `rollouts` maps group id to its rollouts, `frames` maps blob digest to the stored frame, `zero` holds the numbers of
    groups that are carried without signal (weight 0). `turns` maps (group id, slot) to the turns before the newest, in order; None:
    the job's environment takes one turn, and the file has no `sampled`.
    """
    arrays = {digest: decode_frame(frame)[1] for digest, frame in frames.items()}
    prompts, columns = [], [(g, place, r) for place, g in enumerate(groups) for r in carried(rollouts[g.id])]
    rows = []
    for group, _, rollout in columns:
        prompts.append(np.asarray(group.prompt_ids, np.int32))
        rows.append(completion(arrays, rollout, (turns or {}).get((group.id, rollout.slot), ())))
    scored = [r.state is RolloutState.SCORED and r.reward is not None for _, _, r in columns]
    data = {
        "prompt_ids": np.concatenate(prompts).astype(np.int32),
        "prompt_lengths": np.asarray([len(p) for p in prompts], np.int32),
        "token_ids": np.concatenate([row.token_ids for row in rows]).astype(np.int32),
        "lengths": np.asarray([len(row.token_ids) for row in rows], np.int32),
        "logprobs": np.concatenate([row.logprobs for row in rows]).astype(np.float32),
        "versions": np.concatenate([row.versions for row in rows]).astype(np.int32),
        "rewards": np.asarray([r.reward if ok else np.nan for ok, (_, _, r) in zip(scored, columns, strict=True)], np.float32),
        "group": np.asarray([place for _, place, _ in columns], np.int32),
        "truncated": np.asarray([r.stop_reason == "length" for _, _, r in columns], np.uint8),
        "weight": np.asarray(
            [float(ok and g.number not in zero) for ok, (g, _, _) in zip(scored, columns, strict=True)], np.float32
        ),
    }
    if turns is not None:
        data["sampled"] = np.concatenate([row.sampled for row in rows])
    return _ordered(save(data, {"job": job_id, "step": str(step), "format": BATCH_FORMAT}))


def _ordered(packed: bytes) -> bytes:
    """The same file with its header sorted: the library writes metadata in any order, and a file made again must have the same bytes."""
    body = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
    header = json.dumps(json.loads(packed[_LENGTH_BYTES:body]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + packed[body:]


@dataclass(frozen=True, slots=True)
class Completion:
    """What follows a prompt, [T] each. A token that the environment placed has log-prob 0 and the version of the turn before it."""

    token_ids: NDArray[np.generic]
    logprobs: NDArray[np.generic]
    versions: NDArray[np.generic]
    sampled: NDArray[np.bool_]


def completion(arrays: Mapping[str, Arrays], rollout: Rollout, before: Sequence[Turn]) -> Completion:
    """A rollout's whole record from its turns' arrays, by blob."""
    if not before:
        ids, logs, versions = tokens_of(arrays[rollout.blob or ""], rollout)
        return Completion(ids, logs, versions, np.ones(len(ids), np.bool_))
    parts = [_turn(arrays, turn) for turn in before] + [completion(arrays, rollout, ())]
    return Completion(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.versions for part in parts]),
        np.concatenate([part.sampled for part in parts]),
    )


def _turn(arrays: Mapping[str, Arrays], turn: Turn) -> Completion:
    ids, logs, versions = tokens_of(arrays[turn.blob], turn)
    placed = len(turn.token_ids) - turn.length
    return Completion(
        np.concatenate([ids, np.asarray(turn.token_ids[turn.length :], np.int32)]),
        np.concatenate([logs, np.zeros(placed, np.float32)]),
        np.concatenate([versions, np.full(placed, versions[-1], np.int32)]),
        np.arange(len(turn.token_ids)) < turn.length,
    )
