"""The grant rule, staleness, seeds and the demo task."""

from __future__ import annotations

import pytest

from coordinator.domain.digit_sort import LONGEST, SHORTEST, problem
from coordinator.domain.grant import grantable
from coordinator.domain.seeds import CANARY_TOKENS, canary_ids, derive, permutation, prompt_index, slot_seed
from coordinator.domain.staleness import StalenessError, last_step, staleness


def grant(*, t=0, n=0, b=4, s=2, x=0, steps=100):
    return grantable(committed_steps=t, unsettled=n, groups_per_step=b, bound=s, held_version=x, planned_steps=steps)


def test_the_newest_version_may_fill_s_plus_one_steps() -> None:
    """n + g <= (S + 1) B for x = t."""
    assert grant().groups == 12
    assert grant(n=11).groups == 1
    assert grant(n=12).groups == 0


def test_an_older_version_may_fill_fewer() -> None:
    """x = t - S can only serve the next step."""
    assert grant(t=5, x=3, n=3).groups == 1
    assert grant(t=5, x=3, n=4).groups == 0
    assert "version 3 can serve steps up to 5" in grant(t=5, x=3, n=4).reason


def test_nothing_is_issued_that_no_step_needs() -> None:
    """The planned steps bound the grant."""
    assert grant(t=98, x=98, n=3).groups == 5
    done = grant(t=100, x=100)
    assert done.groups == 0
    assert "remaining 0 steps" in done.reason


def test_staleness_is_the_distance_to_the_oldest_version() -> None:
    """Step t trains version t."""
    assert staleness(7, 5) == 2
    assert staleness(0, 0) == 0
    assert last_step(5, 3) == 8


@pytest.mark.parametrize(("step", "oldest"), [(3, 4), (3, -1), (-1, 0), (-1, -1)])
def test_impossible_versions_raise(step: int, oldest: int) -> None:
    """Negative staleness or versions are errors."""
    with pytest.raises(StalenessError, match="must lie in 0"):
        staleness(step, oldest)


def test_seeds_are_functions_of_their_parts() -> None:
    """Length prefixes keep ("ab", "c") and ("a", "bc") apart; 63 bits."""
    assert derive(1, "ab", "c") != derive(1, "a", "bc")
    assert slot_seed(1, 2, 3) == slot_seed(1, 2, 3) != slot_seed(1, 3, 2)
    assert 0 <= derive(5, "x") < 2**63


def test_each_epoch_is_a_fresh_permutation() -> None:
    """Every prompt once an epoch; endless splits count up."""
    first = [prompt_index(0, number, 10) for number in range(10)]
    second = [prompt_index(0, number, 10) for number in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert prompt_index(0, 123, None) == 123
    assert permutation(3, 5) == permutation(3, 5)


def test_canary_tokens_lie_in_the_vocabulary() -> None:
    """Fixed length, fixed by the job's seed."""
    ids = canary_ids(0, 17)
    assert len(ids) == CANARY_TOKENS
    assert all(0 <= token < 17 for token in ids)
    assert ids == canary_ids(0, 17) != canary_ids(1, 17)


def test_digit_sort_problems() -> None:
    """The answer is the sorted prompt."""
    for index in range(50):
        prompt, answer = problem(0, "train", index)
        assert prompt.endswith("=")
        assert SHORTEST <= len(answer) <= LONGEST
        assert "".join(sorted(prompt[:-1])) == answer
    assert problem(0, "train", 0) == problem(0, "train", 0)
    assert {problem(0, "train", i) for i in range(9)} != {problem(0, "eval", i) for i in range(9)}
