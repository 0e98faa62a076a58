"""The countdown environment: its splits, its scores, and that a job gets it by its name."""

from __future__ import annotations

import pytest

from coordinator.domain.countdown import problem, solutions
from coordinator.environments.base import Completion, EnvironmentBroken, EnvironmentSpec
from coordinator.environments.build import build_environment
from coordinator.environments.countdown import EVAL_PROMPTS, Countdown


def test_a_job_gets_it_by_name() -> None:
    assert isinstance(build_environment(EnvironmentSpec("countdown", 0, "")), Countdown)
    with pytest.raises(EnvironmentBroken, match="must be absent for 'countdown'"):
        build_environment(EnvironmentSpec("countdown", 0, "", train="rows.jsonl"))


def test_the_splits() -> None:
    """Endless training; 256 different held-out problems, none of which is trained on; the seed decides both."""
    one, same, other = Countdown(3), Countdown(3), Countdown(4)
    assert (one.size("train"), one.size("eval")) == (None, EVAL_PROMPTS)
    held_out = [one.prompt("eval", index) for index in range(EVAL_PROMPTS)]
    trained = {one.prompt("train", index) for index in range(2000)}
    assert len(set(held_out)) == EVAL_PROMPTS
    assert trained.isdisjoint(held_out)
    assert [same.prompt("eval", index) for index in range(EVAL_PROMPTS)] == held_out
    assert [other.prompt("train", index) for index in range(9)] != [one.prompt("train", index) for index in range(9)]
    with pytest.raises(IndexError, match="prompt 256 of split 'eval' does not exist"):
        one.prompt("eval", EVAL_PROMPTS)


def test_the_scores() -> None:
    """One for any right expression, spaces around it or not; zero for all else."""
    asked = problem(3, "train", 5)
    right = solutions(asked.numbers)[asked.target]
    wrong = "+".join(["9"] * 3)
    scores = Countdown(3).score("train", 5, [Completion((), text) for text in (right, f" ({right}) ", wrong, f"{right}=", "")])
    assert [(outcome.kind, outcome.reward) for outcome in scores.outcomes] == [("scored", float(r)) for r in (1, 1, 0, 0, 0)]
