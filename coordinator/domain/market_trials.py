"""Who may be tried: a worker whose rate is not known is paid by the hour, so briefly, and only as often as it is worth it (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.domain.model import QuoteRow
from pricing.cost import HOUR_S
from pricing.money import usd_to_uusd, uusd_to_usd
from pricing.pool import Limits

TRIAL_S = 120.0  # paid by the hour; and then the pause before the next trial, twice as long after each
DAY_S = 86_400.0  # after which a trial is forgotten
STEER = 10  # times what was spent too much in an hour is saved: a tenth too much, and nobody is paid until that hour has passed
TRIALS = 10  # that budget.usd must pay of one worker: a stranger's price may not use a job's money up before anybody sees it


def tried_until(quotes: Iterable[QuoteRow], now: float) -> float:
    """When a worker may be tried again, Unix seconds, which may have passed; 0 while its newest trial lasts.

    `quotes`: its own of the last day, over all sessions and jobs, so that coming back or serving another job begins no new trial.
    """
    used, last, pause = 0.0, 0.0, TRIAL_S
    for quote in sorted((one for one in quotes if is_timed(one)), key=lambda one: one.made_at):
        end = now if quote.ended_at is None else quote.ended_at
        if used >= TRIAL_S and quote.made_at >= last + pause:
            used, pause = 0.0, 2 * pause
        used += max(end - quote.made_at, 0.0)
        last = max(last, end)
    return last + pause if used >= TRIAL_S else 0.0


def is_timed(quote: QuoteRow) -> bool:
    """Whether money is paid for time alone."""
    return quote.uusd_per_million_tokens is None and quote.uusd_per_idle_hour > 0


def too_dear(uusd_per_hour: int, budget_usd: float | None) -> str:
    """Why nobody may be active for the job at this price; empty when it may."""
    if budget_usd is None or TRIALS * uusd_per_hour * TRIAL_S <= usd_to_uusd(budget_usd) * HOUR_S:
        return ""
    most = uusd_to_usd(int(usd_to_uusd(budget_usd) * HOUR_S / TRIAL_S) // TRIALS)
    return (
        f"its price of {uusd_to_usd(uusd_per_hour):.4f} USD/h would use up more than a tenth of the budget of {budget_usd:g} USD"
        f" in {TRIAL_S:.0f} s (budget.usd): at most {most:.4f} USD/h fit"
    )


def hourly(uusd_per_hour: int, *, spent_uusd: int, rented_uusd: int) -> int:
    """Micro-USD an hour that workers may ask for together, within `budget.usd_per_hour`.

    Args:
        uusd_per_hour: the budget.
        spent_uusd: by the job in the last hour, rented machines included. A worker that is faster than its quote says earns more than it
            asks, up to a fifth.
        rented_uusd: what the job's rented machines cost an hour.
    """
    return max(uusd_per_hour - rented_uusd - STEER * max(spent_uusd - uusd_per_hour, 0), 0)


def room(limits: Limits) -> int | None:
    """Micro-USD an hour that all who are active by the hour may ask for together; None: any.

    No more than what is left lasts for one trial.
    """
    trial = None if limits.uusd is None else int(limits.uusd * HOUR_S / TRIAL_S)
    known = [one for one in (trial, limits.uusd_per_hour) if one is not None]
    return min(known) if known else None
