"""The spine on a virtual clock, with the real domain code: what holds for random fleets, delays, tails and faults.

The simulation itself checks at every event that no sealed batch breaks the bound and that an idle worker with a usable
version is granted work within one beat whenever less than a step is issued; its end runs the audit of law 2.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from coordinator.domain import publication
from simulator.scenario import Outage, Scenario, WorkerCrash, WorkerModel, warning_line
from simulator.spine import run, table

steady = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

workers = st.lists(
    st.builds(WorkerModel, st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([4.0, 8.0, 16.0, 64.0])), min_size=1, max_size=5
).map(tuple)
tails = st.sampled_from([0.0, 0.3, 0.6, 1.0])


@st.composite
def inside_the_line(draw: st.DrawFn) -> Scenario:
    """1.15 x load, S >= 2, and S at or up to two above the warning line; enough groups that one is under 0.5 %."""
    groups_per_step = draw(st.sampled_from([4, 8, 16]))
    scenario = Scenario(
        workers=draw(workers),
        seed=draw(st.integers(0, 2**32)),
        steps=max(20, 240 // groups_per_step),
        group_size=draw(st.sampled_from([2, 4, 8])),
        groups_per_step=groups_per_step,
        bound=8,
        tail=draw(tails),
        grade_s=draw(st.sampled_from([0.05, 0.5, 2.0])),
    )
    scenario = replace(scenario, bcast_s=scenario.train_s * draw(st.sampled_from([0.02, 0.2, 0.6, 1.2])))
    kappa = publication.kappa("auto", bound=8, train_s=scenario.train_s, bcast_p95_s=1.5 * scenario.bcast_s, pause_s=0.0)
    bound = max(2, warning_line(scenario, kappa=kappa)) + draw(st.integers(0, 2))
    assume(bound <= 8)
    return replace(scenario, bound=bound)


@settings(steady, max_examples=30)
@given(inside_the_line())
def test_little_is_thrown_away_inside_the_warning_line(scenario: Scenario) -> None:
    """At most 2 % of the started completions, and the learner is kept busy."""
    outcome = run(scenario)
    assert outcome.steps == scenario.steps
    assert outcome.discards <= 0.02, outcome
    assert outcome.utilisation >= 0.85, outcome
    assert max(outcome.staleness) <= scenario.bound
    assert sum(outcome.staleness.values()) == scenario.steps * scenario.groups_per_step


@st.composite
def anything(draw: st.DrawFn) -> Scenario:
    """Any load, bound, kappa and delay, with outages, replays that change weights, and worker crashes."""
    scenario = Scenario(
        workers=draw(workers),
        seed=draw(st.integers(0, 2**32)),
        steps=draw(st.sampled_from([3, 8, 12])),
        group_size=draw(st.sampled_from([2, 4, 8])),
        groups_per_step=draw(st.sampled_from([1, 2, 4, 8])),
        bound=draw(st.sampled_from([0, 1, 2, 3, 4, 6])),
        publish_every=draw(st.sampled_from(["auto", 1, 2, 5])),
        load=draw(st.sampled_from([0.5, 1.0, 1.15, 3.0])),
        tail=draw(st.sampled_from([0.0, 0.5, 1.0, 1.5])),
        bcast_s=draw(st.sampled_from([0.1, 1.0, 10.0, 40.0])),
        grade_s=draw(st.sampled_from([0.05, 2.0])),
        zero_variance=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        min_group=draw(st.sampled_from([None, None, 2])),
    )
    span_s = scenario.train_s * scenario.steps * 1.5
    moments = st.floats(0.0, span_s)
    outages: list[Outage] = []
    for at in sorted(draw(st.lists(moments, max_size=3))):
        if not outages or at >= outages[-1].at + outages[-1].for_s:
            outages.append(Outage(at, draw(st.floats(0.5, 30.0)), draw(st.booleans())))
    places = st.integers(0, len(scenario.workers) - 1)
    crashes = draw(st.lists(st.builds(WorkerCrash, places, moments, st.floats(0.5, 60.0)), max_size=3))
    return replace(scenario, outages=tuple(outages), crashes=tuple(crashes))


@settings(steady, max_examples=120)
@given(anything())
def test_the_laws_hold_whatever_happens(scenario: Scenario) -> None:
    """Every job ends with the planned steps, within the bound, and its audit finds nothing."""
    outcome = run(scenario)
    assert outcome.steps == scenario.steps
    assert max(outcome.staleness) <= scenario.bound
    assert sum(outcome.staleness.values()) == scenario.steps * scenario.groups_per_step


FLEET = (WorkerModel(4, 8.0), WorkerModel(8, 16.0))


def test_the_same_scenario_gives_the_same_outcome() -> None:
    """Seeded throughout: a failing seed can be run again."""
    scenario = Scenario(workers=FLEET, outages=(Outage(20.0, 5.0, True),), crashes=(WorkerCrash(0, 30.0, 9.0),), steps=12)
    assert run(scenario) == run(scenario)
    assert run(replace(scenario, seed=1)) != run(scenario)


def test_the_learner_waits_for_no_lost_worker() -> None:
    """Law 8: one of two workers vanishes for good; its slots are leased again and the job ends."""
    scenario = Scenario(workers=FLEET, crashes=(WorkerCrash(1, 40.0, None),), steps=10)
    assert run(scenario).steps == 10


def test_without_slack_the_learner_waits() -> None:
    """S = 0 is strictly on-policy: staleness 0, and utilisation well below that of S = 3."""
    scenario = Scenario(workers=FLEET, bound=0, steps=12)
    outcome = run(scenario)
    assert outcome.staleness == {0: 12 * scenario.groups_per_step}
    assert outcome.discards == 0.0
    assert outcome.utilisation < run(replace(scenario, bound=3)).utilisation


def test_a_replay_with_other_weights_is_paid_and_rejected() -> None:
    """Rollouts of the lost digest leave the queue as policy_rolled_back."""
    scenario = Scenario(workers=FLEET, outages=(Outage(25.0, 3.0, True),), steps=10)
    outcome = run(scenario)
    assert any("policy_rolled_back" in code for code in outcome.reasons)


def test_dull_groups_are_replaced_and_then_trained_at_zero_weight() -> None:
    """With nothing but zero-variance groups the job still ends: B are replaced a step, then the step is sealed."""
    scenario = Scenario(workers=FLEET, zero_variance=1.0, steps=4)
    outcome = run(scenario)
    assert outcome.steps == 4
    assert outcome.reasons["group rejected: no_signal"] == 4 * scenario.groups_per_step


@pytest.mark.parametrize("bound", [0, 3])
def test_the_table_prints(bound: int) -> None:
    """One row for each bound and tail."""
    lines = table(bounds=(bound,), tails=(0.5,)).splitlines()
    assert len(lines) == 2
    assert lines[1].split()[:2] == [str(bound), "0.5"]
