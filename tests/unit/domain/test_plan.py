"""Plans of small jobs, computed by hand, and each way in which there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.domain.capacity_inputs import Loading
from coordinator.domain.plan import plan, required_rate
from coordinator.domain.plan_answer import Plan
from coordinator.domain.plan_bounds import bound_lines, setting_of
from coordinator.domain.plan_facts import PlanRefused
from coordinator.domain.plan_fleet import Fleet, broadcast_of, capacity_inputs, loading_of, slots_of
from pricing.offers import Offer
from tests.unit.domain.plans import MARKET, job, question
from tests.unit.pricing.markets import offer


def named(answer: Plan, name: str):
    return next(one.fleet for one in answer.fleets if one.name == name)


def test_a_small_fleet_by_hand() -> None:
    """16 rollouts each 10 s are 1.6/s, 2.0/s with headroom: four workers of `a`, at 0.40 USD/h; the learner never waits."""
    answer = plan(question())
    cheapest = named(answer, "cheapest")
    assert answer.required_rate == pytest.approx(1.6)
    assert answer.planned_rate == pytest.approx(2.0)
    assert (answer.kappa, answer.bound, answer.binding_term, answer.infeasible_because) == (1, 4, "learner", None)
    assert cheapest.counts == {"a": 4}
    assert cheapest.rate == pytest.approx(2.0)
    # the keyframe takes 0.1 s of 1,000 s: that much of the price is warm-up
    assert cheapest.usd_per_hour == pytest.approx(0.4 * (1 + 0.1 / 1000), rel=1e-9)
    # four copies by 100 + 4 x 10 Mbit/s: 40 Mbit / 140 Mbit/s, a tenth more in practice
    assert cheapest.t_bcast_s == pytest.approx(1.1 * 40 / 140)
    start_h = 1.1 * 40 / 140 / 3600
    assert cheapest.hours == pytest.approx(start_h + 100 * 10 / 3600)
    assert cheapest.usd == pytest.approx(cheapest.usd_per_hour * cheapest.hours)
    assert cheapest.usd_per_step == pytest.approx(cheapest.usd_per_hour * 10 / 3600)
    assert cheapest.usd_per_thousand == pytest.approx(cheapest.usd_per_step / 16 * 1000)
    assert cheapest.forecast is not None
    assert cheapest.forecast.utilisation == 1.0
    assert [one.name for one in answer.fleets] == ["cheapest", "balanced", "fastest"]
    assert answer.would_help == ()


def test_the_same_question_has_the_same_answer() -> None:
    """Seeded."""
    assert plan(question(job(bound=1))) == plan(question(job(bound=1)))


def test_groups_without_signal_are_made_again() -> None:
    """A fifth of them: 1.25 times as many."""
    assert required_rate(question(no_signal=0.2)) == pytest.approx(2.0)


def test_pauses_and_rejections_ask_for_more() -> None:
    """1 s of each 20 s (kappa 2, so that a pause is at most 5 %), and a tenth refused: 1.6 / 0.95 / 0.9."""
    answer = plan(question(apply_s=1.0, admitted=0.9, headroom=1.0))
    assert answer.kappa == 2
    assert answer.planned_rate == pytest.approx(1.6 / 0.95 / 0.9)
    assert named(answer, "cheapest").rate * 0.9 * 0.95 >= 1.6


def test_a_slow_link_raises_kappa() -> None:
    """A broadcast of more than 10 s does not fit between two steps; 1.45 times the mean counts."""
    slow = [offer("slow", 0.10, 0.5, count=8, up_mbps=10.0, down_mbps=1.0)]
    answer = plan(question(job(bound=6), slow, seeder_mbps=1000.0))
    assert answer.kappa == math.ceil(1.45 * 1.1 * 10 / 10)
    assert answer.bounds[0].kappa == 1


def test_a_quick_link_is_tried_at_a_small_kappa() -> None:
    """Cheap workers on slow links starve the learner at S = 3; dearer ones on fast links do not, and are the fastest."""
    market = [
        offer("slow", 0.10, 1.0, count=4, up_mbps=10.0, down_mbps=0.5),
        offer("quick", 0.30, 1.0, count=4, up_mbps=100.0, down_mbps=100.0),
    ]
    answer = plan(question(job(bound=3), market))
    cheapest, fastest = named(answer, "cheapest"), named(answer, "fastest")
    assert set(cheapest.counts) == {"slow"}
    assert set(fastest.counts) == {"quick"}
    assert cheapest.usd_per_hour < fastest.usd_per_hour
    assert cheapest.hours > fastest.hours
    assert "more than the cheapest" in answer.fleets[2].reason
    assert answer.binding_term == "staleness"
    assert any("S = 4" in words for words in answer.would_help)


def test_another_kappa_would_help() -> None:
    """Pauses of 5 % ask for kappa 5 of S = 6, and the learner starves; publishing each step would cost a little rate and feed it."""
    answer = plan(question(job(bound=6), apply_s=2.4, snapshot_s=12.0, tokens_per_s=10.0))
    assert answer.kappa == 5
    assert any("publish_every = 1" in words for words in answer.would_help)


def test_s_0_is_stated_and_runs() -> None:
    """No line is kept there, the learner waits, and the plan says for how long."""
    answer = plan(question(job(bound=0)))
    assert answer.infeasible_because is None
    assert answer.binding_term == "synchrony"
    said = named(answer, "cheapest").forecast
    assert said is not None
    assert 0.1 < said.utilisation < 0.9
    assert said.staleness.keys() == {0}


def test_the_bounds_of_the_table() -> None:
    """0 to 11 and the job's own; only the first inside the line is rehearsed."""
    lines = plan(question(job(bound=13))).bounds
    assert [line.bound for line in lines] == [*range(12), 13]
    inside = [line for line in lines if line.inside]
    assert inside[0].discards is not None
    assert {line.discards for line in inside[1:]} == {None}
    assert all(line.utilisation == 1.0 and line.is_feasible for line in inside)
    assert not lines[0].is_feasible
    assert all(line.inside == (line.needs <= line.bound) for line in lines)


