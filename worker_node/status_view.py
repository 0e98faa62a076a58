"""The status of a worker in words."""

from __future__ import annotations

from collections.abc import Iterator

from worker_node.adapters.status_file import Status

SHOWN_NOTES = 8
_STALE_S = 30.0


def lines(status: Status, *, running: bool, now: float) -> Iterator[str]:
    """What `echo2-worker status` prints: the verdict first, then figures, money and refusals."""
    yield _verdict(status, running=running, now=now)
    yield f"worker      {status.name} ({status.worker_id}) at {status.url}, price {_usd(status.price_uusd_per_hour)}/h"
    yield f"engine      {status.engine or 'not started'}, {status.tokens_per_s:.1f} tokens/s measured"
    yield f"weights     {status.loaded or 'none loaded'}; newest {status.newest or 'not known'}{_progress(status)}"
    yield f"work        {status.live_leases} leases, {status.generating} completions under way, {status.unsent} not yet sent"
    if status.coordinator_state:
        yield f"coordinator says {status.coordinator_state}: {status.coordinator_reason}"
    yield from _earnings(status)
    for note in status.notes[-SHOWN_NOTES:]:
        blame = f" (fault: {note['blame']})" if note.get("blame") else ""
        yield f"  {_ago(now - note['at'])} ago  {note['code']}: {note['reason']}{blame}"


def _verdict(status: Status, *, running: bool, now: float) -> str:
    if not running:
        return f"not working, because {status.ended or f'process {status.pid} is dead (it ended without saying why)'}"
    if now - status.updated_at > _STALE_S:
        return f"not working, because process {status.pid} has not reported for {_ago(now - status.updated_at)}"
    if status.working:
        return f"working: {status.because}"
    return f"not working, because {status.because}"


def _progress(status: Status) -> str:
    return f" ({status.fetch_percent:.0f} % fetched)" if status.fetch_percent is not None else ""


def _earnings(status: Status) -> Iterator[str]:
    account = status.account
    if account is None:
        yield f"earnings    not asked yet; {status.accepted_here} completions accepted since the start"
        return
    yield (
        f"earnings    {_usd(account['earned_uusd'])} for {account['active_s'] / 3600:.2f} h: {account['accepted_rollouts']} completions "
        f"({account['accepted_tokens']} tokens) accepted, {account['refused_rollouts']} refused"
    )
    for refusal in account["refusals"][:SHOWN_NOTES]:
        paid = "paid" if refusal["paid"] else "not paid"
        yield f"  refused     {refusal['code']}: {refusal['reason']} (fault: {refusal['blame']}, {paid})"


def _usd(uusd: int) -> str:
    return f"{uusd / 1e6:.4f} USD"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
