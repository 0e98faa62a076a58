"""A batch file is taken exactly as sealed, or refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from coordinator.learner import batch_file
from coordinator.learner.errors import BatchInvalid

STEP = 3


def put(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return blake3(data).hexdigest()


def read(path: Path, digest: str, **changed: Any) -> batch_file.Batch:
    asked: dict[str, Any] = {"digest": digest, "job_id": "job-1", "step": STEP, "vocab_size": 32} | changed
    return batch_file.read(path, **asked)


def test_what_was_sealed_is_read(tmp_path: Path, made: ModuleType) -> None:
    arrays = made.arrays(step=STEP)
    digest = put(tmp_path / "b", made.file_bytes(arrays, step=STEP))
    batch = read(tmp_path / "b", digest)
    assert batch.rollouts == 8
    assert all(np.array_equal(getattr(batch, name), value) for name, value in arrays.items())


def test_staleness_is_the_step_minus_the_oldest_token(made: ModuleType) -> None:
    batch = made.batch(
        step=STEP,
        lengths=np.array([2, 1], np.int32),
        versions=np.array([3, 1, 2], np.int32),
    )
    assert batch.staleness() == [2, 1]


def test_tokens_of_the_environment_count_for_nothing(tmp_path: Path, made: ModuleType) -> None:
    """Their log-probs and versions may be anything; a file that does not speak of them has none."""
    arrays = made.arrays(step=STEP)
    sampled = np.ones(len(arrays["token_ids"]), np.bool_)
    assert np.array_equal(read(tmp_path / "b", put(tmp_path / "b", made.file_bytes(arrays, step=STEP))).sampled, sampled)
    arrays["lengths"] = np.array([2, *([1] * 6), len(sampled) - 8], np.int32)
    sampled[1] = False
    arrays |= {"sampled": sampled, "logprobs": arrays["logprobs"].copy(), "versions": arrays["versions"].copy()}
    arrays["logprobs"][1], arrays["versions"][0], arrays["versions"][1] = math.nan, STEP, -9
    batch = read(tmp_path / "b", put(tmp_path / "b", made.file_bytes(arrays, step=STEP)))
    assert batch.sampled_lengths.tolist() == [1, *([1] * 6), len(sampled) - 8]
    assert batch.staleness()[0] == 0


def test_another_digest_is_refused(tmp_path: Path, made: ModuleType) -> None:
    put(tmp_path / "b", made.file_bytes(made.arrays(step=STEP), step=STEP))
    with pytest.raises(BatchInvalid, match="batch_digest is 00"):
        read(tmp_path / "b", "00")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchInvalid, match="cannot be read"):
        read(tmp_path / "none", "00")


@pytest.mark.parametrize("data", [b"", b"\x05", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_bytes_that_are_no_batch_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BatchInvalid):
        read(tmp_path / "b", put(tmp_path / "b", data))


@pytest.mark.parametrize("change", [{"job": "job-2"}, {"form": "echo2-batch-2"}, {"step": STEP + 1}])
def test_metadata_must_name_this_job_step_and_format(tmp_path: Path, made: ModuleType, change: dict[str, Any]) -> None:
    data = made.file_bytes(made.arrays(step=STEP), **({"step": STEP} | change))
    with pytest.raises(BatchInvalid, match="metadata"):
        read(tmp_path / "b", put(tmp_path / "b", data))


def changed(name: str, place: int, value: float) -> Callable[[dict[str, Any]], None]:
    def apply(arrays: dict[str, Any]) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][place] = value

    return apply


def recast(name: str, dtype: type) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({name: arrays[name].astype(dtype)})


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an array is missing": (lambda arrays: arrays.pop("weight"), "expected exactly"),
    "an array too many": (lambda arrays: arrays.update(more=np.zeros(1, np.int32)), "expected exactly"),
    "another dtype": (recast("lengths", np.int64), "array lengths is int64"),
    "another rank": (lambda arrays: arrays.update(rewards=arrays["rewards"][:, None]), "one-dimensional"),
    "no rollouts": (lambda arrays: arrays.update({name: value[:0] for name, value in arrays.items()}), "no rollouts"),
    "too few rewards": (lambda arrays: arrays.update(rewards=arrays["rewards"][:-1]), "array rewards has 7"),
    "too few log-probs": (lambda arrays: arrays.update(logprobs=arrays["logprobs"][:-1]), "array logprobs has"),
    "an empty completion": (changed("lengths", 0, 0), "at least one token"),
    "an id above the vocabulary": (changed("token_ids", 0, 32), "vocabulary is 0..31"),
    "a negative prompt id": (changed("prompt_ids", 0, -1), "vocabulary is 0..31"),
    "a positive log-prob": (changed("logprobs", 2, 0.1), "finite and <= 0"),
    "a log-prob that is no number": (changed("logprobs", 2, math.nan), "finite and <= 0"),
    "an infinite reward": (changed("rewards", 0, math.inf), "infinity"),
    "a negative weight": (changed("weight", 0, -1), "array weight"),
    "a weight that is no number": (changed("weight", 0, math.nan), "array weight"),
    "truncated is 2": (changed("truncated", 0, 2), "must be 0 or 1"),
    "sampled is no boolean": (
        lambda arrays: arrays.update(sampled=np.ones(len(arrays["token_ids"]), np.uint8)),
        "array sampled is uint8",
    ),
    "sampled is too short": (lambda arrays: arrays.update(sampled=np.ones(3, np.bool_)), "array sampled has 3"),
    "nothing is sampled": (
        lambda arrays: arrays.update(sampled=np.zeros(len(arrays["token_ids"]), np.bool_)),
        "without a sampled token",
    ),
    "groups start at 1": (lambda arrays: arrays.update(group=arrays["group"] + np.int32(1)), "count up from 0"),
    "groups go back": (changed("group", 1, 1), "count up from 0"),
    "a version of the future": (changed("versions", 0, STEP + 1), "cannot be trained in step 3"),
    "a negative version": (changed("versions", 0, -1), "cannot be trained in step 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_format_is_refused_by_name(tmp_path: Path, made: ModuleType, name: str) -> None:
    change, reason = BROKEN[name]
    arrays = made.arrays(step=STEP)
    change(arrays)
    with pytest.raises(BatchInvalid, match=reason):
        read(tmp_path / "b", put(tmp_path / "b", made.file_bytes(arrays, step=STEP)))
