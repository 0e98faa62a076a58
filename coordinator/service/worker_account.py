"""What a worker did and earned, from the rows: quote by quote, each line with a receipt that the coordinator signed."""

from __future__ import annotations

from coordinator.domain import paying
from coordinator.domain.model import LedgerEntry, Meter, Posting, QuoteRow, Refusal, Rollout, WorkerSession
from coordinator.service.accounting import ACCEPTED, accepted_tokens
from coordinator.service.deps import Deps
from coordinator.service.ledger import earned_uusd, paid_out_uusd
from coordinator.service.ports import Reader
from coordinator.wire.messages import Account, AccountPayout, AccountQuote, AccountRefusal
from coordinator.wire.signing import account_message
from pricing import ledger

SHOWN_REFUSALS = 20
SHOWN_QUOTES = 20
SHOWN_PAYOUTS = 5


async def account(deps: Deps, worker_id: str) -> Account:
    """Open sessions count up to the last sign of life; figures of a quote are those of the last look at it."""

    async def read(reader: Reader) -> Account:
        sessions = await reader.select(WorkerSession, worker_id=worker_id)
        refusals = await reader.select(Refusal, worker_id=worker_id, order_by="-at", limit=SHOWN_REFUSALS)
        return Account(
            accepted_rollouts=await reader.count(Rollout, worker_id=worker_id, state=ACCEPTED),
            accepted_tokens=await accepted_tokens(reader, worker_id=worker_id),
            refused_rollouts=await reader.count(Refusal, worker_id=worker_id),
            active_s=round(sum(_seconds(deps, session) for session in sessions), 3),
            earned_uusd=await earned_uusd(reader, worker_id),
            paid_out_uusd=await paid_out_uusd(reader, worker_id),
            payouts=tuple(await _payouts(reader, worker_id)),
            quotes=tuple(await _quotes(reader, deps, worker_id)),
            refusals=tuple(_refused(refusal) for refusal in refusals),
        )

    return await deps.store.read(read)


async def _payouts(reader: Reader, worker_id: str) -> list[AccountPayout]:
    """The newest ones."""
    made = {"worker_id": worker_id, "kind": ledger.Kind.PAYOUT}
    entries = await reader.select(LedgerEntry, order_by="-seq", limit=SHOWN_PAYOUTS, **made)
    moves = await reader.select(Posting, entry_id=[entry.id for entry in entries]) if entries else []
    uusd = {move.entry_id: move.uusd for move in moves if move.account == ledger.name(ledger.Account.PAID, worker_id)}
    return [AccountPayout(entry_id=entry.id, at=entry.at, uusd=uusd[entry.id], note=entry.reason) for entry in entries]


async def _quotes(reader: Reader, deps: Deps, worker_id: str) -> list[AccountQuote]:
    """The newest quotes that were looked at."""
    meters = await reader.select(Meter, worker_id=worker_id, order_by="-looked_at", limit=SHOWN_QUOTES)
    quotes = {row.id: row for row in await reader.select(QuoteRow, id=[meter.quote_id for meter in meters])} if meters else {}
    return [_line(deps, worker_id, quotes[meter.quote_id], meter) for meter in meters]


def _line(deps: Deps, worker_id: str, quote: QuoteRow, meter: Meter) -> AccountQuote:
    line = AccountQuote(
        quote_id=quote.id,
        job_id=quote.job_id,
        made_at=quote.made_at,
        ended_at=quote.ended_at,
        ended_because=quote.ended_because,
        uusd_per_million_tokens=quote.uusd_per_million_tokens,
        uusd_per_idle_hour=quote.uusd_per_idle_hour,
        as_of=meter.looked_at,
        tokens=meter.tokens,
        paid_ms=meter.paid_ms,
        owed_uusd=paying.owed_uusd(quote, tokens=meter.tokens, paid_ms=meter.paid_ms),
        posted_uusd=meter.posted_uusd,
    )
    return line.model_copy(update={"receipt": deps.key.sign(account_message(worker_id, line)).hex()})


def _seconds(deps: Deps, session: WorkerSession) -> float:
    heard = deps.presence.get(session.worker_id)
    end = session.last_seen_at if session.ended_at is None else session.ended_at
    if session.ended_at is None and heard is not None and heard.epoch == session.epoch:
        end = max(end, heard.at)
    return max(end - session.started_at, 0.0)


def _refused(refusal: Refusal) -> AccountRefusal:
    return AccountRefusal(
        at=refusal.at, job_id=refusal.job_id, code=refusal.code, reason=refusal.reason, blame=refusal.blame, paid=refusal.paid
    )
