"""From a verdict to quotes: which open ones end, which are opened, each with a reason; pay never falls between two of a worker's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.domain.market import Bidder, Verdict
from coordinator.domain.market_rates import quoted_rate
from coordinator.domain.model import QuoteRow
from pricing.money import uusd_to_usd
from pricing.offers import Offer
from pricing.quotes import quoted

ACTIVE = "active"
TIMED_S = 60.0  # how long a quote by the hour holds
RATED_S = 600.0  # and one by the token
RENEWED_S = 10.0  # before its end a quote is renewed
MOVED = 0.2  # a measured rate that is off by so much is quoted anew, at most every
STEADY_S = 30.0
SOON_S = 5.0  # or, when it rose: until then each token is paid too much


@dataclass(frozen=True, slots=True)
class Orders:
    """Rows to write: quotes that end, as they end, and new ones."""

    ended: tuple[QuoteRow, ...] = ()
    opened: tuple[QuoteRow, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not self.ended and not self.opened


def orders(
    job_id: str,
    bidders: Sequence[Bidder],
    verdict: Verdict,
    open_quotes: Sequence[QuoteRow],
    gone: Mapping[str, tuple[float, str]],
    now: float,
) -> Orders:
    """What makes the verdict true. `gone`: quotes whose worker, or session, is not there any more: since when, and why."""
    by_id = {one.worker_id: one for one in bidders}
    ended: list[QuoteRow] = []
    opened: list[QuoteRow] = []
    kept: set[str] = set()
    for quote in sorted(open_quotes, key=lambda quote: (quote.made_at, quote.id)):
        bidder = by_id.get(quote.worker_id)
        if quote.id in gone or bidder is None or quote.worker_id in kept:
            at, why = gone.get(quote.id, (now, "it may not serve the job any more"))
            ended.append(_ended(quote, min(at, now), why))
        elif quote.worker_id not in verdict.active:
            ended.append(_ended(quote, now, verdict.standby.get(quote.worker_id, verdict.reason)))
        elif why := _stale(quote, bidder, now, is_timed=quote.worker_id in verdict.timed):
            ended.append(_ended(quote, now, f"quoted anew: {why}"))
        else:
            kept.add(quote.worker_id)
    for worker_id, reason in verdict.active.items():
        if worker_id not in kept:
            is_timed = worker_id in verdict.timed
            opened.append(made(job_id, by_id[worker_id], reason, now, is_timed=is_timed))
    return Orders(tuple(ended), tuple(opened))


def made(job_id: str, bidder: Bidder, reason: str, now: float, *, is_timed: bool) -> QuoteRow:
    """The quote of a worker that becomes active, or stays so."""
    row = timed(job_id, bidder.worker_id, bidder.session_epoch, bidder.uusd_per_hour, reason, now)
    if is_timed or not bidder.tokens_per_s > 0:
        return row
    offer = Offer(bidder.worker_id, bidder.uusd_per_hour, 1.0, 1.0, 1.0)
    quote = quoted(offer, tokens_per_s=bidder.tokens_per_s, now=now, valid_s=RATED_S)
    return replace(row, uusd_per_million_tokens=quote.uusd_per_million_tokens, expires_at=quote.expires_at)


def timed(job_id: str, worker_id: str, epoch: int, uusd_per_hour: int, reason: str, now: float) -> QuoteRow:
    """A quote for active time, which needs no measured rate; its id says whose and when."""
    return QuoteRow(
        id=f"{job_id}/{worker_id}/{epoch}/{now:.6f}",
        job_id=job_id,
        worker_id=worker_id,
        session_epoch=epoch,
        role=ACTIVE,
        uusd_per_million_tokens=None,
        uusd_per_idle_hour=uusd_per_hour,
        made_at=now,
        expires_at=now + TIMED_S,
        reason=reason,
    )


def _stale(quote: QuoteRow, bidder: Bidder, now: float, *, is_timed: bool) -> str:
    """Why an active worker's quote is to be made anew; empty while it holds."""
    if bidder.uusd_per_hour != quote.uusd_per_idle_hour:
        before, after = uusd_to_usd(quote.uusd_per_idle_hour), uusd_to_usd(bidder.uusd_per_hour)
        return f"its price moved from {before:.4f} to {after:.4f} USD/h"
    if now >= quote.expires_at - RENEWED_S:
        return "the last quote expires"
    if quote.uusd_per_million_tokens is None:
        return "" if is_timed or not bidder.tokens_per_s > 0 else "its rate is measured"
    rate = quoted_rate(quote)
    if rate is None or is_timed or abs(bidder.tokens_per_s - rate) <= MOVED * rate:
        return ""
    if now - quote.made_at < (SOON_S if bidder.tokens_per_s > rate else STEADY_S):
        return ""
    return f"its rate moved from {rate:.1f} to {bidder.tokens_per_s:.1f} tokens/s"


def _ended(quote: QuoteRow, at: float, why: str) -> QuoteRow:
    return replace(quote, ended_at=max(at, quote.made_at), ended_because=why)
