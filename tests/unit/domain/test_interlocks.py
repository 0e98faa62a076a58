"""When the interlocks speak, what they say, and when S goes down."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain import interlocks
from coordinator.domain.interlocks import APPLIED, EFFECTIVE_SAMPLES, ENTROPY, LOGPROB_GAP, MISMATCH_KL, OLDEST, TRUNCATED

FINE = {EFFECTIVE_SAMPLES: 0.95, MISMATCH_KL: 0.01, ENTROPY: 2.0}
BAD = {
    "low_effective_sample_size": {**FINE, EFFECTIVE_SAMPLES: 0.89},
    "high_mismatch_kl": {**FINE, MISMATCH_KL: 0.11},
    "entropy_collapse": {**FINE, ENTROPY: 0.19},
    "nothing_trained": {**FINE, APPLIED: 0.0},
}


def codes(recent: list[dict[str, float]], *, step: int = 7, **given: Any) -> list[str]:
    found = interlocks.alarms(recent, **{"step": step, "first_entropy": 2.0, "bound": 4, **given})
    return [alarm.code for alarm in found]


@pytest.mark.parametrize("code", BAD)
def test_three_steps_past_the_limit_raise_one_alarm(code: str) -> None:
    bad = BAD[code]
    assert codes([FINE, FINE, bad, bad]) == []
    assert codes([FINE, bad, bad, bad]) == [code]
    assert codes([bad, bad, bad, bad]) == []
    assert codes([bad, bad, FINE, bad]) == []


@pytest.mark.parametrize("code", BAD)
def test_it_is_said_again_every_tenth_step(code: str) -> None:
    assert codes([BAD[code]] * 4, step=20) == [code]
    assert codes([FINE, FINE, BAD[code], BAD[code]], step=20) == []


@pytest.mark.parametrize("code", BAD)
def test_the_first_three_steps_of_a_job_can_raise_it(code: str) -> None:
    assert codes([BAD[code]] * 3, step=2) == [code]
    assert codes([BAD[code]] * 2, step=1) == []


@given(steps=st.integers(0, 4))
def test_what_was_not_measured_is_no_alarm(steps: int) -> None:
    assert codes([{}] * steps) == []
    assert codes([BAD["entropy_collapse"]] * steps, first_entropy=None) == []


def test_several_at_once_are_all_said() -> None:
    all_bad = BAD["low_effective_sample_size"] | {MISMATCH_KL: 1.0, ENTROPY: 0.0, APPLIED: 0.0}
    assert codes([FINE] + [all_bad] * 3) == list(BAD)


def test_the_words_give_the_figure_and_the_way_out() -> None:
    (alarm,) = interlocks.alarms([BAD["high_mismatch_kl"]] * 3, step=2, first_entropy=2.0, bound=4)
    assert "0.110 nats a token, over 0.1 for 3 steps" in alarm.words
    assert "Lower staleness.max (4 now)" in alarm.words
    (alarm,) = interlocks.alarms([BAD["high_mismatch_kl"]] * 3, step=2, first_entropy=2.0, bound=1)
    assert "staleness.max" not in alarm.words
    assert "Lower algorithm.learning_rate" in alarm.words


def drift(code: str) -> interlocks.Alarm:
    return interlocks.Alarm(code, "", is_drift=True)


def test_s_goes_down_by_one_where_the_job_allows_it() -> None:
    found = [drift("low_effective_sample_size"), drift("high_mismatch_kl")]
    lower = interlocks.reduced_bound(found, bound=4, is_allowed=True)
    assert lower is not None
    assert lower[0] == 3
    assert "low_effective_sample_size and high_mismatch_kl at S = 4" in lower[1]
    assert interlocks.reduced_bound(found, bound=4, is_allowed=False) is None
    assert interlocks.reduced_bound(found, bound=1, is_allowed=True) is None
    assert interlocks.reduced_bound([], bound=4, is_allowed=True) is None


def test_a_collapse_is_no_matter_of_fresher_data() -> None:
    (alarm,) = interlocks.alarms([BAD["entropy_collapse"]] * 3, step=2, first_entropy=2.0, bound=4)
    assert interlocks.reduced_bound([alarm], bound=4, is_allowed=True) is None


def test_samplers_that_disagree_on_fresh_data_are_named_at_once() -> None:
    fresh, aged = {OLDEST: 0.0, LOGPROB_GAP: 0.2}, {OLDEST: 1.0, LOGPROB_GAP: 0.2}
    assert codes([fresh], step=0) == ["samplers_disagree"]
    assert codes([fresh, fresh], step=1) == []
    assert codes([fresh | {LOGPROB_GAP: 0.05}], step=0) == []
    assert codes([aged], step=0) == []


def test_steps_that_train_nothing_say_what_there_was() -> None:
    figures = {APPLIED: 0.0, TRUNCATED: 1.0}
    (alarm,) = interlocks.alarms([figures] * 3, step=2, first_entropy=None, bound=4)
    assert "100% of the rollouts hit the length cap, 0% have no score" in alarm.words
