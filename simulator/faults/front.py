"""The coordinator's worker protocol without HTTP: the guards and routes of `coordinator/api`, in their order, on messages.

Mirrored here: which check comes before which, and what each route calls (`api/worker_calls.py`, `api/worker_routes.py`). Real:
every check and every desk (time, nonce, session, beats, leases, submissions, confirmations, manifests, pieces). Left out:
signatures and rate limits, which unit tests cover and which cost more than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.domain.model import Worker
from coordinator.service import confirming, enrolment, worker_submissions, worker_weights
from coordinator.service.deps import Deps
from coordinator.service.leasing import Ask
from coordinator.service.submitting import SubmitDesk
from coordinator.service.worker_auth import check_body_epoch, check_nonce, check_session, check_time, unknown_worker
from coordinator.service.worker_batching import Batcher
from coordinator.service.worker_beats import BeatDesk
from coordinator.service.worker_bulletin import Bulletin, notice
from coordinator.service.worker_desk import LeaseDesk
from coordinator.service.worker_limits import NonceMemory
from coordinator.service.worker_weights import KnownEdges, PieceRights, Wanted
from coordinator.wire import messages as wire
from coordinator.wire.signing import SignedFields


@dataclass(frozen=True, slots=True)
class Sender:
    """The signed fields of a request."""

    worker_id: str
    epoch: int
    time: float  # of the worker's clock, Unix seconds
    nonce: str

    def fields(self) -> SignedFields:
        """As the protocol names them."""
        return SignedFields("POST", "", "", self.worker_id, self.epoch, f"{self.time:.3f}", self.nonce)


class Front:
    """What answers workers in one life of the coordinator."""

    def __init__(self, deps: Deps) -> None:
        self.deps = deps
        self.bulletin = Bulletin(deps)
        self.leases = LeaseDesk(deps)
        self._nonces = NonceMemory(100_000)
        self._submissions = SubmitDesk(deps)
        self._beats = BeatDesk(deps, self.bulletin)
        self._workers: Batcher[str, Worker | None] = Batcher(self._load, most=256)
        self._edges = KnownEdges()
        self._pieces = PieceRights(self._edges)

    async def _load(self, ids: Sequence[str]) -> list[Worker | None]:
        found = await self.deps.store.read(lambda reader: reader.select(Worker, id=sorted(set(ids))))
        by_id = {worker.id: worker for worker in found}
        return [by_id.get(one) for one in ids]

    async def _caller(self, sender: Sender) -> Worker:
        """The authenticated worker. Raises ProtocolRefusal."""
        fields = sender.fields()
        check_time(fields, now=self.deps.clock.now(), started_at=self.deps.started_at)
        worker = await self._workers.ask(sender.worker_id)
        if worker is None:
            raise unknown_worker(fields)
        now = self.deps.clock.now()
        check_nonce(self._nonces, fields, now=now)
        check_session(worker, sender.epoch)
        self.deps.presence.touch(worker.id, epoch=worker.session_epoch, at=now)
        return worker

    async def join(self, sender: Sender, message: wire.JoinRequest) -> wire.Welcome:
        """POST join."""
        fields = sender.fields()
        now = self.deps.clock.now()
        check_time(fields, now=now, started_at=self.deps.started_at)
        check_nonce(self._nonces, fields, now=now)
        return await enrolment.join(self.deps, message)

    async def heartbeat(self, sender: Sender, message: wire.Heartbeat) -> wire.HeartbeatReply:
        """POST heartbeat."""
        worker = await self._caller(sender)
        check_body_epoch(message.session_epoch, sender.epoch)
        return await self._beats.heartbeat(worker, message)

    async def lease(self, sender: Sender, message: wire.LeaseRequest, is_open: Callable[[], bool]) -> wire.LeaseReply:
        """POST lease, a long poll."""
        worker = await self._caller(sender)
        check_body_epoch(message.session_epoch, sender.epoch)
        outcome = await self.leases.ask(Ask(worker.id, worker.session_epoch, message), is_open=is_open)
        newer = await self.bulletin.newer(message.job_id, outcome.newest, message.version)
        return wire.LeaseReply(
            leases=outcome.leases,
            reason=outcome.reason,
            retry_after_s=outcome.retry_after_s,
            newer=None if newer is None else notice(newer),
        )

    async def submit(self, sender: Sender, body: bytes) -> wire.SubmitReply:
        """POST submit."""
        worker = await self._caller(sender)
        submission = worker_submissions.decode(body)
        check_body_epoch(submission.head.session_epoch, sender.epoch)
        return await self._submissions.submit(worker, submission)

    async def confirm(self, sender: Sender, message: wire.Confirm) -> wire.ConfirmReply:
        """POST confirm."""
        worker = await self._caller(sender)
        check_body_epoch(message.session_epoch, sender.epoch)
        reply = await confirming.confirm(self.deps, worker, message)
        if reply.accepted:
            self.leases.hasten(message.job_id, worker.id)
        return reply

    async def leave(self, sender: Sender, message: wire.Leave) -> None:
        """POST leave, without the account that it answers with."""
        worker = await self._caller(sender)
        check_body_epoch(message.session_epoch, sender.epoch)
        await enrolment.leave(self.deps, worker.id, message.reason)

    async def manifest(self, sender: Sender, wanted: Wanted) -> wire.ManifestReply:
        """GET the manifest of a version, and a path to it."""
        worker = await self._caller(sender)
        return await worker_weights.manifest(self.deps, self._edges, worker, wanted)

    async def piece(self, sender: Sender, job_id: str, digest: str) -> None:
        """GET a piece; returns when the worker may read it. Raises ProtocolRefusal."""
        worker = await self._caller(sender)
        await self._pieces.check(self.deps, worker, job_id, digest)
