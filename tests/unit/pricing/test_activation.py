"""Activation by hand: the set, the changes, the reasons. Random markets are in tests/properties/test_activation.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import pytest

from pricing.activation import Habits, activate
from pricing.cost import Terms
from pricing.decision import Activation
from pricing.offers import Offer
from pricing.pool import Broadcast, Held, Limits, Need, constant
from tests.unit.pricing.markets import fluid, offer

TEN_HOURS = Terms(horizon_hours=10)
MARKET = (
    offer("volunteer", 0.0, 1.0),
    offer("small", 0.2, 1.0, count=3),
    offer("large", 1.0, 4.0),
    offer("dear", 1.5, 2.0, count=5),
)


def need(rate: float, headroom: float = 1.0, **other: Broadcast) -> Need:
    """The rate, whatever the broadcast."""
    return Need(constant(rate), headroom, **other)


def counts(decision: Activation) -> dict[str, int]:
    """Workers by offer."""
    found: dict[str, int] = {}
    for one in decision.picked:
        found[one.offer_id] = found.get(one.offer_id, 0) + one.count
    return found


def test_the_cheapest_set() -> None:
    """1 + 3 + 4 = 8 for 1.60 USD/h; without the small ones the large one would not do."""
    decision = activate(MARKET, need(8), TEN_HOURS)
    assert counts(decision) == {"volunteer": 1, "small": 3, "large": 1}
    assert (decision.rate, decision.required, decision.usd_per_hour, decision.uusd_per_hour) == (
        8,
        8,
        pytest.approx(1.6),
        1_600_000,
    )
    assert decision.usd_per_thousand == pytest.approx(1.6 / 28.8)
    assert decision.bound_usd_per_hour == pytest.approx(1.6)
    assert (decision.binding, decision.infeasible_because, decision.drain) == ("rate", None, ())
    assert decision.reason == "5 workers bring 8 completions/s of 8 planned for 1.6000 USD/h all in: the cheapest set that suffices"
    assert [one.reason for one in decision.picked] == [
        "asks for no money",
        "0.0556 USD per 1,000 completions, place 2 of 4",
        "0.0694 USD per 1,000 completions, place 3 of 4",
    ]


def test_headroom() -> None:
    """4 are enough for 4, not for 4.6."""
    assert counts(activate(MARKET, need(4), TEN_HOURS)) == {"volunteer": 1, "small": 3}
    decision = activate(MARKET, Need(constant(4.0)), TEN_HOURS)
    assert counts(decision) == {"volunteer": 1, "large": 1}
    assert decision.rate >= 4.6


def test_nothing_is_needed() -> None:
    """No worker, no cost, no rate: 1,000 completions cost more than any money."""
    decision = activate(MARKET, need(0), TEN_HOURS)
    assert (decision.picked, decision.usd_per_hour, decision.usd_per_thousand) == ((), 0.0, inf)
    assert decision.bound_usd_per_hour == 0.0


class TestInfeasible:
    """Because of what, and the most that is allowed."""

    def test_the_market(self) -> None:
        decision = activate(MARKET, need(20), TEN_HOURS)
        assert decision.binding == "offers"
        assert decision.infeasible_because == (
            "all that may be used bring 18 completions/s of 20 needed: find more workers, or lower the rate"
        )
        assert decision.rate == 18

    def test_no_market(self) -> None:
        decision = activate((), need(1), TEN_HOURS)
        assert (decision.picked, decision.binding) == ((), "offers")
        assert "nothing is allowed" in decision.reason

    def test_money_by_the_hour(self) -> None:
        decision = activate(MARKET, need(8), TEN_HOURS, limits=Limits(uusd_per_hour=1_200_000))
        assert decision.infeasible_because == (
            "the cheapest set costs 1.6000 USD/h all in and the budget allows 1.2000 USD/h: allow more"
        )
        assert (decision.binding, counts(decision)) == ("usd_per_hour", {"volunteer": 1, "small": 1, "large": 1})

    def test_money_to_the_end(self) -> None:
        """16 USD in 10 h; with 12 USD at the same price per completion a slower fleet does not help, a cheaper one does."""
        decision = activate(MARKET, need(8), TEN_HOURS, limits=Limits(uusd=12_000_000))
        assert decision.binding == "usd"
        assert "costs 16.0000 USD over 10.00 h and 12.0000 USD are left" in str(decision.infeasible_because)
        assert counts(decision) == {"volunteer": 1, "small": 3}  # half the rate, twice the time, 0.60 USD/h
        assert activate(MARKET, need(8), TEN_HOURS, limits=Limits(uusd=16_000_000)).infeasible_because is None
        assert activate(MARKET, need(8), Terms(), limits=Limits(uusd=1)).infeasible_because is None  # no end: nothing to sum up

    def test_no_money(self) -> None:
        """Volunteers work all the same."""
        decision = activate(MARKET, need(8), TEN_HOURS, limits=Limits(uusd=0, uusd_per_hour=0))
        assert counts(decision) == {"volunteer": 1}

    def test_the_deadline(self) -> None:
        decision = activate(MARKET, need(8), TEN_HOURS, limits=Limits(deadline_hours=9))
        assert decision.binding == "deadline"
        assert "the learner itself needs 10.00 h at full rate and the deadline is in 9.00 h" in str(decision.infeasible_because)
        assert decision.rate == 8

    def test_trust(self) -> None:
        decision = activate((*MARKET, offer("known", 9.0, 2.0, trust="named")), need(8), TEN_HOURS, limits=Limits(trust="audited"))
        assert decision.binding == "trust"
        assert "with owners below the trust audited it would be 20: ask for less trust" in str(decision.infeasible_because)
        assert counts(decision) == {"known": 1}
        assert decision.refused["small"] == "its owner's trust is any, the job asks for audited"

    def test_owners(self) -> None:
        market = (offer("a", count=9, owner="ann"), offer("b", count=9, owner="bob"), offer("c", count=1))
        decision = activate(market, need(12), TEN_HOURS, limits=Limits(per_owner=3))
        assert decision.binding == "owner"
        assert "bring 7 completions/s of 12 needed; without limits for each owner it would be 19" in str(
            decision.infeasible_because
        )
        assert counts(decision) == {"a": 3, "b": 3, "c": 1}
        more = activate(market, need(12), TEN_HOURS, limits=Limits(per_owner=3, owner_limits={"ann": 8}))
        assert counts(more) == {"a": 8, "b": 3, "c": 1}

    def test_the_broadcast(self) -> None:
        """100 MB at 8 Mbit/s are 100 s, and the period is 60 s."""
        slow = tuple(replace(one, down_mbps=8.0) for one in MARKET)
        decision = activate(slow, learner(4, 60, broadcast=partial(fluid, 1e8, 1e9)), TEN_HOURS)
        assert decision.binding == "broadcast"
        assert "a broadcast to any set that could bring enough takes too long" in str(decision.infeasible_because)
        assert decision.picked == ()


def learner(rate: float, period_s: float, broadcast: Broadcast) -> Need:
    """Workers that wait while they load, every `period_s`."""
    return Need(lambda t_bcast: rate * period_s / (period_s - t_bcast) if t_bcast < period_s else inf, 1.0, broadcast)


class TestBroadcast:
    """The rate falls due for the set that is chosen."""

    def test_a_slow_downlink_costs_the_others_rate(self) -> None:
        """The cheap worker needs 40 of 60 s: with it three times the rate is due. The market without it is cheaper."""
        market = (offer("slow", 0.1, 1.0, down_mbps=20.0), offer("fast", 0.3, 1.0, count=20))
        decision = activate(market, learner(3, 60, partial(fluid, 1e8, 1e9)), TEN_HOURS)
        assert counts(decision) == {"fast": 4}
        assert decision.t_bcast_s == pytest.approx(0.8)
        assert decision.rate >= decision.required == pytest.approx(3 * 60 / 59.2)

    def test_it_pays_to_wait(self) -> None:
        """At a hundredth of the price the slow ones are worth it."""
        market = (offer("slow", 0.003, 1.0, down_mbps=20.0, count=20), offer("fast", 0.3, 1.0, count=20))
        decision = activate(market, learner(3, 60, partial(fluid, 1e8, 1e9)), TEN_HOURS)
        assert counts(decision) == {"slow": 9}
        assert (decision.t_bcast_s, decision.required, decision.binding) == (40.0, 9.0, "broadcast")

    def test_shared_uplinks(self) -> None:
        """A seeder of 1 MB/s, 10 MB, peers that pass on 1 MB/s: with k of N workers such peers it takes 10·N/(1 + k) s.

        Five peers and a leech wait 10 s and bring the 6/s that this asks for; four peers would need three leeches, at 0.78 USD/h.
        """
        market = (offer("leech", 0.10, 1.0, up_mbps=1e-9, count=10), offer("peer", 0.12, 1.0, up_mbps=8.0, count=10))
        decision = activate(market, learner(5, 60, partial(fluid, 1e7, 1e6)), TEN_HOURS)
        assert counts(decision) == {"leech": 1, "peer": 5}
        assert decision.t_bcast_s == pytest.approx(10.0)
        assert decision.usd_per_hour == pytest.approx(0.7)


class TestSteady:
    """What is active stays unless it pays."""

    habits = Habits(margin=0.1, keep_share=0.9, payback_hours=1.0)

    def decide(self, market: tuple[Offer, ...], held: dict[str, int], rate: float = 4.0, **other: object) -> Activation:
        """With these workers active."""
        active = [Held(name, count, uusd_per_hour=200_000) for name, count in held.items()]
        return activate(market, need(rate), TEN_HOURS, held=active, habits=self.habits, **other)  # type: ignore[arg-type]

    def test_a_little_cheaper_is_not_enough(self) -> None:
        """5 % cheaper: stay. 20 %: go."""
        market = (offer("old", 0.20, 1.0, count=4), offer("new", 0.19, 1.0, count=4))
        stay = self.decide(market, {"old": 4})
        assert (counts(stay), stay.start, stay.drain) == ({"old": 4}, (), ())
        assert "the active set still does, and no other saves enough to switch" in stay.reason
        assert stay.picked[0].reason.startswith("active and warm; ")
        go = self.decide((offer("old", 0.20, 1.0, count=4), offer("new", 0.16, 1.0, count=4)), {"old": 4})
        assert counts(go) == {"new": 4}
        assert [(one.offer_id, one.count, one.reason) for one in go.drain] == [("old", 4, "the rate comes for less without it")]
        assert [(one.offer_id, one.count) for one in go.start] == [("new", 4)]

    def test_warm_up_must_be_repaid(self) -> None:
        """20 % cheaper, but two hours to warm up."""
        market = (offer("old", 0.20, 1.0, count=4), offer("new", 0.16, 1.0, count=4))
        held = [Held("old", 4)]
        terms = Terms(horizon_hours=1000, load_s=7200)
        assert counts(activate(market, need(4), terms, held=held, habits=self.habits)) == {"old": 4}

    def test_what_must_be_paid_is_no_saving(self) -> None:
        """Ten hours still to pay in any case: the free worker saves nothing."""
        market = (offer("old", 0.20, 4.0), offer("new", 0.1, 4.0))
        held = [Held("old", 1, unpaid_hours=10)]
        assert counts(activate(market, need(4), TEN_HOURS, held=held, habits=self.habits)) == {"old": 1}

    def test_killed(self) -> None:
        """One of two is gone: the other stays, the cheapest other comes."""
        market = (offer("a", 0.2, 2.0), offer("c", 0.21, 2.0), offer("d", 0.5, 2.0))
        decision = self.decide(market, {"a": 1, "b": 1})
        assert counts(decision) == {"a": 1, "c": 1}
        assert [(one.offer_id, one.reason) for one in decision.drain] == [("b", "its offer is gone")]
        assert [one.offer_id for one in decision.start] == ["c"]

    def test_it_raised_its_price(self) -> None:
        """And is replaced, with that reason."""
        market = (offer("a", 0.8, 4.0), offer("c", 0.3, 4.0))
        decision = self.decide(market, {"a": 1})
        assert counts(decision) == {"c": 1}
        assert decision.drain[0].reason == "its price rose from 0.2000 to 0.8000 USD/h and others bring the rate for less"

    def test_over_budget_it_goes_at_once(self) -> None:
        """Whatever it would cost to switch."""
        market = (offer("a", 0.20, 4.0), offer("c", 0.19, 4.0))
        assert counts(self.decide(market, {"a": 1})) == {"a": 1}
        assert counts(self.decide(market, {"a": 1}, limits=Limits(uusd_per_hour=195_000))) == {"c": 1}

    def test_a_band_below_the_plan(self) -> None:
        """Within `keep_share` of the plan nothing is started; below the required rate it is."""
        market = (offer("a", 0.2, 1.0, count=9),)
        habits = self.habits
        kept = activate(market, Need(constant(3.9), 1.1), TEN_HOURS, held=[Held("a", 4)], habits=habits)
        assert counts(kept) == {"a": 4}
        topped = activate(market, Need(constant(4.1), 1.1), TEN_HOURS, held=[Held("a", 4)], habits=habits)
        assert counts(topped) == {"a": 5}

    def test_a_large_surplus_goes(self) -> None:
        """Free workers too: nobody's card should idle for nothing."""
        market = (offer("a", 0.0, 1.0, count=9),)
        assert counts(self.decide(market, {"a": 5})) == {"a": 5}
        decision = self.decide(market, {"a": 9})
        assert counts(decision) == {"a": 4}
        assert decision.drain[0].count == 5

    def test_fewer_are_left(self) -> None:
        """And which offer that was; what can no longer be used says why."""
        decision = self.decide((offer("a", 0.2, 1.0, count=2), offer("b", 0.2, 1.0, count=9)), {"a": 4})
        assert [(one.offer_id, one.count, one.reason) for one in decision.drain] == [("a", 2, "its offer has 2 workers left")]
        expired = self.decide((offer("a", 0.2, 4.0, expires_at=5.0), offer("b", 0.2, 4.0)), {"a": 1}, now=5.0)
        assert expired.drain[0].reason == "its price has expired"

    def test_late(self) -> None:
        """A deadline that cannot be kept is said, with workers active too."""
        decision = self.decide((offer("a", 0.2, 4.0),), {"a": 1}, limits=Limits(deadline_hours=1))
        assert (decision.binding, counts(decision)) == ("deadline", {"a": 1})

    def test_nothing_suffices(self) -> None:
        """The active ones are kept in what is left."""
        decision = self.decide((offer("a", 0.2, 1.0),), {"a": 1})
        assert (counts(decision), decision.start, decision.drain) == ({"a": 1}, (), ())


