"""When a job pauses because what is left of its money pays nobody (pure)."""

from __future__ import annotations

from coordinator.domain.accounting import NEARLY
from coordinator.domain.market import JobMarket, Verdict, limits_of
from coordinator.domain.market_trials import TRIAL_S
from pricing.cost import HOUR_S
from pricing.money import usd_to_uusd, uusd_to_usd


def unpayable(market: JobMarket, verdict: Verdict, now: float) -> str | None:
    """Why nobody who is ready can be paid from what is left of `budget.usd`; None where that is not what is in the way.

    A stranger's price must not stop a job whose money could pay others: nearly all of it must be spent.
    """
    budget, left = market.job.config.budget.usd, limits_of(market, now).uusd
    ready = [one for one in market.bidders if one.is_ready]
    if budget is None or left is None or verdict.active or not ready or NEARLY * left >= usd_to_uusd(budget):
        return None
    cheapest = min(one.uusd_per_hour for one in ready)
    if cheapest * TRIAL_S <= left * HOUR_S:
        return None
    return (
        f"{uusd_to_usd(left):g} USD are left of the budget of {budget} USD, which pay {uusd_to_usd(cheapest):.4f} USD/h,"
        f" the least that is asked, for less than {TRIAL_S:.0f} s (budget.usd): raise it and resume"
    )
