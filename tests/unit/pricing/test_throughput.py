"""Estimates start from the claim, follow what is seen, and forget."""

from __future__ import annotations

from math import exp, inf, log, sqrt

import numpy as np
import pytest

from pricing.throughput import CLAIM_S, Reliability, Throughput, losses_per_hour


def test_the_claim_until_something_is_seen() -> None:
    """With the claim's own doubt."""
    claim = Throughput(2.0, at=0)
    assert (claim.rate(0), claim.deviation(0)) == (2.0, 1.0)
    assert claim.surely(0, 3) == 0.0


def test_one_window_is_worth_the_claim() -> None:
    """Half way between them, with the doubt of both: half the variance."""
    seen = Throughput(2.0, at=0).observed(4 * CLAIM_S, CLAIM_S, now=0)
    assert seen.rate(0) == pytest.approx(3.0)
    assert seen.deviation(0) == pytest.approx(sqrt(0.5) * 2.0)
    assert seen.surely(0) == pytest.approx(3.0 - sqrt(2))


def test_silence_counts() -> None:
    """A worker that brings nothing is believed to bring less and less."""
    estimate, rates = Throughput(2.0, at=0), []
    for now in range(0, 300, 30):
        estimate = estimate.observed(0.0, 30.0, now=now)
        rates.append(estimate.rate(now))
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1
    assert Throughput(0.0, at=0).observed(0.0, 30.0, now=0).rate(0) == 0.0


def test_it_forgets() -> None:
    """The claim comes back, from half way at once to all the way long after."""
    seen = Throughput(2.0, at=0, half_life_s=100).observed(4 * CLAIM_S, CLAIM_S, now=0)
    rates = [seen.rate(when) for when in (0, 100, 200, 1e5)]
    assert rates == sorted(rates, reverse=True)
    assert rates[1] == pytest.approx(2 + 2 / (1 + 4))  # half the evidence: four times the variance
    assert rates[-1] == pytest.approx(2.0)
    assert seen.rate(-50) == pytest.approx(3.0)  # a clock that stepped back


def test_the_deviation_is_that_of_the_mean() -> None:
    """400 windows of Poisson counts at 5/s: the truth lies within two deviations about as often as it should."""
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        estimate = Throughput(5.0, at=0, half_life_s=inf)
        for _ in range(100):
            estimate = estimate.observed(float(random.poisson(5.0 * 10)), 10.0, now=0)
        assert estimate.deviation(0) == pytest.approx(sqrt(5.0 / 1000), rel=0.4)
        hits += abs(estimate.rate(0) - 5.0) < 2 * estimate.deviation(0)
    assert 180 <= hits <= 200


@pytest.mark.parametrize(("done", "seconds"), [(1, 0), (-1, 1), (1, float("nan"))])
def test_no_window(done: float, seconds: float) -> None:
    """Not an observation."""
    with pytest.raises(ValueError, match="give a window of more than 0 s"):
        Throughput(1.0, at=0).observed(done, seconds, now=0)


def test_reliability_starts_with_the_claim() -> None:
    """Whatever it is."""
    for claim in (1.0, 0.9, 0.2):
        assert Reliability(claim, at=0).hourly(0) == pytest.approx(claim)
    assert Reliability(0.0, at=0).observed(100, 0, now=0).hourly(0) == 0.0


def test_reliability_follows_the_leases() -> None:
    """One loss in 1,000 h: the Poisson rate, whatever was claimed; none at all raises it, losses lower it."""
    seen = Reliability(0.9, at=0).observed(100_000, 100, now=0)
    assert seen.hourly(0) == pytest.approx(exp(-1 / 1000), abs=1e-5)
    assert Reliability(0.9, at=0).observed(50, 0, now=0).hourly(0) > 0.98
    assert Reliability(0.99, at=0).observed(1, 3, now=0).hourly(0) < 0.7
    assert seen.hourly(1e9) == pytest.approx(0.9)


def test_no_lease_time() -> None:
    """Negative figures are none."""
    with pytest.raises(ValueError, match="-1 losses in 1 h"):
        Reliability(0.9, at=0).observed(1, -1, now=0)


def test_losses_of_a_chance() -> None:
    """The exponential law."""
    assert losses_per_hour(0.5) == pytest.approx(log(2))
    assert losses_per_hour(1.0) == 0
    assert losses_per_hour(0.0) == inf
