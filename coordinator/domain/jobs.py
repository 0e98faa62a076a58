"""When a job has stayed in a state for too long (law 5), and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.domain.model import Job, JobState

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The longest stay in each state, seconds."""

    queued_s: float = 7 * 24 * _HOUR_S
    starting_s: float = 2 * _HOUR_S
    no_progress_s: float = 24 * _HOUR_S  # between two committed steps
    paused_s: float = 30 * 24 * _HOUR_S
    finishing_s: float = 6 * _HOUR_S


def overdue(job: Job, *, now: float, progressed_at: float, limits: JobLimits) -> tuple[str, str] | None:
    """The event (of `states.JOB`) and the reason that end the job's state now; None while it is in time.

    `progressed_at` is when a step was last committed, or when the job began to run.
    """
    match job.state:
        case JobState.QUEUED:
            return _after("failed", now - job.state_since, limits.queued_s, "queued for want of a free place")
        case JobState.STARTING:
            return _after("failed", now - job.state_since, limits.starting_s, "its learner did not become ready")
        case JobState.RUNNING:
            since = max(progressed_at, job.state_since)
            return _after("failed", now - since, limits.no_progress_s, "no step was committed")
        case JobState.PAUSED:
            return _after("cancelled", now - job.state_since, limits.paused_s, "paused and not resumed")
        case JobState.FINISHING:
            return _after("failed", now - job.state_since, limits.finishing_s, "its last evaluation did not end")
        case _:
            return None


def _after(event: str, stayed_s: float, limit_s: float, what: str) -> tuple[str, str] | None:
    if stayed_s <= limit_s:
        return None
    return event, f"overdue: {what} for {stayed_s:.0f} s, the limit is {limit_s:.0f} s"
