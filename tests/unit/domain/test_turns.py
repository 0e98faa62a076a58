"""Slots that an environment continues: what the next turn may sample, who may make it, and a record that is only added to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain import groups, turns
from coordinator.domain.model import GroupState, Rollout, RolloutState, Turn
from coordinator.domain.seeds import slot_seed
from coordinator.domain.states import IllegalMove
from coordinator.wire.job import JobConfig


def config(*, max_turns: int = 4, turn_tokens: int | None = None, budget: int = 100) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "job",
            "model": "m",
            "environment": {"type": "guess_number", "max_turns": max_turns, "turn_tokens": turn_tokens},
            "sampling": {"max_new_tokens": budget},
            "budget": {"steps": 1},
        }
    )


def accepted(turn: int = 0, **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "lease_id": "j/g0/f1",
        "worker_id": "w-1",
        "blob": "b",
        "blob_start": 7,
        "length": 2,
        "oldest_version": 3,
        "newest_version": 4,
        "digests": {"3": "c"},
        "stop_reason": "stop",
        "generate_s": 0.5,
        "accepted_at": 10.0,
        "turn": turn,
    }
    return Rollout("j/g0", 0, "j", 0, RolloutState.ACCEPTED, **{**values, **changes})


@pytest.mark.parametrize(
    ("preceding", "turn_tokens", "expected"), [(0, None, 100), (30, None, 70), (0, 20, 20), (90, 20, 10), (100, None, 0)]
)
def test_a_turn_may_sample_what_is_left_of_the_slot_and_of_the_turn(preceding: int, turn_tokens: int | None, expected: int) -> None:
    assert turns.turn_tokens(config(turn_tokens=turn_tokens), preceding) == expected


def test_a_job_of_one_turn_has_its_own_limit_only() -> None:
    plain = config(max_turns=1)
    assert not turns.is_played(plain)
    assert turns.turn_tokens(plain, 0) is None


def test_the_next_turn_waits_for_who_made_the_last_one() -> None:
    """That worker holds the cache; after a while anyone may."""
    _, opened = turns.continued(accepted(), (5, 1), (9,), now=100.0)
    assert turns.may_take(opened, "w-1", now=100.0, alone=False)
    assert not turns.may_take(opened, "w-2", now=100.0 + turns.STICKY_S - 0.1, alone=False)
    assert turns.may_take(opened, "w-2", now=100.0 + turns.STICKY_S, alone=False)


def test_a_turn_that_came_back_unfinished_goes_to_another_worker() -> None:
    _, opened = turns.continued(accepted(), (5, 1), (9,), now=100.0)
    lost = Rollout(**{**{name: getattr(opened, name) for name in opened.__slots__}, "attempts": 1})
    assert turns.may_take(lost, "w-2", now=100.0, alone=False)
    assert not turns.may_take(lost, "w-1", now=200.0, alone=False)
    assert turns.may_take(lost, "w-1", now=100.0, alone=True)


def test_a_first_turn_is_granted_as_before() -> None:
    fresh = Rollout("j/g0", 0, "j", 0, RolloutState.OPEN)
    assert turns.may_take(fresh, "w-1", now=0.0, alone=False)


@pytest.mark.parametrize(("version", "oldest", "expected"), [(5, None, 7), (5, 3, 5), (3, 5, 5)])
def test_the_oldest_version_of_all_turns_bounds_the_next(version: int, oldest: int | None, expected: int) -> None:
    """S is 2: x + S, and never later than what the oldest token can serve."""
    assert turns.latest_step(version, 2, oldest=oldest) == expected


def test_a_turn_that_is_over_keeps_what_settled_it_and_the_slot_is_open_again() -> None:
    turn, opened = turns.continued(accepted(turn=1, preceding=4), (5, 1), (9, 8, 7), now=100.0)
    assert turn == Turn("j/g0", 0, 1, "j", "j/g0/f1", "w-1", "b", 7, 2, "stop", 0.5, 10.0, (5, 1, 9, 8, 7))
    assert (opened.state, opened.turn, opened.preceding, opened.continued_at) == (RolloutState.OPEN, 2, 9, 100.0)
    assert (opened.lease_id, opened.blob, opened.length, opened.accepted_at, opened.attempts) == (None, None, 0, None, 0)
    assert (opened.worker_id, opened.oldest_version, opened.newest_version, opened.digests) == ("w-1", 3, 4, {"3": "c"})


@pytest.mark.parametrize("state", [state for state in RolloutState if state is not RolloutState.ACCEPTED])
def test_only_an_accepted_turn_goes_on(state: RolloutState) -> None:
    with pytest.raises(IllegalMove):
        turns.continued(Rollout("g", 0, "j", 0, state), (1,), (2,), now=0.0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9))), min_size=1, max_size=6))
def test_the_record_is_all_that_was_sampled_and_placed_in_order(parts: list[tuple[list[int], list[int]]]) -> None:
    """Whatever the turns are, the next one begins after exactly their tokens."""
    rollout, made = accepted(), list[Turn]()
    for sampled, placed in parts:
        turn, opened = turns.continued(rollout, sampled, placed, now=1.0)
        made.append(turn)
        rollout = accepted(turn=opened.turn, preceding=opened.preceding)
    assert list(turns.record(made)) == [token for part in parts for tokens in part for token in tokens]
    assert rollout.preceding == len(turns.record(made))
    assert [turn.turn for turn in made] == list(range(len(parts)))


def test_a_slot_between_two_turns_is_under_way_and_keeps_its_group_from_closing_short(make_group: Any, make_rollout: Any) -> None:
    """Else short games would be favoured."""
    scored = [make_rollout(slot=slot, state=RolloutState.SCORED, reward=1.0, oldest_version=0) for slot in range(3)]
    between = make_rollout(slot=3, state=RolloutState.OPEN, turn=1, oldest_version=0)
    never = make_rollout(slot=3, state=RolloutState.OPEN)
    group = make_group(size=4)
    assert turns.is_under_way(between)
    assert not turns.is_under_way(never)
    assert turns.is_under_way(make_rollout(state=RolloutState.LEASED))
    assert groups.close(group, [*scored, between], min_group=2) is None
    closing = groups.close(group, [*scored, never], min_group=2)
    assert closing is not None
    assert closing.state is GroupState.READY


def test_a_group_with_an_accepted_turn_does_not_end_void(make_rollout: Any) -> None:
    """Its tokens were accepted and paid: it is rejected, with a reason."""
    assert groups.ends_void([make_rollout(state=RolloutState.OPEN), make_rollout(slot=1, state=RolloutState.LEASED)])
    assert not groups.ends_void([make_rollout(state=RolloutState.OPEN, turn=1, oldest_version=2)])
    assert not groups.ends_void([make_rollout(state=RolloutState.ACCEPTED, oldest_version=2)])


def test_each_turn_has_a_seed_of_its_own_and_the_first_is_the_slots() -> None:
    """Else a turn would repeat the draws of the one before."""
    assert slot_seed(7, 3, 1, 0) == slot_seed(7, 3, 1)
    assert len({slot_seed(7, 3, 1, turn) for turn in range(5)}) == 5
