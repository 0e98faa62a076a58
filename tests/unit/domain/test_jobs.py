"""Jobs that stay in a state for too long."""

from __future__ import annotations

import pytest

from coordinator.domain.jobs import JobLimits, overdue
from coordinator.domain.model import JobState
from coordinator.domain.states import JOB, move

LIMITS = JobLimits(queued_s=10, starting_s=20, no_progress_s=30, paused_s=40, finishing_s=50)


@pytest.mark.parametrize(
    ("state", "limit", "event"),
    [
        (JobState.QUEUED, 10, "failed"),
        (JobState.STARTING, 20, "failed"),
        (JobState.RUNNING, 30, "failed"),
        (JobState.PAUSED, 40, "cancelled"),
        (JobState.FINISHING, 50, "failed"),
    ],
)
def test_each_state_ends_after_its_limit(make_job, state: JobState, limit: float, event: str) -> None:
    """In time up to the limit, ended by a legal event after it, with a reason that names both times."""
    job = make_job(state=state, state_since=100.0)
    assert overdue(job, now=100.0 + limit, progressed_at=0.0, limits=LIMITS) is None
    ended = overdue(job, now=101.0 + limit, progressed_at=0.0, limits=LIMITS)
    assert ended is not None
    assert ended[0] == event
    assert f"{limit} s" in ended[1]
    move(JOB, state, event)


def test_progress_keeps_a_running_job_alive(make_job) -> None:
    """The limit of a running job counts from its last committed step."""
    job = make_job(state=JobState.RUNNING, state_since=0.0)
    assert overdue(job, now=1000.0, progressed_at=980.0, limits=LIMITS) is None


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_ended_jobs_have_no_timer(make_job, state: JobState) -> None:
    """Nothing happens to a job that ended."""
    assert overdue(make_job(state=state), now=1e12, progressed_at=0.0, limits=LIMITS) is None
