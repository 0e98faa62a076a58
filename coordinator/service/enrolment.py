"""Joining and leaving.

Joining is idempotent per (invite, key): a worker whose reply was lost asks again and gets a new session. Uses of an invite
are counted from worker rows, so a repeated join never uses one up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.domain.model import Holding, Invite, Worker, WorkerSession, WorkerState
from coordinator.domain.states import WORKER, move
from coordinator.service import invites
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader, Tx
from coordinator.service.prices import note_price
from coordinator.service.worker_leases import abandon
from coordinator.service.worker_presence import Heard
from coordinator.service.worker_refusals import ProtocolRefusal
from coordinator.service.worker_sessions import close_session
from coordinator.wire import signing
from coordinator.wire.messages import PROTOCOL_VERSION, JoinRequest, Welcome
from p2p.domain.addresses import may_dial
from pricing.money import uusd_to_usd


@dataclass(frozen=True, slots=True)
class Joined:
    """A stored join, and the jobs whose leases the older session lost."""

    worker: Worker
    jobs: frozenset[str]


async def join(deps: Deps, request: JoinRequest) -> Welcome:
    """Open a new session for the key. Raises ProtocolRefusal."""
    _check_protocol(request)
    _check_engine(deps, request)
    now = deps.clock.now()
    joined = await deps.store.write(lambda tx: _join(tx, deps, request, now=now))
    worker = joined.worker
    deps.reach("join.rows_written")
    deps.presence.forget(worker.id)
    if worker.state is not WorkerState.QUARANTINED:
        deps.presence.hear(Heard(worker.id, worker.session_epoch, now, tokens_per_s=worker.tokens_per_s))
    for topic in ("workers", *joined.jobs):
        deps.wake.notify(topic)
    return Welcome(
        worker_id=worker.id,
        session_epoch=worker.session_epoch,
        heartbeat_s=deps.settings.heartbeat_s,
        server_time=now,
        peer_networks=deps.settings.peer_networks,
        notice=_notice(deps, request, worker),
    )


def _notice(deps: Deps, request: JoinRequest, worker: Worker) -> str:
    if worker.state is WorkerState.QUARANTINED:
        return f"quarantined: {worker.reason}"
    if request.peer is None or worker.peer is not None:
        return ""
    why = may_dial(request.peer.host, request.peer.port, deps.settings.peer_networks)
    return f"other workers will not fetch from this one: {why}"


def _check_protocol(request: JoinRequest) -> None:
    if request.protocol_min <= PROTOCOL_VERSION <= request.protocol_max:
        return
    words = (
        f"this coordinator speaks protocol {PROTOCOL_VERSION}; the worker offers {request.protocol_min} to {request.protocol_max}"
    )
    fix = f"install a worker release that speaks protocol {PROTOCOL_VERSION}"
    raise ProtocolRefusal(426, "protocol_version", words, field="protocol_max", fix=fix)


def _check_engine(deps: Deps, request: JoinRequest) -> None:
    if request.engine.kind == "scripted" and not deps.settings.allow_scripted:
        words = "engine.kind is 'scripted', which proves nothing about weights; this coordinator does not take it"
        raise ProtocolRefusal(403, "engine_refused", words, field="engine.kind", fix="use the torch or vllm engine")


async def _join(tx: Tx, deps: Deps, request: JoinRequest, *, now: float) -> Joined:
    known = await tx.get(Worker, signing.worker_id(request.public_key))
    invite = await _admitting_invite(tx, request, known, now=now)
    _check_price(request, invite)
    await _check_name(tx, request, invite, known)
    if known is not None:
        await tx.delete(Holding, worker_id=known.id)
        jobs = await abandon(tx, known.id, "the worker joined again", now=now)
        await close_session(tx, known, now=now)
    else:
        jobs = frozenset()
    worker = _enrolled(deps, request, invite, known, now=now)
    # In quarantine it may listen, and is not paid for it: that session is over as it begins.
    ended_at = now if worker.state is WorkerState.QUARANTINED else None
    await note_price(tx, worker, now=now)
    await tx.put(worker, WorkerSession(worker.id, worker.session_epoch, now, now, worker.price_uusd_per_hour, ended_at))
    return Joined(worker, jobs)


def _enrolled(deps: Deps, request: JoinRequest, invite: Invite, known: Worker | None, *, now: float) -> Worker:
    """The worker's row in its new session. Strikes and quarantine outlive a join."""
    peer = request.peer
    if peer is not None and may_dial(peer.host, peer.port, deps.settings.peer_networks):
        peer = None
    state = WorkerState.STANDBY if known is None else move(WORKER, known.state, "rejoined")
    stays = known is not None and state is known.state
    return Worker(
        id=signing.worker_id(request.public_key),
        public_key=request.public_key,
        name=request.name,
        owner=invite.owner,
        invite_id=invite.id,
        state=state,
        reason=known.reason if known is not None and state is WorkerState.QUARANTINED else "",
        state_since=known.state_since if known is not None and stays else now,
        joined_at=known.joined_at if known is not None else now,
        last_seen_at=now,
        session_epoch=(known.session_epoch if known is not None else 0) + 1,
        engine=request.engine.model_dump(),
        price_uusd_per_hour=request.price_uusd_per_hour,
        max_slots=request.max_slots,
        tokens_per_s=request.tokens_per_s,
        peer=None if peer is None else peer.model_dump(),
        strikes=known.strikes if known is not None else 0,
    )


