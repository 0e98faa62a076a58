"""A worker: the product's own session machine with a simulated engine, disk, clock and network.

Mirrored here: what `worker_node/runtime.py` does with each instruction. Real: `worker_node.domain` decides everything, and
`worker_node/wiring.py` writes every message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from coordinator.service.worker_weights import Wanted
from coordinator.wire import messages as wire
from coordinator.wire.canary import scripted_canary
from coordinator.wire.signing import worker_id
from p2p.domain.hops import Hop
from p2p.domain.manifest import Manifest
from p2p.domain.signing import check_hop, check_manifest
from simulator.faults.engine import SimEngine
from simulator.faults.network import Line
from simulator.faults.schedule import Kind
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.generation import Completion, SlotKey
from worker_node.domain.session import Session, SessionSettings
from worker_node.domain.weights import Version
from worker_node.errors import CallError
from worker_node.wiring import beat_message, confirm_message, frame_of, granted, orders, settled_by

if TYPE_CHECKING:
    from simulator.faults.world import World

SETTINGS = SessionSettings(
    slots=1,
    lease_wait_s=3.0,
    idle_ask_s=0.5,
    coalesce_s=0.2,
    overdue_s=25.0,
    drain_s=8.0,
    leave_s=3.0,
    silence_s=40.0,
    swap_s=40.0,
    retry_first_s=0.3,
    retry_most_s=3.0,
)


class SimWorker:
    """One machine. `start` and `die` may follow each other; its disk survives unless it is wiped."""

    def __init__(self, world: World, place: int, kind: Kind) -> None:
        self.world = world
        self.place = place
        self.kind = kind
        self.name = f"worker-{place}"
        self.public_key = f"{world.plan.seed % 2**64:016x}{place + 1:048x}"
        self.id = worker_id(self.public_key)
        self.price = kind.price_uusd_per_hour
        self.rng = Random(world.plan.seed * 1000 + place)  # noqa: S311 (seeded on purpose)
        plan = world.plan
        self.line = Line(world.host, self.rng, kind.latency_s, plan.loss, plan.duplicates, self.id, kind.skew_s)
        self.disk: dict[Version, str] = {}  # verified versions, and the digest of what really lies there
        self.proved: set[Version] = set()  # accepted by the coordinator in this session
        self.deadlines: dict[str, float] = {}  # of leases, Unix seconds
        self.served: dict[int, str] = {}  # what the engine really made tokens with: number -> digest, in this life
        self.session: Session | None = None
        self.life = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self.session is not None

    # --- life

    def start(self) -> None:
        """A new process with the disk as it is."""
        if self.session is not None:
            return
        self.life += 1
        self._loop = asyncio.get_running_loop()
        self._epoch = 0
        self._loaded: Version | None = None
        self._manifests: dict[Version, tuple[Manifest, tuple[Hop, ...]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.served = {}
        self._engine = SimEngine(self.kind.slots, self.kind.tokens_per_s, self.world.plan.tail, self._finished)
        settings = replace(SETTINGS, slots=self.kind.slots)
        self.session = Session(settings, rng=self.rng, stored=frozenset(self.disk))
        self._push(ev.Woke())

    def die(self, *, wipe: bool = False) -> None:
        """As kill -9: memory is lost."""
        self.session = None
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._engine.abort_all()
        if wipe:
            self.disk.clear()

    def drain(self, reason: str) -> None:
        """Its owner wants it to end."""
        self._push(ev.DrainRequested(reason))

    def saw(self, submission: do.SubmitCompletions) -> None:
        """Another worker sends something. The honest do not care."""

    def engine_fails(self) -> None:
        """The engine is gone."""
        self._engine.abort_all()
        self._push(ev.EngineFailed("the engine crashed"))

    def _clock(self) -> float:
        return self._loop.time() * self.kind.drift

    def _push(self, event: ev.Event) -> None:
        session = self.session
        if session is None:
            return
        before = session._phase  # `report` says it too, with much else
        instructions = session.handle(event, self._clock())
        self.world.coverage.phase(before, session._phase)
        for instruction in instructions:
            self._perform(instruction)
        if self.session is session:
            self._arm(session.next_deadline())

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None and deadline < inf:
            wait_s = max(deadline - self._clock(), 0.0) / self.kind.drift
            self._timer = self._loop.call_later(wait_s + 1e-6, self._push, ev.Woke())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.broke(f"{self.name}'s shell failed: {error!r}")

    # --- instructions

    def _perform(self, instruction: do.Instruction) -> None:  # noqa: PLR0912 (one line for each instruction)
        match instruction:
            case do.SendJoin():
                self._call(ev.Call.JOIN, 0, self._join())
            case do.SendBeat():
                self._call(ev.Call.BEAT, instruction.epoch, self._beat(instruction))
            case do.AskLease():
                self._call(ev.Call.LEASE, instruction.epoch, self._lease(instruction))
            case do.FetchManifest():
                self._call(ev.Call.MANIFEST, self._epoch, self._manifest(instruction.version))
            case do.FetchPieces():
                self._spawn(self._fetch(instruction.version))
            case do.Weigh():
                self._push_soon(ev.Weighed(instruction.version, 0, 0))
            case do.SwapWeights():
                self._spawn(self._swap(instruction))
            case do.SendConfirm():
                self._call(ev.Call.CONFIRM, instruction.epoch, self._confirm(instruction))
            case do.StartGeneration():
                self._engine.admit(instruction.requests)
            case do.AbortGeneration():
                self._engine.abort({(instruction.lease_id, slot) for slot in instruction.slots})
            case do.SubmitCompletions():
                self._call(ev.Call.SUBMIT, instruction.epoch, self._submit(instruction), instruction.lease_id)
            case do.DropVersions():
                for version in instruction.versions:
                    self.disk.pop(version, None)
            case do.SendLeave():
                self._call(ev.Call.LEAVE, instruction.epoch, self._leave(instruction))
            case do.Stop():
                self.world.tell(f"{self.name} stops: {instruction.reason}")
                self.die()
                self.world.stopped(self)
            case do.StopFetch() | do.Prefetch():
                pass  # fetches here are not cut short, and nothing is brought ahead

    def _push_soon(self, event: ev.Event) -> None:
        life = self.life
        self._loop.call_soon(lambda: self._push(event) if self.life == life else None)

    def _call(self, call: ev.Call, epoch: int, work: Coroutine[Any, Any, None], lease_id: str = "") -> None:
        self._spawn(self._reported(call, epoch, work, lease_id))

    async def _reported(self, call: ev.Call, epoch: int, work: Coroutine[Any, Any, None], lease_id: str) -> None:
        try:
            await work
        except CallError as error:
            failed = ev.CallFailed(
                call, error.outcome, error.code, str(error), epoch=epoch, retry_after_s=error.retry_after_s, lease_id=lease_id
            )
            self._push(failed)

    def _join_request(self) -> wire.JoinRequest:
        return wire.JoinRequest(
            invite_code=self.world.invite_code,
            public_key=self.public_key,
            name=self.name,
            engine=wire.EngineInfo(kind="scripted", version="1", dtype="float32"),
            price_uusd_per_hour=self.price,
            max_slots=self.kind.slots,
            tokens_per_s=self.kind.slots * self.kind.tokens_per_s,
        )

    def twin(self) -> None:
        """Another process joins with the same key: the newer session wins, and this one must stop."""
        self._spawn(self._twin())

    async def _twin(self) -> None:
        request = self._join_request()
        with suppress(CallError):
            await self.line.call(0, lambda front, sender: front.join(sender, request))

    async def _join(self) -> None:
        request = self._join_request()
        welcome = await self.line.call(0, lambda front, sender: front.join(sender, request))
        self._epoch = welcome.session_epoch
        self.proved = set()
        self.world.tell(f"{self.name} joined, session {welcome.session_epoch} {welcome.notice}")
        self._push(ev.Joined(welcome.worker_id, welcome.session_epoch, welcome.heartbeat_s))

    async def _beat(self, beat: do.SendBeat) -> None:
        message = beat_message(beat, tokens_per_s=self.kind.slots * self.kind.tokens_per_s, uplink=1e6)
        self._push(orders(await self.line.call(beat.epoch, lambda front, sender: front.heartbeat(sender, message))))

    async def _lease(self, ask: do.AskLease) -> None:
        version = ask.version
        if ask.epoch == self._epoch:  # not a call of the session before
            self.check_proved([version], "asks for work with")
        request = wire.LeaseRequest(
            session_epoch=ask.epoch,
            job_id=version.job_id,
            version=version.number,
            digest=version.digest,
            free_slots=ask.free_slots,
            wait_s=ask.wait_s,
        )
        life = self.life
        timeout_s = ask.wait_s + 5.0
        reply = await self.line.call(
            ask.epoch, lambda front, sender: front.lease(sender, request, lambda: self.life == life), timeout_s=timeout_s
        )
        for lease in reply.leases:
            self.world.laws.turns.granted(lease)
        self.deadlines |= {lease.lease_id: lease.deadline for lease in reply.leases}
        self._push(granted(reply, ask.epoch, offset_s=self._clock() - self.line.wall()))

    async def _submit(self, submission: do.SubmitCompletions) -> None:
        frame = frame_of(submission)
        if submission.epoch == self._epoch:
            job_id = submission.lease_id.partition("/")[0]
            self.check_proved([Version(job_id, number, digest) for number, digest in submission.digests], "sends tokens of")
        self.world.sent(self, submission)
        reply = await self.line.call(submission.epoch, lambda front, sender: front.submit(sender, frame))
        self.world.laws.acknowledged(self, submission, reply)
        self._push(settled_by(submission, reply))

    def check_proved(self, versions: list[Version], verb: str) -> None:
        """Law 3 on the worker's side: what nobody confirmed serves nobody."""
        for version in versions:
            if version not in self.proved:
                self.world.broke(f"law 3: {self.name} {verb} {version}, which the coordinator never confirmed")

    async def _leave(self, leave: do.SendLeave) -> None:
        message = wire.Leave(session_epoch=leave.epoch, reason=leave.reason)
        await self.line.call(leave.epoch, lambda front, sender: front.leave(sender, message))
        self._push(ev.Left())

    # --- weights

    async def _manifest(self, version: Version) -> None:
        held = frozenset(one.digest for one in self.disk)
        wanted = Wanted(version.job_id, version.number, version.digest, held=held)
        life = self.world.host.life
        reply = await self.line.call(self._epoch, lambda front, sender: front.manifest(sender, wanted))
        check_manifest(self.world.public_key, reply.manifest, reply.signature)
        manifest = Manifest.from_json(reply.manifest)
        if (manifest.version, manifest.digest) != (version.number, version.digest):
            self.world.broke(f"law 3: the manifest of {version} describes version {manifest.version} ({manifest.digest[:8]})")
        for hop in reply.hops:
            check_hop(self.world.public_key, hop.text, hop.signature)
        self._manifests[version] = (manifest, tuple(Hop.from_json(hop.text) for hop in reply.hops))
        self.world.laws.weights.fetch_begins(self, version, life)
        self._push(ev.ManifestArrived(version))

    async def _fetch(self, version: Version) -> None:
        manifest, hops = self._manifests[version]
        edges = [hop.edge for hop in hops] or list(manifest.edges)
        began = self._loop.time()
        await asyncio.sleep(self.kind.fetch_s * self.rng.uniform(0.5, 1.5))
        for piece in manifest.pieces(edges):
            if piece.digest not in self.world.truth.pieces:
                self.world.laws.weights.piece_gone(self, version, piece.digest)
                self._push(ev.FetchFailed(version, f"piece {piece.digest[:8]} is gone"))
                return
        try:
            last = edges[-1].pieces[0].digest
            await self.line.call(self._epoch, lambda front, sender: front.piece(sender, version.job_id, last))
        except CallError as error:
            self._push(ev.FetchFailed(version, str(error)))
            return
        base = edges[0].base_digest
        if base is not None and base not in {one.digest for one in self.disk}:
            self._push(ev.FetchFailed(version, "the base was dropped meanwhile"))
            return
        self.disk[version] = version.digest
        self._push(ev.FetchFinished(version, sum(edge.size for edge in edges), 0, self._loop.time() - began))

    async def _swap(self, swap: do.SwapWeights) -> None:
        version = swap.version
        if swap.abort_running:
            for lease_id, slot in self._engine.abort_all():
                self._push(ev.CompletionAborted(lease_id, slot))
        await asyncio.sleep(0.05)
        real = self.disk.get(version, version.digest)
        if self.kind.temper == "broken_engine" and self.rng.random() < 0.4:
            real = self.served.get(self._loaded.number, "") if self._loaded is not None else "0" * 64  # the swap did nothing
        self._engine.swap(version.number)
        self._loaded = version
        self.served[version.number] = real
        canary_ids = self._manifests[version][0].canary_ids if version in self._manifests else range(24)
        self._push(ev.SwapFinished(version, scripted_canary(real, len(canary_ids) - 1), 0.05))

    async def _confirm(self, confirm: do.SendConfirm) -> None:
        message = confirm_message(confirm)
        reply = await self.line.call(confirm.epoch, lambda front, sender: front.confirm(sender, message))
        if not reply.accepted:
            self.world.tell(f"{self.name} is not confirmed for {confirm.version}: {reply.reason}")
        if reply.accepted and confirm.epoch == self._epoch:
            self.proved.add(confirm.version)
        self._push(ev.ConfirmAnswered(confirm.version, reply.accepted, reply.reason, epoch=confirm.epoch))

    # --- engine

    def _finished(self, key: SlotKey, completion: Completion) -> None:
        self._push(ev.CompletionFinished(*key, completion))
