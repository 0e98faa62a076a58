"""The market's verdicts on small cases whose right answer is plain, and what holds for any case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.domain.capacity_inputs import Estimate
from coordinator.domain.market import (
    Bidder,
    Figures,
    JobMarket,
    broadcast_of,
    decide,
    inputs_of,
    kappa_of,
    limits_of,
    required_of,
    terms_of,
)
from coordinator.domain.market_money import unpayable
from coordinator.domain.market_moves import why_it_stays
from coordinator.domain.market_orders import timed
from coordinator.domain.model import Job, JobState, QuoteRow
from coordinator.wire.job import JobConfig
from pricing.throughput import Throughput

NOW = 1_000.0
FIGURES = Figures(train_s=8.0, bcast_p95_s=1.0, lengths=(10, 20, 30), refresh_bytes=1e6)


def job(name: str = "j", *, steps: int = 10_000, committed: int = 5, **sections: Any) -> Job:
    """R = 64 rollouts a step: with T_train = 8 s it needs 8 a second."""
    config = JobConfig.model_validate(
        {
            "name": name,
            "model": "m",
            "environment": {"type": "digit_sort"},
            "algorithm": {"group_size": 8, "groups_per_step": 8},
            "staleness": {"max": 3},
            "workers": {"headroom": 1.0},
            "budget": {"steps": steps},
        }
        | sections
    )
    return Job(name, name, "t", config, JobState.RUNNING, "", 0.0, NOW - 3600, "m", committed_steps=committed)


def bidder(name: str, usd: float, rate: float, **changes: Any) -> Bidder:
    """Measured without doubt, admitted always, never lost."""
    seen = Throughput(rate, NOW).observed(rate * 1e5, 1e5, NOW)
    known = Bidder(name, name, "o", round(usd * 1e6), 16, seen, Estimate(1.0), 1.0, tokens_per_s=20 * rate)
    return replace(known, **changes)


def fresh(name: str, usd: float, **changes: Any) -> Bidder:
    """Nobody knows yet what it brings."""
    return replace(bidder(name, usd, 1.0), rate=Throughput(1.0, NOW), **{"tokens_per_s": 0.0} | changes)


def market(*bidders: Bidder, figures: Figures = FIGURES, spent: int = 0, **changes: Any) -> JobMarket:
    return JobMarket(job(**changes), figures, bidders, spent)


def open_quote(one: Bidder) -> QuoteRow:
    return timed("j", one.worker_id, 1, one.uusd_per_hour, "", NOW - 100)


def held(one: Bidder) -> Bidder:
    return replace(one, quote=open_quote(one))


class TestTheCheapestSet:
    def test_six_workers_of_which_two_bring_the_rate_for_the_least_money(self) -> None:
        """8 a second: 5 + 3.5 for 0.50 USD/h; every other pair that suffices costs more."""
        pool = [
            bidder("a", 0.20, 5.0),
            bidder("b", 0.30, 3.5),
            bidder("c", 0.45, 4.0),
            bidder("d", 0.60, 6.0),
            bidder("e", 0.80, 8.5),
            bidder("f", 0.35, 2.0),
        ]
        verdict = decide([market(*pool)], NOW)["j"]
        assert set(verdict.active) == {"a", "b"}
        assert verdict.usd_per_hour == pytest.approx(0.5)
        assert verdict.offered == pytest.approx(8.5, rel=0.01)
        assert verdict.required == pytest.approx(8.0)
        assert verdict.standby["e"] == (
            "standby: 2 others keep the learner busy for less; your all-in price is 0.0261 USD per 1,000 completions, place 3 of 6"
        )

    def test_one_alone_suffices(self) -> None:
        verdict = decide([market(bidder("a", 0.2, 9.0), bidder("b", 0.5, 9.0))], NOW)["j"]
        assert set(verdict.active) == {"a"}
        assert "1 other worker keeps the learner busy" in verdict.standby["b"]

    def test_who_raises_its_price_is_replaced(self) -> None:
        """Both bring the whole rate; the active one now asks more than the other."""
        before = bidder("a", 0.20, 9.0)
        dear = replace(held(before), uusd_per_hour=900_000)
        verdict = decide([market(dear, bidder("b", 0.40, 9.0))], NOW)["j"]
        assert set(verdict.active) == {"b"}

    def test_the_active_set_stays_where_little_is_to_be_saved(self) -> None:
        verdict = decide([market(held(bidder("a", 0.40, 9.0)), bidder("b", 0.39, 9.0))], NOW)["j"]
        assert set(verdict.active) == {"a"}

    def test_a_set_that_was_just_chosen_is_left_alone_unless_much_is_saved(self) -> None:
        """b saves 15 %: not within half a minute of the last change; c saves half at once, and so does a worker that is missing."""
        before, b, c = held(bidder("a", 0.40, 9.0)), bidder("b", 0.34, 9.0), bidder("c", 0.20, 9.0)
        late = replace(market(before, b), changed_at=NOW - 31)
        soon = replace(market(before, b), changed_at=NOW - 29)
        assert set(decide([late], NOW)["j"].active) == {"b"}
        assert set(decide([soon], NOW)["j"].active) == {"a"}
        assert set(decide([replace(market(before, c), changed_at=NOW - 29)], NOW)["j"].active) == {"c"}
        slow = replace(before, rate=bidder("a", 0.4, 4.0).rate)
        assert "b" in decide([replace(market(slow, b), changed_at=NOW - 29)], NOW)["j"].active

    def test_too_few_workers_are_all_active_and_the_others_are_told_what_is_lacking(self) -> None:
        idle = bidder("c", 0.1, 0.0, tokens_per_s=1.0, tried_until=NOW + 60)
        verdict = decide([market(bidder("a", 0.2, 2.0), bidder("b", 0.3, 2.0), idle)], NOW)["j"]
        assert set(verdict.active) == {"a", "b"}
        assert verdict.activation is not None
        assert "find more workers" in str(verdict.activation.infeasible_because)
        assert "brings no completions" in verdict.standby["c"]

    def test_the_budget_an_hour_holds(self) -> None:
        verdict = decide(
            [market(bidder("a", 0.2, 4.1), bidder("b", 0.3, 4.1), budget={"steps": 10_000, "usd_per_hour": 0.25})], NOW
        )["j"]
        assert verdict.usd_per_hour <= 0.25
        assert set(verdict.active) == {"a"}
        assert "the budget allows 0.2500 USD/h" in verdict.standby["b"]

    def test_rented_machines_and_what_was_spent_too_much_count_against_the_budget_an_hour(self) -> None:
        """0.55 USD/h for a at 0.2 and b at 0.3: not beside a machine of 0.1, nor when 0.56 were spent in the last hour (0.45 are left)."""
        case = market(bidder("a", 0.2, 4.1), bidder("b", 0.3, 4.1), budget={"steps": 10_000, "usd_per_hour": 0.55})
        assert set(decide([case], NOW)["j"].active) == {"a", "b"}
        assert set(decide([replace(case, rented_uusd=100_000)], NOW)["j"].active) == {"a"}
        assert set(decide([replace(case, hour_uusd=560_000)], NOW)["j"].active) == {"a"}
        assert not decide([replace(case, hour_uusd=610_000)], NOW)["j"].active

    def test_workers_that_ask_for_no_money_are_always_active_and_their_rate_is_not_bought(self) -> None:
        verdict = decide([market(bidder("free", 0.0, 5.0), bidder("a", 0.2, 3.5), bidder("b", 0.3, 9.0))], NOW)["j"]
        assert set(verdict.active) == {"free", "a"}
        enough = decide([market(bidder("free", 0.0, 9.0), bidder("a", 0.2, 3.5))], NOW)["j"]
        assert set(enough.active) == {"free"}

    def test_a_worker_without_weights_waits(self) -> None:
        verdict = decide([market(bidder("a", 0.2, 9.0, is_ready=False))], NOW)["j"]
        assert not verdict.active
        assert "no version yet" in verdict.standby["a"]


class TestUntilItIsMeasured:
    def test_everyone_is_active_before_the_learners_time_is_known(self) -> None:
        verdict = decide([market(fresh("a", 0.2), fresh("b", 9.0), figures=Figures())], NOW)["j"]
        assert set(verdict.active) == {"a", "b"} == verdict.timed
        assert verdict.required is None
        assert verdict.assessment is None

    def test_as_far_as_the_budget_goes_the_cheapest_first(self) -> None:
        budget = {"steps": 10, "usd_per_hour": 1.0}
        verdict = decide([market(fresh("a", 0.6), fresh("b", 0.5), fresh("c", 0.3), figures=Figures(), budget=budget)], NOW)["j"]
        assert set(verdict.active) == {"b", "c"}
        assert verdict.standby["a"] == (
            "standby: its price of 0.6000 USD/h does not fit into the budget, of which 0.2000 USD/h are free"
        )

    @pytest.mark.parametrize("one", [fresh("a", 10_000.0), bidder("a", 10_000.0, 9.0)])
    @pytest.mark.parametrize("figures", [FIGURES, Figures()])
    def test_nobody_is_active_who_would_use_the_budget_up_before_anybody_sees_it(self, one: Bidder, figures: Figures) -> None:
        """10 USD: a tenth in 120 s are 30 USD/h."""
        budget = {"steps": 10_000, "usd": 10.0}
        case = market(one, figures=figures, budget=budget)
        verdict = decide([case], NOW)["j"]
        assert verdict.standby == {
            "a": "standby: its price of 10000.0000 USD/h would use up more than a tenth of the budget of 10 USD in 120 s (budget.usd):"
            " at most 30.0000 USD/h fit"
        }
        assert unpayable(case, verdict, NOW) is None
        for usd, taken in ((30.0, {"a"}), (30.0001, set())):
            cheaper = market(replace(one, uusd_per_hour=round(usd * 1e6)), figures=figures, budget=budget)
            assert set(decide([cheaper], NOW)["j"].active) == taken

    def test_no_more_than_what_is_left_for_one_trial(self) -> None:
        """0.01 USD left: in a trial of 120 s that is 0.3 USD/h."""
        budget = {"steps": 10, "usd": 1.0}
        verdict = decide([market(fresh("a", 0.2), fresh("b", 0.2), figures=Figures(), budget=budget, spent=990_000)], NOW)["j"]
        assert set(verdict.active) == {"a"}
        both = {"steps": 10, "usd": 1.0, "usd_per_hour": 0.1}
        assert not decide([market(fresh("a", 0.2), figures=Figures(), budget=both)], NOW)["j"].active

    def test_a_new_worker_is_tried_beside_the_cheapest_set(self) -> None:
        verdict = decide([market(held(bidder("a", 0.2, 9.0)), fresh("new", 0.1))], NOW)["j"]
        assert set(verdict.active) == {"a", "new"}
        assert verdict.timed == {"new"}
        assert verdict.active["new"] == "its rate is being measured"

    def test_within_what_the_budget_leaves_beside_it(self) -> None:
        budget = {"steps": 10_000, "usd_per_hour": 0.25}
        verdict = decide([market(held(bidder("a", 0.2, 9.0)), fresh("new", 0.1), budget=budget)], NOW)["j"]
        assert set(verdict.active) == {"a"}
        assert "does not fit into the budget" in verdict.standby["new"]

    def test_a_trial_ends_and_then_the_workers_word_counts_if_it_made_anything(self) -> None:
        """It is paid by the token then, as the cheapest that suffices."""
        late = fresh("new", 0.1, tried_until=NOW + 60, tokens_per_s=1.0)
        dear = replace(late, uusd_per_hour=900_000)
        assert set(decide([market(held(bidder("a", 0.2, 9.0)), dear)], NOW)["j"].active) == {"a"}
        alone = decide([market(late)], NOW)["j"]
        assert set(alone.active) == {"new"}
        assert not alone.timed
        again = decide([market(replace(late, tried_until=NOW - 60))], NOW)["j"]
        assert not again.timed

    @pytest.mark.parametrize("figures", [FIGURES, Figures()])
    @pytest.mark.parametrize("activation", ["market", "all"])
    def test_who_made_nothing_while_it_was_tried_is_not_paid_for_time_again(self, figures: Figures, activation: str) -> None:
        """Until its pause is over."""
        late, case = fresh("new", 0.1, tried_until=NOW + 60), {"workers": {"activation": activation}}
        verdict = decide([market(late, figures=figures, **case)], NOW)["j"]
        assert not verdict.active
        assert verdict.standby["new"] == (
            "standby: nothing of its work was accepted in 120 s that it was paid by the hour: it is tried again in 60 s"
        )
        assert decide([market(late, figures=figures, **case)], NOW + 60)["j"].timed == {"new"}

    def test_activation_all_takes_everyone(self) -> None:
        everyone = market(bidder("a", 0.2, 9.0), bidder("b", 9.0, 9.0), workers={"activation": "all"})
        verdict = decide([everyone], NOW)["j"]
        assert set(verdict.active) == {"a", "b"}
        assert verdict.active["a"] == "workers.activation is all"


class TestSeveralJobs:
    def test_a_worker_that_asks_for_money_serves_one_of_them(self) -> None:
        pool = [bidder("a", 0.2, 9.0), bidder("b", 0.3, 9.0), bidder("free", 0.0, 1.0)]
        one, two = market(*pool, name="one"), market(*pool, name="two")
        verdicts = decide([one, two], NOW)
        paid = [{worker for worker in verdict.active if worker != "free"} for verdict in verdicts.values()]
        assert paid[0].isdisjoint(paid[1])
        assert all(paid)
        assert (
            "works for another job" in verdicts["one"].standby[next(iter(paid[1]))]
            or "works for another job" in verdicts["two"].standby[next(iter(paid[0]))]
        )

    def test_a_job_uses_only_those_who_may_serve_it(self) -> None:
        pool = [bidder("a", 0.2, 9.0), bidder("b", 0.3, 9.0)]
        verdicts = decide([market(*pool, name="one"), market(pool[1], name="two", workers={"weight": 2.0, "headroom": 1.0})], NOW)
        assert set(verdicts["two"].active) == {"b"}
        assert set(verdicts["one"].active) == {"a"}

    def test_a_job_that_comes_later_is_given_its_share_of_a_pool_that_is_too_small(self) -> None:
        """Two workers that the first job holds and needs: one is let go, and the other job, whose learner nobody knows, has it."""
        pool = [bidder("a", 0.2, 4.0), bidder("b", 0.3, 4.0)]
        old = market(*(held(one) for one in pool), name="old")
        new = market(*pool, name="new", figures=Figures())
        verdicts = decide([old, new], NOW)
        assert [set(verdicts[name].active) for name in ("old", "new")] == [{"a"}, {"b"}]
        assert verdicts["old"].activation is not None
        assert "2 jobs share the pool and it brings less" in str(verdicts["old"].activation.infeasible_because)
        assert verdicts["old"].reason.startswith("1 worker brings 4 completions/s of 4 planned for")

    def test_who_asks_for_nothing_counts_for_the_job_whose_weights_it_holds(self) -> None:
        """It may serve both, and one engine holds one model: the other job buys what it needs."""
        free, paid = bidder("free", 0.0, 9.0), bidder("a", 0.2, 9.0)
        there = market(free, paid, name="there")
        elsewhere = market(replace(free, holds=False), paid, name="elsewhere")
        verdicts = decide([there, elsewhere], NOW)
        assert set(verdicts["there"].active) == {"free"}
        assert set(verdicts["elsewhere"].active) == {"free", "a"}
        assert [verdicts[name].offered for name in ("there", "elsewhere")] == pytest.approx([9.0, 9.0], rel=0.01)

    def test_what_makes_the_first_steps_of_a_job_is_left_to_it(self) -> None:
        """The other one lacks rate, and may not take it; who asks for no money works for both."""
        one, free = bidder("a", 0.2, 9.0), bidder("free", 0.0, 1.0)
        new = market(held(one), held(free), name="new", figures=Figures())
        verdicts = decide([market(one, free, name="old"), new], NOW)
        assert set(verdicts["old"].active) == {"free"}
        assert verdicts["old"].standby["a"].startswith("standby: ")
        assert set(verdicts["new"].active) == {"a", "free"}

    @pytest.mark.parametrize(("steps", "comes"), [(68, False), (69, True)])
    def test_a_worker_changes_jobs_only_where_it_pays(self, steps: int, comes: bool) -> None:
        """1.25 GB over 100 Mbit/s are 100 s, and 2 s to apply: five times that are 510 s, 63.75 steps of 8 s beyond the 5 that are done.

        Both jobs need both workers; the second one's learner has them. It keeps them where the first could not use one for long enough.
        """
        figures = replace(FIGURES, start_bytes=1.25e9)
        pool = [bidder(name, 0.2, 4.0, apply_s=2.0) for name in ("a", "b")]
        cold = [replace(one, holds=False) for one in pool]
        short = market(*cold, name="short", steps=steps, figures=figures)
        other = market(*(held(one) for one in pool), name="other")
        verdicts = decide([short, other], NOW)
        assert len(verdicts["other"].active) == (1 if comes else 2)
        assert len(verdicts["short"].active) == (1 if comes else 0)
        assert set(decide([short], NOW)["short"].active) == {"a", "b"}  # nobody else has it
        loading = replace(short, bidders=tuple(held(one) for one in cold))
        assert set(decide([loading], NOW)["short"].active) == {"a", "b"}  # it is on its way already

    def test_why_it_stays(self) -> None:
        assert why_it_stays(100.0, 500.0) == ""
        assert why_it_stays(100.0, 499.0) == (
            "another job has it, and it would load this job's weights for 100 s of the 499 s that are left: that pays where at"
            " least 4 times as much is left for work"
        )

    @pytest.mark.parametrize(("since", "kept"), [(499, True), (501, False)])
    def test_a_set_that_was_loaded_is_left_alone_until_that_is_repaid(self, since: float, kept: bool) -> None:
        """b saves 15 %; a, which another job could use, loaded 1.25 GB for 100 s when it came."""
        figures = replace(FIGURES, start_bytes=1.25e9)
        pool = (held(bidder("a", 0.40, 9.0)), bidder("b", 0.34, 9.0))
        first = replace(market(*pool, figures=figures, name="first"), changed_at=NOW - since)
        other = market(bidder("a", 0.40, 9.0), name="other", figures=Figures(), workers={"activation": "all", "weight": 0.001})
        alone = decide([first], NOW)["first"]
        assert set(alone.active) == {"b"}
        assert ("a" in decide([first, other], NOW)["first"].active) == kept

    def test_a_trial_is_for_the_job_of_more_weight(self) -> None:
        new = fresh("new", 0.1)
        verdicts = decide(
            [market(new, name="one", figures=Figures()), market(new, name="two", figures=Figures(), workers={"weight": 2.0})], NOW
        )
        assert set(verdicts["two"].active) == {"new"}
        assert not verdicts["one"].active


class TestWhatItIsDecidedFrom:
    def test_limits_are_what_is_left(self) -> None:
        budget = {"steps": 10, "usd": 2.0, "usd_per_hour": 1.5, "deadline_hours": 3.0}
        limits = limits_of(market(budget=budget, spent=500_000), NOW)
        assert (limits.uusd, limits.uusd_per_hour, limits.deadline_hours) == (1_500_000, 1_500_000, 2.0)
        assert limits_of(market(budget=budget, spent=9_000_000), NOW).uusd == 0
        none = limits_of(market(), NOW)
        assert (none.uusd, none.uusd_per_hour, none.deadline_hours) == (None, None, None)

    def test_pauses_raise_the_rate(self) -> None:
        """A worker that stands still for 2 s of each 8 s brings three quarters; kappa is 2 at once if a broadcast takes 10 s."""
        still = bidder("a", 0.2, 9.0, apply_s=2.0, bcast_s=3.0)
        fixed = {"max": 3, "publish_every": 1}
        assert required_of(market(still, staleness=fixed), NOW)(1.0) == pytest.approx(8.0 / 0.75)
        assert required_of(market(still, staleness={"max": 3}), NOW)(10.0) == pytest.approx(8.0 / (1 - 2 / 16))
        endless = bidder("a", 0.2, 9.0, apply_s=9.0, bcast_s=9.0)
        assert required_of(market(endless, staleness=fixed), NOW)(1.0) == pytest.approx(8.0 / 0.05)
        assert required_of(market(), NOW)(1.0) == pytest.approx(8.0)

    def test_replaced_groups_are_made_as_well(self) -> None:
        assert required_of(market(figures=replace(FIGURES, no_signal=0.2)), NOW)(1.0) == pytest.approx(10.0)

    def test_terms_tell_the_horizon_and_the_traffic(self) -> None:
        terms = terms_of(market(steps=455, committed=5), NOW)
        assert terms.horizon_hours == pytest.approx(1.0)
        assert terms.refresh_s == 8.0
        ended = terms_of(market(steps=5, committed=5, figures=Figures()), NOW)
        assert ended.horizon_hours > 0
        assert ended.refresh_s == float("inf")

    def test_kappa_is_that_of_the_publications(self) -> None:
        assert kappa_of(market(staleness={"max": 6}), 20.0, ()) == 3
        assert kappa_of(market(), 1.0, [(1.0, 1.2)]) == 2  # at most S - 1, and 1.2 s are 5 % of 24 s

    def test_a_broadcast_is_scaled_by_the_links(self) -> None:
        """The measured 1 s was for a downlink of 100 Mbit/s: half of it takes twice as long."""
        linked = bidder("a", 0.2, 9.0, up_mbps=100.0, down_mbps=100.0)
        broadcast = broadcast_of(market(held(linked)))
        assert broadcast([12.5e6], [12.5e6]) == pytest.approx(1.0)
        assert broadcast([12.5e6], [6.25e6]) == pytest.approx(2.0)
        assert broadcast_of(market(bidder("a", 0.2, 9.0)))([1.0], [1.0]) == 1.0
        assert broadcast_of(market(linked, figures=Figures()))([1.0], [1.0]) == 0.0

    def test_the_capacity_model_gets_what_was_measured(self) -> None:
        one = bidder("a", 0.2, 9.0, apply_s=0.5, bcast_s=0.2)
        inputs = inputs_of(market(figures=replace(FIGURES, seeder_up=1.25e6)), [one, bidder("b", 0.1, 0.0)], NOW)
        assert inputs is not None
        assert [worker.id for worker in inputs.workers] == ["a"]
        assert inputs.workers[0].bcast_s == 0.5
        assert inputs.transfer is not None
        assert inputs.transfer.seeder_up_mbps == 10.0
        aborting = inputs_of(market(staleness={"max": 3, "on_update": "abort"}), [one], NOW)
        assert aborting is not None
        assert aborting.workers[0].loading == "abort"
        assert inputs_of(market(figures=Figures(train_s=1.0)), [one], NOW) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 9), st.booleans(), st.booleans()), max_size=7),
    st.one_of(st.none(), st.floats(0.1, 4)),
    st.booleans(),
)
def test_any_verdict_stays_in_budget_and_speaks_to_everyone(
    pool: list[tuple[float, float, bool, bool]], limit: float | None, measured: bool
) -> None:
    bidders = [
        replace(bidder(f"w{n}", usd, rate) if known else fresh(f"w{n}", usd), is_ready=ready)
        for n, (usd, rate, known, ready) in enumerate(pool)
    ]
    budget = {"steps": 10_000} | ({} if limit is None else {"usd_per_hour": limit})
    verdict = decide([market(*bidders, figures=FIGURES if measured else Figures(), budget=budget)], NOW)["j"]
    assert verdict.active.keys().isdisjoint(verdict.standby)
    assert verdict.active.keys() | verdict.standby.keys() == {one.worker_id for one in bidders}
    assert limit is None or verdict.usd_per_hour <= limit + 1e-6
    assert all(one.worker_id in verdict.active for one in bidders if one.is_ready and one.uusd_per_hour == 0)
    assert all(words for words in (*verdict.active.values(), *verdict.standby.values()))


class TestMoneyThatPaysNobody:
    """A job that nobody can be paid for pauses, in words, rather than stand still."""

    def why(self, case: JobMarket) -> str | None:
        return unpayable(case, decide([case], NOW)["j"], NOW)

    def test_before_the_rates_are_known(self) -> None:
        """0.36 USD/h for 120 s are 0.012 USD."""
        budget = {"steps": 10, "usd": 1.0}
        dear = fresh("a", 0.36)
        assert self.why(market(dear, figures=Figures(), budget=budget, spent=988_000)) is None
        assert self.why(market(dear, figures=Figures(), budget=budget, spent=988_100)) == (
            "0.0119 USD are left of the budget of 1.0 USD, which pay 0.3600 USD/h, the least that is asked, for less than 120 s"
            " (budget.usd): raise it and resume"
        )

    def test_one_strangers_price_pauses_nobody(self) -> None:
        """Of 1 USD, 0.1 are a tenth: a lone worker waits until less is left."""
        budget = {"steps": 10, "usd": 1.0}
        for figures in (FIGURES, Figures()):
            stranger = fresh("a", 10_000.0)
            assert self.why(market(stranger, figures=figures, budget=budget, spent=900_000)) is None
            assert self.why(market(stranger, figures=figures, budget=budget, spent=900_001)) is not None

    def test_the_cheapest_set_works_though_the_budget_does_not_pay_it_to_the_end(self) -> None:
        """9,995 steps of 8 s at 0.2 USD/h are 4.4 USD: b, which brings the rate for more, waits as it would with more money."""
        pool = (bidder("a", 0.2, 9.0), bidder("b", 0.3, 9.0))
        case = market(*pool, budget={"steps": 10_000, "usd": 1.0}, spent=500_000)
        verdict = decide([case], NOW)["j"]
        assert set(verdict.active) == {"a"}
        assert "; all steps would cost 4.4" in verdict.reason
        assert verdict.reason.endswith("0.5000 USD are left: the job works until budget.usd is used up")
        assert self.why(case) is None
        assert "until budget.usd" not in decide([market(*pool, budget={"steps": 10_000, "usd": 5.0})], NOW)["j"].reason

    def test_half_the_rate_takes_twice_as_long(self) -> None:
        """4.5 of 8 completions a second: 22.21 h become 39.48 h, at 0.2 USD/h 7.9 USD."""
        case = market(bidder("a", 0.2, 4.5), budget={"steps": 10_000, "usd": 6.0})
        assert "over 39.4" in decide([case], NOW)["j"].reason

    def test_when_nothing_is_left_for_a_measured_worker(self) -> None:
        budget = {"steps": 10_000, "usd": 1.0}
        some = market(bidder("a", 0.2, 9.0), budget=budget, spent=999_999)
        none = market(bidder("a", 0.2, 9.0), budget=budget, spent=1_000_000)
        assert self.why(some) is None
        assert decide([none], NOW)["j"].standby["a"] == "standby: budget.usd is used up"
        assert "raise it and resume" in (self.why(none) or "")

    def test_not_where_something_else_is_in_the_way(self) -> None:
        budget = {"steps": 10, "usd": 1.0}
        assert self.why(market(bidder("a", 0.2, 9.0))) is None
        assert self.why(market(budget=budget, spent=1_000_000)) is None
        assert self.why(market(fresh("a", 0.2, is_ready=False), figures=Figures(), budget=budget, spent=1_000_000)) is None
        assert self.why(market(fresh("a", 0.2), figures=Figures(), budget=budget | {"usd_per_hour": 0.1}, spent=950_000)) is None
        assert self.why(market(fresh("a", 0.0), figures=Figures(), budget=budget, spent=1_000_000)) is None
