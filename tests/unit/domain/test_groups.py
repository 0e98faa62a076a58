"""Groups: closing whole or short, dying, variance."""

from __future__ import annotations

import pytest

from coordinator.domain.groups import close, died, is_whole, is_zero_variance, open_slots, ungradable
from coordinator.domain.model import Group, GroupState, RolloutState


@pytest.fixture
def make_slots(make_rollout):
    def make(*states: RolloutState, **changes):
        return [make_rollout(slot=slot, state=state, **changes) for slot, state in enumerate(states)]

    return make


P, L, A = RolloutState.OPEN, RolloutState.LEASED, RolloutState.ACCEPTED
S, U, F, T = RolloutState.SCORED, RolloutState.UNSCORED, RolloutState.GRADER_FAILED, RolloutState.GRADER_TIMEOUT


@pytest.mark.parametrize("missing", [P, L, A])
def test_a_group_closes_whole(make_group, make_slots, missing) -> None:
    """Open, leased or ungraded slots keep it open."""
    assert close(make_group(size=3), make_slots(S, S, missing), min_group=None) is None


def test_a_whole_group_is_ready(make_group, make_slots) -> None:
    """Every slot scored: READY."""
    closing = close(make_group(size=3), make_slots(S, S, S), min_group=None)
    assert closing is not None
    assert closing.state is GroupState.READY


def test_slots_without_a_score_are_outcomes(make_group, make_slots) -> None:
    """A grader fault is no score of 0: the slot is out, the others stand."""
    closing = close(make_group(size=4), make_slots(S, S, U, T), min_group=None)
    assert closing is not None
    assert closing.state is GroupState.READY
    assert closing.reason == "whole: 2 of 4 slots scored"


def test_fewer_than_two_scores_reject(make_group, make_slots) -> None:
    """One score has no group to be relative to; the reason counts the grader's faults."""
    closing = close(make_group(size=4), make_slots(S, F, T, U), min_group=None)
    assert closing is not None
    assert closing.state is GroupState.REJECTED
    assert closing.reason.startswith("too_few_scored: 1 of 4")
    assert "2 times" in closing.reason


def test_min_group_asks_for_more_scores(make_group, make_slots) -> None:
    """A whole group with fewer scores than min_group is rejected."""
    closing = close(make_group(size=4), make_slots(S, S, F, F), min_group=3)
    assert closing is not None
    assert closing.state is GroupState.REJECTED


def test_short_closing(make_group, make_slots) -> None:
    """With min_group, slots that nobody works on are not waited for."""
    closing = close(make_group(size=4), make_slots(S, S, S, P), min_group=3)
    assert closing is not None
    assert closing.state is GroupState.READY
    assert "3 of 4" in closing.reason


@pytest.mark.parametrize("states", [(S, S, S, L), (S, S, S, A), (S, S, P, P)])
def test_short_closing_waits(make_group, make_slots, states) -> None:
    """What is under way is waited for (long answers must not be cut out), and the minimum must be reached."""
    assert close(make_group(size=4), make_slots(*states), min_group=3) is None


@pytest.mark.parametrize(
    ("states", "min_group", "whole"),
    [
        ((A, A, A, A), None, True),
        ((A, S, F, T), None, True),
        ((A, A, A, L), None, False),
        ((A, A, A, P), None, False),
        ((A, A, A, P), 3, True),
        ((A, A, A, L), 3, False),
        ((A, A, P, P), 3, False),
    ],
)
def test_a_group_is_whole_when_nothing_more_will_come(make_group, make_slots, states, min_group, whole) -> None:
    """Rewards that compare a group's members wait for that; with min_group nobody waits for slots that nobody works on."""
    assert is_whole(make_group(size=4), make_slots(*states), min_group=min_group) is whole


def test_a_group_dies_when_its_tokens_are_too_old(make_group, make_slots) -> None:
    """Tokens of version 3 serve steps up to 5 with S = 2; at step 6 the group is dead."""
    rollouts = make_slots(S, P, oldest_version=3)
    assert died(make_group(), rollouts, step=5, bound=2, newest_version=5) is None
    reason = died(make_group(number=9), rollouts, step=6, bound=2, newest_version=6)
    assert reason is not None
    assert reason.startswith("stale: group 9")
    assert "version 3" in reason


@pytest.mark.parametrize("missing", [P, L])
def test_a_group_dies_when_nothing_published_can_fill_it(make_group, make_slots, missing) -> None:
    """A missing slot would be filled by the newest version at best."""
    reason = died(make_group(), make_slots(missing), step=8, bound=2, newest_version=5)
    assert reason is not None
    assert "newest version 5" in reason
    assert died(make_group(), make_slots(missing), step=7, bound=2, newest_version=5) is None


def test_a_full_group_does_not_need_new_versions(make_group, make_slots) -> None:
    """Ungraded but complete: only its own versions count."""
    assert died(make_group(), make_slots(A, S, oldest_version=7), step=8, bound=2, newest_version=5) is None


def test_nothing_published_kills_no_group(make_group, make_slots) -> None:
    """Without a publication there is nothing to compare with."""
    assert died(make_group(), make_slots(P), step=8, bound=2, newest_version=None) is None


@pytest.mark.parametrize(
    ("rewards", "alike"),
    [
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.0 + 9e-7], True),
        ([1.0, 1.0 + 2e-6], False),
        ([0.0, None, 1.0], False),
        ([1.0, None], True),
        ([], True),
    ],
)
def test_zero_variance(rewards, alike) -> None:
    """Alike within 1e-6, or fewer than two scores."""
    assert is_zero_variance(rewards) is alike


def test_open_slots_ascend(make_rollout) -> None:
    """Only slots that wait for a lease, in order."""
    rollouts = [make_rollout(slot=2), make_rollout(slot=0), make_rollout(slot=1, state=L)]
    assert open_slots(rollouts) == (0, 2)


def ended(number: int, reason: str, *, issued_at: float = 10.0) -> Group:
    """A group whose grading ended."""
    return Group(f"g{number}", "j", number, number, (1,), 2, GroupState.REJECTED, issued_at, reason)


BAD = "too_few_scored: 0 of 2 slots scored, 2 are needed (2 times the grader failed)"


@pytest.mark.parametrize(
    ("reasons", "since", "is_broken"),
    [
        ([BAD] * 4, 0.0, True),
        ([BAD] * 3, 0.0, False),  # too few to say
        ([BAD, "whole: 2 of 2 slots scored", BAD, BAD], 0.0, False),  # the function works
        ([BAD, BAD, BAD, BAD, "whole: 2 of 2 slots scored"], 0.0, True),  # it worked once, not any more
        ([BAD] * 4, 11.0, False),  # all issued before the job was resumed
    ],
)
def test_ungradable(reasons: list[str], since: float, is_broken: bool) -> None:
    """Four groups in a row without scores mean that grading is broken."""
    newest = [ended(99 - place, reason) for place, reason in enumerate(reasons)]
    words = ungradable(newest, since=since, at_least=4)
    assert (words is not None) is is_broken
    assert words is None or words.startswith("grading_failed: the last 4 groups")
