"""State machines as tables: state -> event -> next state. Events are facts in the past tense.

An event that is not in a state's row is illegal there: `move` raises and nothing changes. `TERMINAL` holds the states that
nobody waits to see end; a few have a late move all the same (a worker that is gone may join again, a retired version may
turn out to be rolled back, and rolled-back bits may come out of a second replay). Every other state has a timer in `TIMERS` (law 5): what ends it when nothing else happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from coordinator.domain.model import (
    BatchState,
    GroupState,
    JobState,
    LeaseState,
    PublicationState,
    RolloutState,
    WorkerState,
)

S = TypeVar("S", bound=StrEnum)
Table: TypeAlias = Mapping[S, Mapping[str, S]]


class IllegalMove(Exception):
    """An event that its state does not allow; the state is untouched."""


def move(table: Table[S], state: S, event: str) -> S:
    """The state after `event`. Raises IllegalMove, naming the events that are allowed."""
    allowed = table[state]
    if event not in allowed:
        names = ", ".join(sorted(allowed)) or "none: the state is final"
        raise IllegalMove(f"{type(state).__name__} {state.value!r} does not allow event {event!r}; allowed: {names}")
    return allowed[event]


# A job leaves PAUSED towards the state it was paused in (Job.resume_state): see `resumed_event`. A lost learner is started
# again through STARTING, which leads on to RUNNING and, when the planned steps are already committed, to FINISHING.
JOB: Final[Table[JobState]] = {
    JobState.QUEUED: {
        "learner_started": JobState.STARTING,
        "pause_requested": JobState.PAUSED,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
    },
    JobState.STARTING: {
        "learner_ready": JobState.RUNNING,
        "learner_lost": JobState.STARTING,
        "pause_requested": JobState.PAUSED,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
    },
    JobState.RUNNING: {
        "steps_done": JobState.FINISHING,
        "learner_lost": JobState.STARTING,
        "pause_requested": JobState.PAUSED,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
    },
    JobState.PAUSED: {
        "resumed_queued": JobState.QUEUED,
        "resumed_starting": JobState.STARTING,
        "resumed_running": JobState.RUNNING,
        "resumed_finishing": JobState.FINISHING,
        "steps_done": JobState.FINISHING,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
    },
    JobState.FINISHING: {
        "finished": JobState.COMPLETED,
        "learner_lost": JobState.STARTING,
        "pause_requested": JobState.PAUSED,
        "failed": JobState.FAILED,
        "cancelled": JobState.CANCELLED,
    },
    JobState.COMPLETED: {},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
}


def resumed_event(resume_state: JobState | None) -> str:
    """The event that leads a paused job back; without a remembered state it queues again."""
    return f"resumed_{(resume_state or JobState.QUEUED).value}"


# Quarantine outlives the worker's presence: leaving, being lost and joining again do not end it. Its timer does
# (`quarantine_served`), or an operator (`released`): the worker is then gone until it joins again, because its session
# ended with the quarantine and no time is paid for between the two.
WORKER: Final[Table[WorkerState]] = {
    WorkerState.STANDBY: {
        "rejoined": WorkerState.STANDBY,
        "version_confirmed": WorkerState.ACTIVE,
        "drain_ordered": WorkerState.DRAINING,
        "quarantined": WorkerState.QUARANTINED,
        "left": WorkerState.GONE,
        "lost": WorkerState.GONE,
    },
    WorkerState.ACTIVE: {
        "rejoined": WorkerState.STANDBY,
        "version_confirmed": WorkerState.ACTIVE,
        "version_outdated": WorkerState.STANDBY,
        "drain_ordered": WorkerState.DRAINING,
        "quarantined": WorkerState.QUARANTINED,
        "left": WorkerState.GONE,
        "lost": WorkerState.GONE,
    },
    WorkerState.DRAINING: {
        "rejoined": WorkerState.STANDBY,
        "version_confirmed": WorkerState.DRAINING,
        "drain_ordered": WorkerState.DRAINING,
        "released": WorkerState.STANDBY,
        "quarantined": WorkerState.QUARANTINED,
        "left": WorkerState.GONE,
        "lost": WorkerState.GONE,
    },
    WorkerState.QUARANTINED: {
        "rejoined": WorkerState.QUARANTINED,
        "version_confirmed": WorkerState.QUARANTINED,
        "quarantined": WorkerState.QUARANTINED,
        "left": WorkerState.QUARANTINED,
        "lost": WorkerState.QUARANTINED,
        "released": WorkerState.GONE,
        "quarantine_served": WorkerState.GONE,
    },
    WorkerState.GONE: {"rejoined": WorkerState.STANDBY, "quarantined": WorkerState.QUARANTINED},
}

LEASE: Final[Table[LeaseState]] = {
    LeaseState.LIVE: {
        "all_settled": LeaseState.DONE,
        "expired": LeaseState.EXPIRED,
        "died": LeaseState.DEAD,
        "rolled_back": LeaseState.DEAD,
        "cancelled": LeaseState.CANCELLED,
        "abandoned": LeaseState.ABANDONED,
    },
    LeaseState.DONE: {},
    LeaseState.EXPIRED: {},
    LeaseState.DEAD: {},
    LeaseState.CANCELLED: {},
    LeaseState.ABANDONED: {},
}

GROUP: Final[Table[GroupState]] = {
    GroupState.ISSUED: {"closed": GroupState.READY, "rejected": GroupState.REJECTED, "voided": GroupState.VOID},
    GroupState.READY: {"sealed": GroupState.SEALED, "rejected": GroupState.REJECTED},
    GroupState.SEALED: {"step_committed": GroupState.TRAINED, "unsealed": GroupState.READY, "rejected": GroupState.REJECTED},
    GroupState.TRAINED: {},
    GroupState.REJECTED: {},
    GroupState.VOID: {},
}

# Environments with several turns lead an accepted slot back to OPEN, once a turn (`domain.turns`).
ROLLOUT: Final[Table[RolloutState]] = {
    RolloutState.OPEN: {"leased": RolloutState.LEASED, "group_ended": RolloutState.VOID},
    RolloutState.LEASED: {
        "accepted": RolloutState.ACCEPTED,
        "released": RolloutState.OPEN,
        "group_ended": RolloutState.VOID,
    },
    RolloutState.ACCEPTED: {
        "scored": RolloutState.SCORED,
        "unscored": RolloutState.UNSCORED,
        "grader_failed": RolloutState.GRADER_FAILED,
        "grader_timed_out": RolloutState.GRADER_TIMEOUT,
        "continued": RolloutState.OPEN,
        "group_ended": RolloutState.VOID,
    },
    RolloutState.SCORED: {},
    RolloutState.UNSCORED: {},
    RolloutState.GRADER_FAILED: {},
    RolloutState.GRADER_TIMEOUT: {},
    RolloutState.VOID: {},
}

BATCH: Final[Table[BatchState]] = {BatchState.SEALED: {"step_committed": BatchState.COMMITTED}, BatchState.COMMITTED: {}}

PUBLICATION: Final[Table[PublicationState]] = {
    PublicationState.PUBLISHED: {"retired": PublicationState.RETIRED, "rolled_back": PublicationState.ROLLED_BACK},
    PublicationState.RETIRED: {"rolled_back": PublicationState.ROLLED_BACK},
    PublicationState.ROLLED_BACK: {"published_again": PublicationState.PUBLISHED},
}

# Keyed by the enum first: members of two string enums with the same value are one dictionary key.
TERMINAL: Final[Mapping[type[StrEnum], frozenset[StrEnum]]] = {
    JobState: frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}),
    WorkerState: frozenset({WorkerState.GONE}),
    LeaseState: frozenset(state for state in LeaseState if state is not LeaseState.LIVE),
    GroupState: frozenset({GroupState.TRAINED, GroupState.REJECTED, GroupState.VOID}),
    RolloutState: frozenset(
        {
            RolloutState.SCORED,
            RolloutState.UNSCORED,
            RolloutState.GRADER_FAILED,
            RolloutState.GRADER_TIMEOUT,
            RolloutState.VOID,
        }
    ),
    BatchState: frozenset({BatchState.COMMITTED}),
    PublicationState: frozenset({PublicationState.RETIRED, PublicationState.ROLLED_BACK}),
}

TIMERS: Final[Mapping[type[StrEnum], Mapping[StrEnum, str]]] = {
    JobState: {
        JobState.QUEUED: "JobLimits.queued_s, then failed (jobs.overdue)",
        JobState.STARTING: "JobLimits.starting_s, then failed (jobs.overdue)",
        JobState.RUNNING: "JobLimits.no_progress_s without a committed step, then failed (jobs.overdue)",
        JobState.PAUSED: "JobLimits.paused_s, then cancelled (jobs.overdue)",
        JobState.FINISHING: "JobLimits.finishing_s, then failed (jobs.overdue)",
    },
    WorkerState: {
        WorkerState.STANDBY: "lost_after_s of silence (workers.is_lost)",
        WorkerState.ACTIVE: "lost_after_s of silence (workers.is_lost)",
        WorkerState.DRAINING: "lost_after_s of silence (workers.is_lost), and the wall deadlines of its leases",
        WorkerState.QUARANTINED: "quarantine_s since it began (workers.is_served)",
    },
    LeaseState: {LeaseState.LIVE: "its wall deadline (leases.ending)"},
    GroupState: {
        GroupState.ISSUED: "the deadlines of its leases and of grading, then its last step (groups.died)",
        GroupState.READY: "its last step: rejected as stale (seal.choose)",
        GroupState.SEALED: "the deadline of the learner's step (JobLimits.no_progress_s)",
    },
    RolloutState: {
        RolloutState.OPEN: "its group's last step (groups.died)",
        RolloutState.LEASED: "its lease's wall deadline (leases.ending)",
        RolloutState.ACCEPTED: "environment.grade_timeout_s (a turn's too)",
    },
    BatchState: {BatchState.SEALED: "the deadline of the learner's step (JobLimits.no_progress_s)"},
    PublicationState: {PublicationState.PUBLISHED: "the end of the last lease and holding (publication.retired)"},
}
