"""What workers ask: the price in force, and its history. A price is bounded by the invite, and a change by its frequency."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.model import Invite, PriceRow, Worker
from coordinator.service.deps import Deps
from coordinator.service.ports import Tx
from pricing.money import uusd_to_usd

REST_S = 10.0  # between two changes: each is a row, and a quote


async def change_price(deps: Deps, worker: Worker, asked: int) -> tuple[Worker, str]:
    """The worker with the price it asks from now on; or as it was, and why. The market is looked at again."""

    async def save(tx: Tx) -> tuple[Worker, str]:
        now = deps.clock.now()
        row = await tx.get(Worker, worker.id)
        if row is None or row.session_epoch != worker.session_epoch or row.price_uusd_per_hour == asked:
            return row or worker, ""
        refused = await _refusal(tx, row, asked, now=now)
        if refused:
            return row, refused
        row = replace(row, price_uusd_per_hour=asked)
        await tx.put(row)
        await note_price(tx, row, now=now)
        return row, ""

    row, refused = await deps.store.write(save)
    if not refused:
        deps.wake.notify("workers")
    return row, refused


async def _refusal(tx: Tx, worker: Worker, asked: int, *, now: float) -> str:
    """Why the price is not taken, in words that name the fix; empty when it is."""
    invite = await tx.get(Invite, worker.invite_id)
    ceiling = None if invite is None else invite.price_ceiling_uusd_per_hour
    stays = f"{uusd_to_usd(worker.price_uusd_per_hour):.4f} USD an hour stays"
    if ceiling is not None and asked > ceiling:
        most = f"the invite allows at most {uusd_to_usd(ceiling):.4f}"
        return f"price {uusd_to_usd(asked):.4f} USD an hour is refused: {most}; {stays}: ask for less, or ask the operator"
    last = await tx.select(PriceRow, worker_id=worker.id, order_by="-at", limit=1)
    if last and now - last[0].at < REST_S:
        return f"price {uusd_to_usd(asked):.4f} USD an hour waits: one change in {REST_S:.0f} s; {stays} until then"
    return ""


async def note_price(tx: Tx, worker: Worker, *, now: float) -> None:
    """Put the price on record if it differs from the last one."""
    last = await tx.select(PriceRow, worker_id=worker.id, order_by="-at", limit=1)
    if not last or last[0].uusd_per_hour != worker.price_uusd_per_hour:
        await tx.put(PriceRow(worker.id, now, worker.price_uusd_per_hour))
