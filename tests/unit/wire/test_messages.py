"""Messages are strict about names, and bounded wherever a number reaches an array or a row."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.wire import messages as wire

CONFIRM: dict[str, Any] = {"session_epoch": 1, "job_id": "j", "version": 0, "digest": "a" * 64, "canary_logprobs": [-1.0]}
HEAD: dict[str, Any] = {
    "session_epoch": 1,
    "lease_id": "l",
    "fence": 1,
    "digests": {"0": "a" * 64},
    "completions": [{"slot": 0, "length": 1, "stop_reason": "stop", "generate_s": 0.1}],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": -1},
        {"version": 2**31},
        {"session_epoch": 0},
        {"session_epoch": 2**62},
        {"fetched_bytes": 2**62},
        {"digest": "A" * 64},
        {"canary_logprobs": [float("nan")]},
        {"job_id": "x" * 201},
        {"more": 1},
    ],
)
def test_a_confirm_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    wire.Confirm.model_validate(CONFIRM)
    with pytest.raises(ValidationError):
        wire.Confirm.model_validate(CONFIRM | wrong)


@pytest.mark.parametrize("key", ["-1", "01", "1.0", " 1", "one", "1" * 11, "²"])
def test_versions_in_a_submission_are_plain_decimals(key: str) -> None:
    wire.SubmitHead.model_validate(HEAD)
    with pytest.raises(ValidationError):
        wire.SubmitHead.model_validate(HEAD | {"digests": {key: "a" * 64}})


@pytest.mark.parametrize("slot", [-1, 4096, 2**70])
def test_slots_are_bounded(slot: int) -> None:
    with pytest.raises(ValidationError):
        wire.SubmitHead.model_validate(HEAD | {"completions": [HEAD["completions"][0] | {"slot": slot}]})
