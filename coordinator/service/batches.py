"""Assembles the batch file that the learner trains on, from settled rollouts and their stored arrays.

The file is a pure function of the rows and blobs: group-major, slot-minor, in ascending group number. A replay therefore
reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from coordinator.domain.model import Group, Rollout, RolloutState
from coordinator.wire.frames import decode_frame
from coordinator.wire.learner_link import BATCH_FORMAT

Arrays = Mapping[str, NDArray[np.generic]]


def carried(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of a group that have tokens, by slot."""
    return sorted((r for r in rollouts if r.blob is not None), key=lambda r: r.slot)


def tokens_of(arrays: Arrays, rollout: Rollout) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
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
) -> bytes:
    """The safetensors bytes described at `coordinator.wire.learner_link.BATCH_FORMAT`.

    `rollouts` maps group id to its rollouts, `frames` maps blob digest to the stored frame, `zero` holds the numbers of
    groups that are carried without signal (weight 0).
    """
    arrays = {digest: decode_frame(frame)[1] for digest, frame in frames.items()}
    prompts, columns = [], [(g, place, r) for place, g in enumerate(groups) for r in carried(rollouts[g.id])]
    tokens, logprobs, versions = [], [], []
    for group, _, rollout in columns:
        prompts.append(np.asarray(group.prompt_ids, np.int32))
        ids, logs, spans = tokens_of(arrays[rollout.blob or ""], rollout)
        tokens.append(ids)
        logprobs.append(logs)
        versions.append(spans)
    scored = [r.state is RolloutState.SCORED and r.reward is not None for _, _, r in columns]
    data = {
        "prompt_ids": np.concatenate(prompts).astype(np.int32),
        "prompt_lengths": np.asarray([len(p) for p in prompts], np.int32),
        "token_ids": np.concatenate(tokens).astype(np.int32),
        "lengths": np.asarray([len(t) for t in tokens], np.int32),
        "logprobs": np.concatenate(logprobs).astype(np.float32),
        "versions": np.concatenate(versions).astype(np.int32),
        "rewards": np.asarray([r.reward if ok else np.nan for ok, (_, _, r) in zip(scored, columns, strict=True)], np.float32),
        "group": np.asarray([place for _, place, _ in columns], np.int32),
        "truncated": np.asarray([r.stop_reason == "length" for _, _, r in columns], np.uint8),
        "weight": np.asarray(
            [float(ok and g.number not in zero) for ok, (g, _, _) in zip(scored, columns, strict=True)], np.float32
        ),
    }
    packed: bytes = save(data, {"job": job_id, "step": str(step), "format": BATCH_FORMAT})
    return packed
