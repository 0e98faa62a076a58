"""Figures from rows: the arithmetic, and that nothing unknown reads as zero."""

from __future__ import annotations

import pytest

from coordinator.domain.model import Batch, BatchState, Job, JobState, Metric, WorkerSession
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.operator_figures import (
    active_s,
    figure,
    learner_view,
    rate_view,
    rate_window_s,
    staleness_view,
)
from coordinator.service.operator_jobs import patched
from coordinator.wire.job import JobConfig, JobPatch

CONFIG = JobConfig.model_validate(
    {
        "name": "n",
        "model": "m",
        "environment": {"type": "digit_sort"},
        "algorithm": {"group_size": 4, "groups_per_step": 8},
        "staleness": {"max": 3},
        "budget": {"steps": 10, "usd": 1.0},
    }
)
JOB = Job("j", "n", "o", CONFIG, JobState.RUNNING, "", 0.0, 1000.0, "/m", committed_steps=4)


def batch(step, *, state=BatchState.COMMITTED, train_s=2.0, waited_s=1.0, staleness=None):
    return Batch("j", step, state, (0,), "/p", "d", 32, False, staleness or {"1": 8}, 0.0, waited_s, 1.0, train_s)


def test_utilisation_counts_committed_steps_only():
    view = learner_view(JOB, [batch(0), batch(1, train_s=4.0, waited_s=1.0), batch(2, state=BatchState.SEALED, train_s=99.0)])
    assert (view.utilisation, view.train_s, view.waited_s, view.steps_counted) == (6.0 / 8.0, 6.0, 2.0, 2)
    assert learner_view(JOB, []).utilisation is None


def test_the_histogram_adds_up_and_knows_its_highest():
    view = staleness_view(JOB, [batch(0, staleness={"0": 8}), batch(1, staleness={"0": 5, "10": 1, "2": 2})])
    assert view.histogram == {"0": 13, "2": 2, "10": 1}
    assert list(view.histogram) == ["0", "2", "10"]
    assert (view.highest, view.bound) == (10, 3)
    assert staleness_view(JOB, []).highest is None


def test_the_required_rate_is_r_over_training_time():
    view = rate_view(JOB, [batch(step) for step in range(30)], accepted=150, window_s=300.0)
    assert (view.accepted_per_s, view.required_per_s) == (0.5, 16.0)
    assert rate_view(JOB, [], accepted=0, window_s=0.0).required_per_s is None
    assert rate_window_s(JOB, now=1010.0) == 10.0
    assert rate_window_s(JOB, now=9999.0) == 300.0


def test_active_time_is_that_of_the_sessions():
    sessions = [
        WorkerSession("a", 1, 0.0, 3600.0, 1_000_000, ended_at=3600.0),
        WorkerSession("b", 1, 2000.0, 2900.0, 400_000),
    ]
    assert active_s(sessions) == 4500.0


def test_what_is_not_finite_is_not_a_figure():
    assert figure(None) is None
    assert figure(Metric("j", "m", 1, 2.0, float("inf"))).value is None


def test_a_patch_changes_what_it_names_and_nothing_else():
    changed = patched(JOB, JobPatch(staleness_max=5))
    assert changed.staleness.max == 5
    assert changed.model_copy(update={"staleness": CONFIG.staleness}) == CONFIG
    assert patched(JOB, JobPatch(publish_every=2)).staleness.publish_every == 2
    budget = JobPatch.model_validate({"budget": {"steps": 4}})
    assert patched(JOB, budget).budget.usd is None


def test_a_patch_that_cannot_be():
    for patch, code in ((JobPatch(), "nothing_to_change"), ({"budget": {"steps": 3}}, "steps_already_committed")):
        with pytest.raises(RequestRefused) as refused:
            patched(JOB, JobPatch.model_validate(patch))
        assert refused.value.code == code