class TestRefused:
    """Why an offer cannot be used."""

    @pytest.mark.parametrize(
        ("bad", "limits", "words"),
        [
            (offer(count=0), Limits(), "no worker of it is left"),
            (offer(rate=0.0), Limits(), "it brings no completions"),
            (offer(expires_at=10.0), Limits(), "its price has expired"),
            (offer(trust="audited"), Limits(trust="named"), "its owner's trust is audited, the job asks for named"),
            (offer(reliability=0.5), Limits(least_reliability=0.9), "its reliability is 0.500, at least 0.900 is asked for"),
            (offer(owner="eve"), Limits(owner_limits={"eve": 0}), "its owner eve may have no worker active"),
            (offer(available_hours=0.0), Limits(), "its owner's time or traffic is used up"),
            (offer(reliability=0.0), Limits(), "its reliability is 0: it would be started for ever"),
        ],
    )
    def test_reasons(self, bad: Offer, limits: Limits, words: str) -> None:
        decision = activate((bad,), need(1), TEN_HOURS, limits=limits, now=10.0)
        assert (decision.picked, decision.refused) == ((), {"a": words})


class TestBinding:
    """What would save most."""

    def test_trust_is_dear(self) -> None:
        market = (offer("stranger", 0.1, 4.0), offer("friend", 1.0, 4.0, trust="named"))
        assert activate(market, need(4), TEN_HOURS, limits=Limits(trust="named")).binding == "trust"

    def test_a_cheap_owner_is_limited(self) -> None:
        market = (
            offer("ann", 0.1, 1.0, count=9, owner="ann"),
            offer("anne", 0.1, 1.0, count=9, owner="ann"),
            offer("bob", 1.0, 1.0, count=9, owner="bob"),
        )
        assert activate(market, need(4), TEN_HOURS, limits=Limits(per_owner=2)).binding == "owner"


