"""Heartbeats and the orders that ride on their answers. A beat that changes nothing writes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.domain.model import Holding, Lease, LeaseState, QuoteRow, Worker, WorkerSession, WorkerState
from coordinator.domain.states import WORKER, move
from coordinator.domain.workers import standing
from coordinator.service.deps import Deps
from coordinator.service.market import pay_in_words
from coordinator.service.ports import Reader, Tx
from coordinator.service.prices import change_price
from coordinator.service.transfers import Transfer
from coordinator.service.worker_batching import Batcher
from coordinator.service.worker_bulletin import Bulletin, News, notice
from coordinator.service.worker_leases import end_leases
from coordinator.service.worker_places import may_serve
from coordinator.service.worker_presence import Heard
from coordinator.wire.messages import CancelOrder, Forthcoming, Heartbeat, HeartbeatReply, VersionNotice

UNKNOWN_AFTER_BEATS = 2.5  # a lease that the worker still does not name after this many beats was lost on the way
FLUSH_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows behind one beat."""

    live: tuple[Lease, ...]
    ended: dict[str, str]  # leases that the worker names as live but are not -> why
    holdings: tuple[Holding, ...]
    quotes: tuple[QuoteRow, ...] = ()  # open, of this session


class BeatDesk:
    """Answers heartbeats; the rows behind many of them are read at once."""

    def __init__(self, deps: Deps, bulletin: Bulletin) -> None:
        self._deps = deps
        self._bulletin = bulletin
        self._looks: Batcher[tuple[Worker, Heartbeat], Seen] = Batcher(self._look, most=256)

    async def heartbeat(self, worker: Worker, beat: Heartbeat) -> HeartbeatReply:
        """Note the sign of life, move the worker's state where its rows say so, and answer with orders."""
        deps = self._deps
        now = deps.clock.now()
        held = frozenset((held.job_id, held.version, held.digest) for held in beat.held)
        known = deps.presence.get(worker.id)
        heard = Heard(
            worker.id,
            worker.session_epoch,
            now,
            tokens_per_s=_rate(beat, known),
            activity=beat.activity,
            control=beat.control,
            uplink=beat.uplink_bytes_per_s,
            held=held,
        )
        deps.presence.hear(heard)
        price_refused = ""
        if beat.price_uusd_per_hour is not None and beat.price_uusd_per_hour != worker.price_uusd_per_hour:
            worker, price_refused = await change_price(deps, worker, beat.price_uusd_per_hour)
        news = await self._bulletin.news()
        seen = await self._looks.ask((worker, beat))
        holds = _holds_usable(news, worker, seen.holdings, held)
        event = _event(worker, beat, holds=holds)
        lost = _lost(seen.live, beat, now=now, grace_s=UNKNOWN_AFTER_BEATS * deps.settings.heartbeat_s)
        if event or lost:
            worker = await _save(deps, worker, event, lost)
        reply = _reply(deps, news, worker, seen, holds=holds)
        return reply.model_copy(update={"price_refused": price_refused}) if price_refused else reply

    async def _look(self, beats: Sequence[tuple[Worker, Heartbeat]]) -> list[Seen]:
        return await self._deps.store.read(lambda reader: _look(reader, beats))


def _rate(beat: Heartbeat, known: Heard | None) -> float | None:
    return beat.tokens_per_s or (known.tokens_per_s if known is not None else None)


async def _look(reader: Reader, beats: Sequence[tuple[Worker, Heartbeat]]) -> list[Seen]:
    """Leases and holdings of all these workers in three reads."""
    ids = sorted({worker.id for worker, _ in beats})
    live: dict[str, list[Lease]] = defaultdict(list)
    for lease in await reader.select(Lease, worker_id=ids, state=LeaseState.LIVE):
        live[lease.worker_id].append(lease)
    holdings: dict[str, list[Holding]] = defaultdict(list)
    versions = sorted({held.version for _, beat in beats for held in beat.held})
    for holding in await reader.select(Holding, worker_id=ids, version=versions) if versions else []:
        holdings[holding.worker_id].append(holding)
    quotes: dict[str, list[QuoteRow]] = defaultdict(list)
    for quote in await reader.select(QuoteRow, worker_id=ids, ended_at=None):
        quotes[quote.worker_id].append(quote)
    missing = {w.id: set(beat.live_leases) - {lease.id for lease in live[w.id]} for w, beat in beats}
    named = sorted(set[str]().union(*missing.values()))
    ended = {lease.id: lease for lease in await reader.select(Lease, id=named)} if named else {}
    return [
        Seen(
            tuple(live[w.id]),
            {one: _why(ended.get(one), w.id) for one in sorted(missing[w.id])},
            tuple(holdings[w.id]),
            tuple(quote for quote in quotes[w.id] if quote.session_epoch == w.session_epoch),
        )
        for w, _ in beats
    ]


def _why(lease: Lease | None, worker_id: str) -> str:
    if lease is None or lease.worker_id != worker_id:
        return "this coordinator has no such lease of yours"
    return lease.reason or lease.state.value


def _holds_usable(news: News, worker: Worker, holdings: Sequence[Holding], held: frozenset[tuple[str, int, str]]) -> bool:
    """Whether a version that it confirmed, and still holds, can serve some job's next step."""
    for holding in holdings:
        posting = news.postings.get(holding.job_id)
        if posting is None or (holding.job_id, holding.version, holding.digest) not in held:
            continue
        invited_to = news.invited_to.get(worker.invite_id, ())
        if posting.is_usable(holding.version) and may_serve(posting.job, worker, invited_to)[0]:
            return True
    return False


