"""The product's own service under seeded faults: no law breaks, every reachable transition is fired, a seed tells one story.

A failing seed prints its story and the command that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from simulator.faults.coverage import Coverage, missing, report
from simulator.faults.endings import ENDINGS
from simulator.faults.endings import play as end
from simulator.faults.world import LawBroken, Outcome, run

SCHEDULES = 300
LONG_SCHEDULES = 5000


def play(seeds: Sequence[int], coverage: Coverage) -> list[Outcome]:
    """Every schedule to its end."""
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(run(seed, coverage=coverage))
        except LawBroken as broken:
            pytest.fail(str(broken), pytrace=False)
    return outcomes


@pytest.fixture(scope="module")
def played() -> tuple[list[Outcome], Coverage]:
    """The schedules of every test run, and the few that end in ways of their own."""
    coverage = Coverage()
    outcomes = play(range(SCHEDULES), coverage)
    for ending in ENDINGS:
        try:
            end(ending, coverage)
        except LawBroken as broken:
            pytest.fail(f"{ending.name}: {broken}", pytrace=False)
    return outcomes, coverage


def test_no_law_is_broken_and_every_job_ends(played: tuple[list[Outcome], Coverage]) -> None:
    outcomes, _ = played
    assert len(outcomes) == SCHEDULES
    assert {outcome.state for outcome in outcomes} == {"completed", "cancelled"}


def test_each_schedule_has_a_crash_a_partition_and_a_version_change(played: tuple[list[Outcome], Coverage]) -> None:
    for outcome in played[0]:
        assert outcome.crashes >= 1, outcome.seed
        assert outcome.partitions >= 1, outcome.seed
        assert outcome.versions >= 2, outcome.seed


def test_every_reachable_transition_is_fired(played: tuple[list[Outcome], Coverage]) -> None:
    """Also those of a worker's session. `UNREACHABLE` names the others, with the reason."""
    coverage = played[1]
    print(report(coverage))
    assert missing(coverage) == []


def test_replays_lost_digests_and_hostile_work_really_happen(played: tuple[list[Outcome], Coverage]) -> None:
    """What the laws are checked against must occur, or they hold for nothing."""
    outcomes, _ = played
    codes = {code for outcome in outcomes for code in outcome.reasons}
    assert sum(outcome.replays for outcome in outcomes) > 20
    assert {"policy_rolled_back", "lease_expired", "lease_dead_by_version", "not_your_lease", "old_fence", "wrong_canary"} <= codes


def test_a_seed_tells_one_story() -> None:
    for seed in (3, 28):
        assert run(seed) == run(seed)


def test_the_story_does_not_depend_on_the_hash_seed() -> None:
    stories = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "simulator.faults", "--seed", "8"]
        stories.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert stories[0] == stories[1]
    assert "fault: partition" in stories[0]


@pytest.mark.long
def test_many_more_schedules() -> None:
    coverage = Coverage()
    play(range(SCHEDULES, LONG_SCHEDULES), coverage)
    print(report(coverage))
