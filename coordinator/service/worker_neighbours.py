"""The peers that a worker should exchange pieces with, each with a ticket: the answer to `PeersRequest` of the control plane."""

from __future__ import annotations

from uuid import uuid4

from coordinator.domain.model import Invite, Job, Worker, WorkerState
from coordinator.domain.neighbours import Member, neighbours, takes_from_seeder
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader
from coordinator.service.seeding import SEEDER, Seeder
from coordinator.service.worker_places import may_serve
from coordinator.wire.messages import PeerAddress
from coordinator.wire.signing import public_hex
from p2p.domain.control_messages import Neighbour, PeersReply, Place
from p2p.domain.tickets import Ticket, sign_ticket
from p2p.errors import ControlRefused

TICKET_S = 3600
MAX_UPLINK = 1 << 40


async def peers_of(deps: Deps, seeder: Seeder, worker: Worker, job_id: str) -> PeersReply:
    """Whom the worker should dial for this job. Raises ControlRefused when it may not serve it."""
    others = await deps.store.read(lambda reader: _others(reader, worker, job_id))
    members = [Member(one.id, _uplink(deps, one), one.peer is not None) for one in [*others, worker]]
    by_id = {one.id: one for one in others}
    found = [_neighbour(deps, worker, by_id[member.worker_id], job_id) for member in neighbours(worker.id, members)]
    if seeder.address is not None and takes_from_seeder(worker.id, members):
        found.insert(0, _seeder(deps, seeder, worker, job_id, seeder.address))
    return PeersReply(tuple(found))


async def _others(reader: Reader, worker: Worker, job_id: str) -> list[Worker]:
    """The other live workers that may serve the job."""
    job = await reader.get(Job, job_id)
    if job is None:
        raise ControlRefused(f"job {job_id[:80]} does not exist: ask for the jobs that your heartbeats name")
    live = await reader.select(Worker, state=[WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.DRAINING])
    invites = {one.id: one.jobs for one in await reader.select(Invite, id=sorted({one.invite_id for one in [*live, worker]}))}
    allowed, words = may_serve(job, worker, invites.get(worker.invite_id, ()))
    if not allowed or worker.state is WorkerState.QUARANTINED:
        raise ControlRefused(words if not allowed else f"quarantined: {worker.reason}")
    return [one for one in live if one.id != worker.id and may_serve(job, one, invites.get(one.invite_id, ()))[0]]


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
        uplink=int(min(_uplink(deps, peer), MAX_UPLINK)),
        ticket=_ticket(deps, worker, peer.id, job_id),
    )


def _seeder(deps: Deps, seeder: Seeder, worker: Worker, job_id: str, address: PeerAddress) -> Neighbour:
    return Neighbour(
        worker_id=SEEDER,
        key=public_hex(deps.key),
        bulk=Place(address.host, address.port),
        certificate_sha256=address.certificate_sha256,
        control=None,
        uplink=int(min(seeder.uplink, MAX_UPLINK)),
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
