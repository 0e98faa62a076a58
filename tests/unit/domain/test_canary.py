"""The canary's verdict, and back-off."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.domain.canary import TOLERANCE, judge, scripted
from coordinator.domain.retry import delay_s, learner_restart

EXPECTED = (-1.0, -2.0, -3.0)


def verdict(sent, *, previous=None, changed=True, tolerance=1e-4):
    return judge(sent, EXPECTED, previous=previous, digest_changed=changed, tolerance=tolerance)


def test_the_published_bits_pass() -> None:
    """Within the tolerance of the precision."""
    assert verdict((-1.00009, -2.0, -3.0), previous=(-5.0, -5.0, -5.0)) == (True, "the canary agrees within 9e-05")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ((-1.0, -2.0), "canary_length"),
        ((-1.0, float("nan"), -3.0), "canary_not_finite"),
        ((-1.0, float("-inf"), -3.0), "canary_not_finite"),
        ((-1.0002, -2.0, -3.0), "wrong_canary"),
    ],
)
def test_wrong_answers_are_named(sent, code) -> None:
    """Length, finiteness, difference."""
    ok, reason = verdict(sent)
    assert not ok
    assert reason.startswith(code + ":")


def test_a_swap_without_effect_is_found() -> None:
    """The same answer for other weights, even within the tolerance."""
    ok, reason = verdict(EXPECTED, previous=list(EXPECTED), tolerance=TOLERANCE["bfloat16"])
    assert not ok
    assert reason.startswith("canary_unchanged:")


def test_the_same_weights_may_answer_the_same() -> None:
    """After a restart the digest did not change."""
    assert verdict(EXPECTED, previous=EXPECTED, changed=False)[0]


def test_an_empty_canary_agrees() -> None:
    """Nothing to compare is no difference."""
    assert judge((), (), previous=None, digest_changed=True, tolerance=0.0)[0]


def test_scripted_answers_depend_on_the_digest() -> None:
    """Negative values, the same on both sides, different for other weights."""
    assert scripted("a" * 64, 23) == scripted("a" * 64, 23)
    assert scripted("a" * 64, 23) != scripted("b" * 64, 23)
    assert all(value < 0 for value in scripted("a" * 64, 23))


@pytest.mark.parametrize(("attempt", "most"), [(-1, 0.5), (0, 0.5), (1, 1.0), (3, 4.0), (10, 10.0), (10_000, 10.0)])
def test_full_jitter(attempt: int, most: float) -> None:
    """Uniform between nothing and the doubled, bounded delay."""
    rng = Random(0)
    delays = [delay_s(attempt, first_s=0.5, most_s=10.0, rng=rng) for _ in range(400)]
    assert all(0.0 <= delay <= most for delay in delays)
    assert max(delays) > 0.9 * most
    assert min(delays) < 0.1 * most


def test_learner_restarts_back_off_and_end() -> None:
    """1, 2, 4 ... at most 60 s; none after the limit."""
    assert [learner_restart(n, limit=8) for n in range(9)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]