class TestSpares:
    """Losses in the time it takes to replace one."""

    def test_the_cheapest_that_are_left(self) -> None:
        """Ten workers lose 1.05 in six minutes in expectation; with 99 % not more than 4."""
        market = (offer("a", 0.2, 1.0, count=10, reliability=0.35), offer("b", 0.3, 1.0, count=2), offer("c", 0.4, 1.0, count=9))
        decision = activate(market, need(10), TEN_HOURS, habits=Habits(replace_hours=0.1))
        assert [(one.offer_id, one.count) for one in decision.spares] == [("b", 2), ("c", 2)]
        assert sum(one.count for one in decision.start) == 14
        assert decision.usd_per_hour == pytest.approx(2.0)

    def test_headroom_is_a_spare(self) -> None:
        """What may be lost anyway needs none."""
        market = (offer("a", 0.2, 1.0, count=10, reliability=0.35),)
        decision = activate(market, Need(constant(6.0), 10 / 6), TEN_HOURS, habits=Habits(replace_hours=0.1))
        assert (counts(decision), decision.spares) == ({"a": 10}, ())
        assert activate(MARKET, need(4), TEN_HOURS).spares == ()

    def test_owners_limits_hold(self) -> None:
        """Spares are active workers to their owner."""
        market = (offer("a", 0.2, 1.0, count=10, reliability=0.35, owner="ann"), offer("b", 0.9, 1.0, count=9, owner="bob"))
        decision = activate(market, need(6), TEN_HOURS, habits=Habits(replace_hours=0.1), limits=Limits(per_owner=6))
        assert [one.offer_id for one in decision.spares] == ["b"]

    def test_they_cost_money_too(self) -> None:
        """2.00 USD/h for the ten, and 0.75 left: two of the cheap ones, none of the others."""
        market = (offer("a", 0.2, 1.0, count=10, reliability=0.35), offer("b", 0.3, 1.0, count=2), offer("c", 0.4, 1.0, count=9))
        limits = Limits(uusd_per_hour=2_750_000)
        decision = activate(market, need(10), TEN_HOURS, habits=Habits(replace_hours=0.1), limits=limits)
        assert [(one.offer_id, one.count) for one in decision.spares] == [("b", 2)]
        assert (decision.uusd_per_hour, decision.uusd_per_hour_with_spares) == (2_000_000, 2_600_000)

    def test_a_fleet_of_thousands(self) -> None:
        """A thousand losses in expectation: four deviations more are kept, if they are there."""
        market = (offer("a", 0.2, 1.0, count=10_000, reliability=0.36787944117144233),)
        decision = activate(market, need(5_000), TEN_HOURS, habits=Habits(replace_hours=0.2))
        assert decision.spares[0].count == 1_000 + int(4 * 1_000**0.5)
