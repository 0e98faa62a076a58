"""The status of a worker in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worker_node.adapters.status_file import Status
from worker_node.domain.report import lasting

SHOWN_NOTES = 8
SHOWN_QUOTES = 4
_STALE_S = 30.0


def lines(status: Status, *, running: bool, now: float) -> Iterator[str]:
    """What `echo2-worker status` prints: the verdict first, then figures, money and refusals."""
    yield _verdict(status, running=running, now=now)
    yield f"worker      {status.name} ({status.worker_id}) at {status.url}, price {_usd(status.price_uusd_per_hour)}/h"
    if status.price_refused:
        yield f"price       {status.price_refused}"
    rate = f"{status.tokens_per_s:.1f} tokens/s measured" if status.tokens_per_s > 0 else "speed not measured yet"
    yield f"engine      {status.engine or 'not started'}, {rate}"
    yield f"weights     {status.loaded or 'none loaded'}; newest {status.newest or 'none offered now'}{_progress(status)}"
    yield f"work        {status.live_leases} leases, {status.generating} completions under way, {status.unsent} not yet sent"
    if status.coordinator_state:
        yield f"coordinator {_says(status)}"
    if status.control:
        yield f"control     {status.control}{'; ' if status.neighbours else ''}{status.neighbours}"
    yield from _earnings(status)
    for note in _told_once(status.notes)[-SHOWN_NOTES:]:
        blame = f" (fault: {note['blame']})" if note.get("blame") else ""
        yield f"  {lasting(now - note['at'])} ago  {note['code']}: {note['reason']}{blame}"


def _verdict(status: Status, *, running: bool, now: float) -> str:
    if not running:
        return f"not working, because {status.ended or f'process {status.pid} is dead (it ended without saying why)'}"
    if now - status.updated_at > _STALE_S:
        return f"not working, because process {status.pid} has not reported for {lasting(now - status.updated_at)}"
    if status.working:
        return f"working: {status.because}"
    return f"not working, because {status.because}"


def _says(status: Status) -> str:
    """The coordinator's word for this worker; its reason often begins with the same word."""
    state, reason = status.coordinator_state, status.coordinator_reason
    return f"says {reason}" if reason.startswith(state) else f"says {state}: {reason}" if reason else f"says {state}"


def _progress(status: Status) -> str:
    return f" ({status.fetch_percent:.0f} % fetched)" if status.fetch_percent is not None else ""


def _earnings(status: Status) -> Iterator[str]:
    account = status.account
    if account is None:
        yield f"earnings    not asked yet; {status.accepted_here} completions accepted since the start"
        return
    yield (
        f"earnings    {_usd(account['earned_uusd'])}{_paid_out(account)} for {account['active_s'] / 3600:.2f} h: {account['accepted_rollouts']} completions "
        f"({account['accepted_tokens']} tokens) accepted, {account['refused_rollouts']} refused"
    )
    for line in account.get("quotes", ())[:SHOWN_QUOTES]:
        yield f"  quote       {_quote(line)}"
    alike = Counter((r["code"], r["reason"], r["blame"], r["paid"]) for r in account["refusals"])
    for (code, reason, blame, paid), count in list(alike.items())[:SHOWN_NOTES]:
        times = f"{count} times " if count > 1 else ""
        yield f"  refused     {times}{code}: {reason} (fault: {blame}, {'paid' if paid else 'not paid'})"


def _paid_out(account: Mapping[str, Any]) -> str:
    paid = account.get("paid_out_uusd", 0)
    if not paid:
        return ""
    last = account["payouts"][0]
    return f" ({_usd(paid)} paid out, last {_usd(last['uusd'])}{': ' + last['note'] if last['note'] else ''})"


def _quote(line: Mapping[str, Any]) -> str:
    """One quote's pay: what it is reckoned of, and what the ledger holds of it."""
    rate = line["uusd_per_million_tokens"]
    terms = "active time" if rate is None else f"{_usd(rate)} a million tokens, waiting"
    ended = f"; ended: {line['ended_because']}" if line["ended_at"] is not None else ""
    return (
        f"job {line['job_id']}: {line['tokens']} tokens and {line['paid_ms'] / 3.6e6:.2f} h at {terms} {_usd(line['uusd_per_idle_hour'])}/h = "
        f"{_usd(line['owed_uusd'])}, {_usd(line['posted_uusd'])} in the ledger{ended}"
    )


def _usd(uusd: int) -> str:
    return f"{uusd / 1e6:.4f} USD"


def _told_once(notes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of notes with the same words only the newest."""
    newest = {(note["code"], note["reason"]): note for note in notes}
    return sorted(newest.values(), key=lambda note: float(note["at"]))
