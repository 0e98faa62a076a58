"""The peers that a worker should exchange pieces with, each with a ticket: the answer to `PeersRequest` of the control plane.

One reading of the rows serves all questions of a short while, so that a thousand workers that ask cost no more rows than one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from coordinator.domain.model import Holding, Invite, Job, Worker, WorkerState
from coordinator.domain.neighbours import MOST_UPLINK, Member, Swarm
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader
from coordinator.service.seeding import Seeder
from coordinator.service.worker_places import may_serve
from coordinator.service.worker_presence import FETCH_PATIENCE_S
from coordinator.wire.messages import PeerAddress
from coordinator.wire.signing import public_hex
from p2p.domain.control_messages import Neighbour, PeersReply, Place
from p2p.domain.tickets import SEEDER, Ticket, sign_ticket
from p2p.errors import ControlRefused

TICKET_S = 3600
FRESH_S = 1.0
ASKED_S = 60.0  # who asked for a job's peers works for it for so long
MOST_ASKED = 1 << 16
LIVE = (WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.DRAINING)


@dataclass(frozen=True, slots=True)
class _Job:
    """One reading: who may serve the job, and the swarm of those who do."""

    at: float
    allowed: Mapping[str, Worker]  # live workers that may serve it, by id
    keys: frozenset[str]  # theirs
    swarm: Swarm


class Neighbourhoods:
    """The swarms of the jobs that are asked about, at most FRESH_S old; concurrent questions share one reading.

    Members are the workers that work for a job: that hold a version of it, fetch one, or asked for its peers lately.
    """

    def __init__(self, deps: Deps, seeder: Seeder) -> None:
        self._deps = deps
        self._seeder = seeder
        self._lock = asyncio.Lock()
        self._known: dict[str, _Job] = {}
        self._asked: dict[tuple[str, str], float] = {}  # (job, worker) -> when, oldest first

    async def peers_of(self, worker: Worker, job_id: str) -> PeersReply:
        """Whom the worker should dial for this job. Raises ControlRefused when it may not serve it."""
        if worker.state is WorkerState.QUARANTINED or worker.id not in (await self._reading(job_id)).allowed:
            await self._deps.store.read(lambda reader: check_serves(reader, worker, job_id))
        self._note(worker.id, job_id)
        known = await self._reading(job_id)
        deps, seeder = self._deps, self._seeder
        named = [known.allowed[member.worker_id] for member in known.swarm.neighbours(worker.id)]
        found = [_neighbour(deps, worker, peer, job_id) for peer in named]
        if seeder.address is not None and known.swarm.takes_from_seeder(worker.id):
            found.insert(0, _seeder(deps, seeder, worker, job_id, seeder.address))
        return PeersReply(tuple(found))

    async def check_key(self, public_key: str, job_id: str) -> None:
        """Return if the worker with this key (hex) may serve the job; raise ControlRefused if not."""
        if public_key not in (await self._reading(job_id)).keys:
            worker = await worker_with(self._deps, public_key)
            await self._deps.store.read(lambda reader: check_serves(reader, worker, job_id))

    def _note(self, worker_id: str, job_id: str) -> None:
        self._asked.pop((job_id, worker_id), None)
        self._asked[job_id, worker_id] = self._deps.clock.now()
        if len(self._asked) > MOST_ASKED:
            del self._asked[next(iter(self._asked))]

    async def _reading(self, job_id: str) -> _Job:
        async with self._lock:
            now = self._deps.clock.now()
            known = self._known.get(job_id)
            if known is None or not 0 <= now - known.at < FRESH_S:
                self._known = {job: one for job, one in self._known.items() if 0 <= now - one.at < FRESH_S}
                self._asked = {pair: at for pair, at in self._asked.items() if now - at < ASKED_S}
                known = await self._deps.store.read(lambda reader: self._read(reader, job_id, now))
                self._known[job_id] = known
            return known

    async def _read(self, reader: Reader, job_id: str, now: float) -> _Job:
        job = await _job(reader, job_id)
        live = await reader.select(Worker, state=list(LIVE))
        invites = {one.id: one.jobs for one in await reader.select(Invite, id=sorted({one.invite_id for one in live}))}
        allowed = {one.id: one for one in live if may_serve(job, one, invites.get(one.invite_id, ()))[0]}
        working = {row.worker_id for row in await reader.select(Holding, job_id=job_id)}
        working |= self._deps.presence.fetchers(job_id, since=now - FETCH_PATIENCE_S)
        working |= {worker for job, worker in self._asked if job == job_id}
        members = [Member(one.id, _uplink(self._deps, one), one.peer is not None) for one in allowed.values() if one.id in working]
        keys = frozenset(one.public_key for one in allowed.values())
        return _Job(now, allowed, keys, Swarm(members, salt=job_id))


async def worker_with(deps: Deps, public_key: str) -> Worker:
    """The worker with this key (hex): the transport proved it. Raises ControlRefused."""
    found = await deps.store.read(lambda reader: reader.select(Worker, public_key=public_key))
    live = [worker for worker in found if worker.state is not WorkerState.GONE]
    if not live:
        raise ControlRefused("this key belongs to no worker that is here: join first")
    return live[0]


async def check_serves(reader: Reader, worker: Worker, job_id: str) -> None:
    """Return if the worker may serve the job now; raise ControlRefused if not."""
    job, invite = await _job(reader, job_id), await reader.get(Invite, worker.invite_id)
    allowed, words = may_serve(job, worker, invite.jobs if invite is not None else ())
    if not allowed or worker.state is WorkerState.QUARANTINED:
        raise ControlRefused(words if not allowed else f"quarantined: {worker.reason}")


async def _job(reader: Reader, job_id: str) -> Job:
    job = await reader.get(Job, job_id)
    if job is None:
        raise ControlRefused(f"job {job_id[:80]} does not exist: ask for the jobs that your heartbeats name")
    return job


def _uplink(deps: Deps, worker: Worker) -> float:
    heard = deps.presence.get(worker.id)
    return heard.uplink if heard is not None else 0.0


def _neighbour(deps: Deps, worker: Worker, peer: Worker, job_id: str) -> Neighbour:
    address = PeerAddress.model_validate(peer.peer)
    return Neighbour(
        worker_id=peer.id,
        key=peer.public_key,
        bulk=Place(address.host, address.port),
        certificate_sha256=address.certificate_sha256,
        control=None if address.control_port is None else Place(address.host, address.control_port),
        uplink=int(min(_uplink(deps, peer), MOST_UPLINK)),
        ticket=_ticket(deps, worker, peer.id, job_id),
    )


def _seeder(deps: Deps, seeder: Seeder, worker: Worker, job_id: str, address: PeerAddress) -> Neighbour:
    return Neighbour(
        worker_id=SEEDER,
        key=public_hex(deps.key),
        bulk=Place(address.host, address.port),
        certificate_sha256=address.certificate_sha256,
        control=None,
        uplink=int(min(seeder.uplink, MOST_UPLINK)),
        ticket=_ticket(deps, worker, SEEDER, job_id),
    )


def _ticket(deps: Deps, fetcher: Worker, server: str, job_id: str) -> str:
    ticket = Ticket(
        id=uuid4().hex,
        fetcher=fetcher.id,
        fetcher_key=fetcher.public_key,
        server=server,
        job_id=job_id,
        expires_at=int(deps.clock.now()) + TICKET_S,
    )
    return sign_ticket(deps.key, ticket)