def _event(worker: Worker, beat: Heartbeat, *, holds: bool) -> str | None:
    """What the beat changes about the worker's state."""
    if beat.draining and worker.state in (WorkerState.STANDBY, WorkerState.ACTIVE):
        return "drain_ordered"
    if worker.state is WorkerState.STANDBY and holds:
        return "version_confirmed"
    if worker.state is WorkerState.ACTIVE and not holds:
        return "version_outdated"
    return None


def _lost(live: Sequence[Lease], beat: Heartbeat, *, now: float, grace_s: float) -> list[Lease]:
    """Leases whose grant never reached the worker, or that it forgot."""
    named = set(beat.live_leases)
    return [lease for lease in live if lease.id not in named and now - lease.issued_at > grace_s]


async def _save(deps: Deps, worker: Worker, event: str | None, lost: Sequence[Lease]) -> Worker:
    async def save(tx: Tx) -> tuple[Worker, frozenset[str]]:
        now = deps.clock.now()
        row = await tx.get(Worker, worker.id)
        if row is None or row.session_epoch != worker.session_epoch:
            return worker, frozenset()
        if event and row.state is worker.state:
            reason = "its owner stops it" if event == "drain_ordered" else ""
            row = replace(row, state=move(WORKER, row.state, event), reason=reason, state_since=now)
            await tx.put(row)
        still = await tx.select(Lease, id=[lease.id for lease in lost], state=LeaseState.LIVE) if lost else []
        reason = "the worker does not know of it"
        return row, await end_leases(tx, [(lease, LeaseState.ABANDONED, reason) for lease in still], now=now)

    row, jobs = await deps.store.write(save)
    for topic in ("workers", *jobs):
        deps.wake.notify(topic)
    return row


def _reply(deps: Deps, news: News, worker: Worker, seen: Seen, *, holds: bool) -> HeartbeatReply:
    works, words = standing(worker, holds_newest_usable=holds)
    state = worker.state.value
    notices, refusals = _notices(news, worker)
    if works and not seen.quotes and notices:
        state, words = WorkerState.STANDBY.value, deps.market.why_not(notices[0].job_id, worker.id)
    elif works:
        pay = f", {pay_in_words(seen.quotes[0])}" if seen.quotes else ""
        words = f"active{pay}" if seen.live else f"active: waits for work{pay}"
    if len(notices) > 1 and seen.quotes:
        notices = tuple(one for one in notices if any(one.job_id == quote.job_id for quote in seen.quotes)) or notices
    if not works and not notices and worker.state is WorkerState.STANDBY:
        words = "; ".join(refusals) or "standby: no job is running that has published weights"
    return HeartbeatReply(
        server_time=deps.clock.now(),
        state=state,
        reason=words,
        versions=notices,
        forthcoming=tuple(_forthcoming(one) for known in notices for one in deps.transfers.deltas(known.job_id)),
        cancel=tuple(CancelOrder(lease_id=lease_id, reason=why) for lease_id, why in seen.ended.items()),
        drain=worker.reason or "the operator drains this worker" if worker.state is WorkerState.DRAINING else None,
        price_uusd_per_hour=worker.price_uusd_per_hour,
        heartbeat_s=deps.settings.heartbeat_s,
        control=deps.control.place,
    )


def _forthcoming(transfer: Transfer) -> Forthcoming:
    first = transfer.first
    return Forthcoming(job_id=first.job_id, version=first.version, base_digest=first.base_digest or "", transfer=transfer.id)


def _notices(news: News, worker: Worker) -> tuple[tuple[VersionNotice, ...], list[str]]:
    """The newest version of each job that the worker may serve, and why it may not serve the others."""
    notices, refusals = [], []
    for posting in news.postings.values():
        allowed, words = may_serve(posting.job, worker, news.invited_to.get(worker.invite_id, ()))
        if not allowed:
            refusals.append(words)
            continue
        notices.append(notice(posting))
    if worker.state in (WorkerState.QUARANTINED, WorkerState.DRAINING):
        return (), refusals
    return tuple(notices), refusals


async def flush(deps: Deps) -> None:
    """Write what was heard since the last flush, many rows at once."""
    while heard := deps.presence.take_unsaved(FLUSH_AT_ONCE):
        by_id = {one.worker_id: one for one in heard}
        await deps.store.write(lambda tx, by_id=by_id: _flush(tx, by_id))  # type: ignore[misc]


async def _flush(tx: Tx, heard: dict[str, Heard]) -> None:
    workers = [w for w in await tx.select(Worker, id=list(heard)) if w.session_epoch == heard[w.id].epoch]
    if workers:
        await tx.put(*(_heard_row(worker, heard[worker.id]) for worker in workers))
    epochs = {worker.id: worker.session_epoch for worker in workers}
    sessions = await tx.select(WorkerSession, worker_id=list(epochs), ended_at=None)
    current = [s for s in sessions if s.epoch == epochs[s.worker_id]]
    if current:
        await tx.put(*(replace(s, last_seen_at=max(s.last_seen_at, heard[s.worker_id].at)) for s in current))


def _heard_row(worker: Worker, heard: Heard) -> Worker:
    return replace(
        worker,
        last_seen_at=max(worker.last_seen_at, heard.at),
        tokens_per_s=worker.tokens_per_s if heard.tokens_per_s is None else heard.tokens_per_s,
        activity=worker.activity if heard.activity is None else heard.activity,
    )