@pytest.mark.parametrize(
    ("budget", "term", "words"),
    [
        ({"usd_per_hour": 0.39}, "usd_per_hour", "allows 0.3900 USD/h: allow more"),
        ({"usd": 0.05}, "usd", "0.0500 USD are left"),
        ({"deadline_hours": 0.2}, "deadline", "the learner itself needs 0.28 h"),
    ],
)
def test_budgets(budget: dict[str, float], term: str, words: str) -> None:
    """0.40 USD/h, 0.11 USD and 0.28 h are needed."""
    answer = plan(question(job(**budget)))
    assert answer.fleets == ()
    assert answer.binding_term == term
    assert words in (answer.infeasible_because or "")


@pytest.mark.parametrize(
    ("budget", "term", "words"), [({"deadline_hours": 0.4}, "deadline", "0.4 h"), ({"usd": 0.15}, "usd", "budget is 0.15 USD")]
)
def test_budgets_of_a_learner_that_waits(budget: dict[str, float], term: str, words: str) -> None:
    """At S = 0 the learner alone would keep them, and the rehearsed job does not: a larger S is named."""
    answer = plan(question(job(bound=0, **budget)))
    assert answer.fleets == ()
    assert answer.binding_term == term
    assert words in (answer.infeasible_because or "")
    assert "would keep the learner busy 100% of the time" in (answer.infeasible_because or "")


def test_a_budget_chooses_among_the_fleets() -> None:
    """The cheapest misses the deadline, a quicker one keeps it."""
    market = [
        offer("slow", 0.10, 1.0, count=4, up_mbps=10.0, down_mbps=0.5),
        offer("quick", 0.30, 1.0, count=4, up_mbps=100.0, down_mbps=100.0),
    ]
    free = plan(question(job(bound=3), market))
    between = (named(free, "cheapest").hours + named(free, "fastest").hours) / 2
    answer = plan(question(job(bound=3, deadline_hours=between), market))
    assert set(named(answer, "cheapest").counts) == {"quick"}


def test_too_few_workers() -> None:
    """Four bring 2.0 of 2.0; of three it is said what is missing, and what they would do."""
    answer = plan(question(market=[offer("a", 0.10, 0.5, count=3, up_mbps=10.0, down_mbps=100.0)]))
    assert answer.binding_term == "offers"
    assert "find more workers" in (answer.infeasible_because or "")
    assert answer.most_allowed is not None
    assert answer.most_allowed.counts == {"a": 3}
    assert answer.most_allowed.forecast is not None
    assert answer.most_allowed.forecast.utilisation == pytest.approx(1.5 / 1.6, abs=0.02)
    assert answer.bounds