async def _admitting_invite(tx: Tx, request: JoinRequest, known: Worker | None, *, now: float) -> Invite:
    """The invite that lets this key in: the one it once joined with, or a fresh one with a use left."""
    own = await tx.get(Invite, known.invite_id) if known is not None else None
    if request.invite_code is None:
        if own is None:
            words = "invite_code is missing, and this key never joined here"
            raise ProtocolRefusal(
                403, "invite_needed", words, field="invite_code", fix="pass the invite that the operator gave you"
            )
        return own
    found = await invites.find(tx, request.invite_code)
    if found is None:
        words = "no invite of this coordinator has this code"
        raise ProtocolRefusal(
            403, "invite_unknown", words, field="invite_code", fix="check the code, or ask the operator for a new invite"
        )
    if own is not None and own.id == found.id:
        return own
    await _check_invite(tx, found, now=now)
    return found


async def _check_invite(reader: Reader, invite: Invite, *, now: float) -> None:
    fix = "ask the operator for a new invite"
    if invite.revoked_at is not None:
        raise ProtocolRefusal(403, "invite_revoked", "the invite was revoked", field="invite_code", fix=fix)
    if now >= invite.expires_at:
        words = f"the invite expired {now - invite.expires_at:.0f} s ago"
        raise ProtocolRefusal(403, "invite_expired", words, field="invite_code", fix=fix)
    used = await invites.uses(reader, invite.id)
    if used >= invite.max_uses:
        words = f"the invite was used {used} times of {invite.max_uses}"
        raise ProtocolRefusal(403, "invite_used", words, field="invite_code", fix=fix)


def _check_price(request: JoinRequest, invite: Invite) -> None:
    ceiling = invite.price_ceiling_uusd_per_hour
    if ceiling is None or request.price_uusd_per_hour <= ceiling:
        return
    asked = uusd_to_usd(request.price_uusd_per_hour)
    words = f"the price is {asked:.6f} USD an hour, the invite allows at most {uusd_to_usd(ceiling):.6f}"
    fix = f"join with at most --price {uusd_to_usd(ceiling):.6f}"
    raise ProtocolRefusal(403, "price_above_ceiling", words, field="price_uusd_per_hour", fix=fix)


async def _check_name(reader: Reader, request: JoinRequest, invite: Invite, known: Worker | None) -> None:
    """Jobs may ask for workers by name: a name that one owner uses is not another owner's to take."""
    if known is not None and known.name == request.name:
        return
    for worker in await reader.select(Worker, name=request.name):
        if worker.owner != invite.owner:
            words = f"name {request.name} belongs to a worker of another owner"
            raise ProtocolRefusal(409, "name_taken", words, field="name", fix="choose another name")


async def leave(deps: Deps, worker_id: str, reason: str) -> None:
    """The worker goes: its leases are open to others at once."""

    async def save(tx: Tx) -> frozenset[str]:
        now = deps.clock.now()
        worker = await tx.get(Worker, worker_id)
        if worker is None:
            return frozenset()
        jobs = await abandon(tx, worker_id, "the worker left", now=now)
        await tx.delete(Holding, worker_id=worker_id)
        await close_session(tx, worker, now=now)
        state = move(WORKER, worker.state, "left")
        if state is not worker.state:
            worker = replace(worker, state=state, reason=f"left: {reason}" if reason else "left", state_since=now)
        await tx.put(replace(worker, last_seen_at=now, activity=""))
        return jobs

    jobs = await deps.store.write(save)
    deps.presence.forget(worker_id)
    for topic in ("workers", *jobs):
        deps.wake.notify(topic)
