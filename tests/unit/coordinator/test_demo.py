"""The demo's report and view: what is computed from what REST told."""

from __future__ import annotations

import pytest

from coordinator.demo import report
from coordinator.demo.job import DemoOptions, demo_job
from coordinator.demo.view import sparkline
from coordinator.wire.job import JobConfig


def told(**changes) -> report.Told:
    """A finished job of three steps."""
    job = {
        "state": "completed",
        "reason": "",
        "committed_steps": 3,
        "config": {"staleness": {"max": 2}, "algorithm": {"group_size": 4}},
        "staleness": {"highest": 1, "histogram": {"0": 4, "1": 2}},
        "work": {
            "groups": {"trained": 6, "rejected": 1},
            "rejected": {"no_signal": 4},
            "refused": {"lease_expired": 2, "no_signal": 1},
        },
        "cost_estimate_uusd": 1500,
    }
    worker = {
        "name": "a",
        "price_uusd_per_hour": 350_000,
        "accepted_rollouts": 9,
        "accepted_tokens": 90,
        "tokens_per_s": 3.0,
        "active_s": 2.0,
        "cost_estimate_uusd": 194,
        "holdings": [{"fetched_bytes": 100, "fetched_from_peers_bytes": 40}, {"fetched_bytes": 10, "fetched_from_peers_bytes": 0}],
    }
    series = {
        "reward/all/mean": [(0, 0.1), (1, 0.2), (2, 0.6)],
        "eval/all/mean": [(0, 0.25), (3, 0.75)],
        "time/step": [(0, 1.0), (1, 2.0), (2, 2.0)],
        "time/wait_for_batch": [(0, 50.0), (1, 1.0), (2, 0.0)],
    }
    values = {
        "job": job,
        "workers": [worker, {**worker, "name": "b", "accepted_rollouts": 0, "holdings": []}],
        "series": series,
        "audit": {"ok": True, "counts": {"issued": 7}},
        "wall_s": 12.5,
        "killed": None,
    }
    return report.Told(**{**values, **changes})


def test_report() -> None:
    """Each promised field, worked out by hand."""
    built = report.build(told())
    assert built["steps"] == 3
    assert (built["S"], built["max_staleness"]) == (2, 1)
    assert built["reward_first10"] == pytest.approx(0.3)
    assert (built["greedy_before"], built["greedy_after"]) == (0.25, 0.75)
    assert built["workers_contributing"] == 1
    assert built["learner_utilisation"] == pytest.approx(4 / 5)  # step 0 waits for workers to join and is left out
    assert built["admitted"] == 24
    assert built["rejected"] == {"no_signal": 5, "lease_expired": 2}
    assert (built["bytes_to_workers"], built["bytes_from_peers"]) == (110, 40)
    assert built["simulated_cost_usd"] == 0.0015


def test_nothing_measured_is_null() -> None:
    """No step, no figure: null, not zero."""
    built = report.build(told(series={}))
    assert built["reward_last10"] is None
    assert built["learner_utilisation"] is None
    assert built["greedy_before"] is None


def test_moving_average() -> None:
    """The mean with up to width - 1 points before."""
    assert report.moving_average([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]


def test_sparkline_is_bounded() -> None:
    """Any number of points fits the line; 0 is empty, 1 is full."""
    assert len(sparkline([(n, 0.5) for n in range(1000)], 72)) <= 72
    assert sparkline([(0, 0.0), (1, 1.0)]) == " █"
    assert sparkline([]) == ""


@pytest.mark.parametrize("staleness", [0, 3])
def test_demo_job_is_a_job(staleness: int) -> None:
    """The demo's job passes the job file's own validation."""
    config = JobConfig.model_validate(demo_job(DemoOptions(steps=7, staleness=staleness), "/m"))
    assert (config.staleness.max, config.budget.steps, config.rollouts_per_step) == (staleness, 7, 128)
