"""The tables: complete, closed, timed; an illegal event changes nothing."""

from __future__ import annotations

from enum import StrEnum

import pytest

from coordinator.domain import states
from coordinator.domain.model import (
    BatchState,
    GroupState,
    JobState,
    LeaseState,
    PublicationState,
    RolloutState,
    WorkerState,
)

TABLES = {
    JobState: states.JOB,
    WorkerState: states.WORKER,
    LeaseState: states.LEASE,
    GroupState: states.GROUP,
    RolloutState: states.ROLLOUT,
    BatchState: states.BATCH,
    PublicationState: states.PUBLICATION,
}
LATE_MOVES = {WorkerState.GONE, PublicationState.RETIRED, PublicationState.ROLLED_BACK}
kinds = pytest.mark.parametrize("kind", list(TABLES), ids=lambda kind: kind.__name__)


@kinds
def test_each_state_has_a_row(kind: type[StrEnum]) -> None:
    """Every state of the enum is a row of its table, and every move leads to a state of the same enum."""
    assert set(TABLES[kind]) == set(kind)
    assert all(isinstance(target, kind) for row in TABLES[kind].values() for target in row.values())


@kinds
def test_each_non_terminal_state_has_a_timer(kind: type[StrEnum]) -> None:
    """Law 5: what is not terminal is ended by a named timer; what is terminal has none."""
    assert set(states.TIMERS[kind]) == set(kind) - states.TERMINAL[kind]
    assert all(states.TIMERS[kind].values())


@kinds
def test_a_terminal_state_can_be_reached_from_everywhere(kind: type[StrEnum]) -> None:
    """No state is a trap."""
    for start in kind:
        seen, frontier = {start}, [start]
        while frontier:
            for target in TABLES[kind][frontier.pop()].values():
                if target not in seen:
                    seen.add(target)
                    frontier.append(target)
        assert seen & states.TERMINAL[kind], start


@kinds
def test_final_states_have_no_moves(kind: type[StrEnum]) -> None:
    """Terminal states stay, but for the late moves that are meant."""
    for state in states.TERMINAL[kind] - LATE_MOVES:
        assert TABLES[kind][state] == {}


@kinds
def test_illegal_events_raise(kind: type[StrEnum]) -> None:
    """Any event of the table that is not in the state's row raises and names what is allowed."""
    events = {event for row in TABLES[kind].values() for event in row}
    for state, row in TABLES[kind].items():
        for event in events - set(row):
            with pytest.raises(states.IllegalMove, match="allowed") as raised:
                states.move(TABLES[kind], state, event)
            assert event in str(raised.value)
            assert state.value in str(raised.value)


def test_move_follows_the_table() -> None:
    """A legal event gives the next state."""
    assert states.move(states.GROUP, GroupState.READY, "sealed") is GroupState.SEALED
    assert states.move(states.LEASE, LeaseState.LIVE, "expired") is LeaseState.EXPIRED


def test_settled_rollouts_settle_once() -> None:
    """Law 2: no event leads back from an accepted rollout to one that could be accepted again, but for the next turn of it."""
    outcomes = {RolloutState.SCORED, RolloutState.UNSCORED, RolloutState.GRADER_FAILED, RolloutState.GRADER_TIMEOUT}
    onward = dict(states.ROLLOUT[RolloutState.ACCEPTED])
    assert (onward.pop("continued"), onward.pop("group_ended")) == (RolloutState.OPEN, RolloutState.VOID)
    assert set(onward.values()) == outcomes
    for state in outcomes:
        assert states.ROLLOUT[state] == {}


def test_trained_groups_stay_trained() -> None:
    """Law 2: nothing trains twice."""
    assert states.GROUP[GroupState.TRAINED] == {}


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.FINISHING])
def test_a_paused_job_resumes_where_it_was(state: JobState) -> None:
    """Pausing remembers the state; resuming leads back to it."""
    paused = states.move(states.JOB, state, "pause_requested")
    assert states.move(states.JOB, paused, states.resumed_event(state)) is state


def test_a_paused_job_without_a_memory_queues() -> None:
    """A paused row without resume_state starts from the queue."""
    assert states.resumed_event(None) == "resumed_queued"


@pytest.mark.parametrize("event", ["left", "lost", "rejoined", "version_confirmed"])
def test_a_worker_cannot_walk_out_of_quarantine(event: str) -> None:
    """Leaving and coming back does not end a quarantine."""
    assert states.move(states.WORKER, WorkerState.QUARANTINED, event) is WorkerState.QUARANTINED