def test_no_worker_at_all() -> None:
    """Also where there are some that may not be used."""
    answer = plan(question(job(trust="audited")))
    assert (answer.fleets, answer.most_allowed, answer.bounds) == ((), None, ())
    assert answer.binding_term == "trust"
    assert set(answer.refused) == {"a", "b"}
    assert plan(question(market=())).binding_term == "offers"


def test_pauses_that_never_end() -> None:
    """An engine that stands still for longer than there is between two versions."""
    answer = plan(question(job(bound=1), apply_s=11.0))
    assert answer.binding_term == "broadcast"
    assert answer.planned_rate == math.inf
    assert "publish less often" in (answer.infeasible_because or "")


def test_aborting_costs_what_runs() -> None:
    """(1 + cv^2) / 2 mean completions of 2 s a publication; cv 0 and kappa 2: 1 s of 20 s."""
    asked = question(job(bound=3, on_update="abort"), length_cv=0.0, headroom=1.0)
    assert loading_of(asked.job) is Loading.ABORT
    assert plan(asked).planned_rate == pytest.approx(1.6 / 0.95)


def test_work_that_is_always_too_old() -> None:
    """A fleet with which no step ends keeps no budget, whatever is allowed."""
    asked = question()
    fleet = Fleet((("a", 4, ""),), 0.4, 0.4, 2.0, 1, 0.3, math.inf, math.inf, math.inf, math.inf)
    assert asked.over(fleet) == (
        "staleness",
        "no step is ever finished: every completion is too old before its batch is whole; raise S",
    )
    assert asked.over(replace(fleet, hours=1.0, usd=0.4)) is None


def test_slots() -> None:
    """As given, or rate times T_gen, at least one."""
    asked = question()
    assert slots_of(MARKET[1], asked.facts) == 2
    assert slots_of(MARKET[0], question(slots=7.0).facts) == 7
    assert slots_of(offer("x", rate=1e9), asked.facts) == 65_536


def test_a_large_job_is_rehearsed_on_a_smaller_scale() -> None:
    """Rates, slots and rollouts a step shrink together; what one step needs of them stays."""
    asked = question(job(size=16, groups=256), [offer("a", 0.1, 8.0, count=100), offer("b", 0.1, 64.0, count=1)])
    inputs = capacity_inputs(asked.job, asked.facts, asked.by_id, {"a": 100, "b": 1}, bound=4, t_bcast_s=1.0)
    assert inputs.job.rollouts_per_step == 256
    assert sum(worker.rate for worker in inputs.workers) == pytest.approx((800 + 64) / 16)
    assert [worker.slots for worker in inputs.workers] == [18] * 6
    many = [offer("a", 0.1, 0.01, count=100_000)]
    crowd = capacity_inputs(asked.job, asked.facts, {"a": many[0]}, {"a": 100_000}, bound=4, t_bcast_s=1.0)
    assert len(crowd.workers) == 64
    assert sum(worker.rate for worker in crowd.workers) == pytest.approx(1000 / 16)


def test_the_broadcast_of_a_larger_kappa() -> None:
    """Its delta is larger: 4^0.5 = 2 times."""
    facts = question(delta_growth=0.5, keyframe_bytes=1e9).facts
    assert broadcast_of(facts, 4)([1e9], [1e9]) == pytest.approx(2 * broadcast_of(facts, 1)([1e9], [1e9]))


def test_the_bound_of_a_setting() -> None:
    """A publish_every that is set holds, up to S + 1."""
    asked = question(job(bound=2, publish_every=9))
    assert setting_of(asked, {"a": 4}, 2).kappa == 3
    assert [line.kappa for line in bound_lines(asked, {"a": 4})][:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"headroom": 0.99}, "headroom is 0.99: give a number from 1 to 10"),
        ({"required_rate": 0.0}, "required_rate is 0: give completions per second"),
        ({"asked": job(usd=math.inf)}, "budget.usd is inf: give a finite number"),
        ({"seeder_mbps": 5e-324}, "bcast_s is inf: it must be finite"),
    ],
)
def test_questions_that_cannot_be(changes: dict, words: str) -> None:
    """Refused with field, value and fix."""
    with pytest.raises(PlanRefused, match=words):
        plan(question(**changes))


def test_an_offer_of_nothing_is_no_use() -> None:
    """It comes last of all and is refused."""
    market = [*MARKET, Offer(id="idle", uusd_per_hour=0, completions_per_second=0.0, up_mbps=1.0, down_mbps=1.0)]
    answer = plan(question(job(bound=1), market))
    assert "idle" in answer.refused
    assert all("idle" not in one.fleet.counts for one in answer.fleets)
