"""The thin shell of a worker: carries out the session's instructions, hands the outcomes back as events, sleeps in between.

Nothing is decided here. One event loop, one engine thread; each instruction that waits for something is a task of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire import messages as wire
from p2p.codec.delta import warm_up
from p2p.domain.control_messages import Neighbour
from p2p.errors import SwarmError
from worker_node.adapters import price_file
from worker_node.adapters.bench import decode_rate
from worker_node.adapters.control import ControlLine
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.engine import Aborted, EngineCore, EngineHost, Finished, Output, Swapped, Unmakeable
from worker_node.adapters.neighbourhood import Neighbourhood
from worker_node.adapters.peers import Peers
from worker_node.adapters.swarm import Swarm, blame_for
from worker_node.adapters.tidings import Tidings
from worker_node.books import Books
from worker_node.config import WorkerSettings
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.report import Report
from worker_node.domain.session import Session
from worker_node.domain.telling import Telling
from worker_node.domain.weights import Version
from worker_node.errors import CallError, EngineError, TrustError
from worker_node.wiring import beat_message, confirm_message, frame_of, granted, join_request, orders, settled_by

ACCOUNT_EVERY_S = 30.0
STATUS_EVERY_S = 1.0
DELTAS = ("BF16",)  # what deltas are made of: the loops that apply them are compiled before the first one comes
_BENCH_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runtime drives. `make_host` gets the engine's two callbacks: outputs, and the reason of a failure."""

    session: Session
    key: Ed25519PrivateKey
    client: CoordinatorClient
    swarm: Swarm
    peers: Peers
    books: Books
    make_host: Callable[[Callable[[list[Output]], None], Callable[[str], None]], EngineHost]


class Runtime:
    """One worker process. `run` returns when the session stopped."""

    def __init__(
        self,
        settings: WorkerSettings,
        parts: Parts,
        *,
        reach: Callable[[str], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reach` is told at named commit points (crash tests), `tell` what the owner should know now, a line each."""
        self._settings = settings
        self._session = parts.session
        self._client = parts.client
        self._swarm = parts.swarm
        self._peers = parts.peers
        host = urlsplit(settings.url).hostname or ""
        self._line = ControlLine(
            self._post_control,
            parts.key,
            settings.peer,
            coordinator=(settings.coordinator_key, host),
            libp2p=settings.libp2p,
        )
        self._tidings = Tidings(
            self._line.control,
            self._peers,
            me=parts.books.public_key,
            coordinator=settings.coordinator_key,
            heard=lambda version: self._push(ev.HeardOf(version)),
        )
        self._neighbourhood = Neighbourhood(
            self._peers,
            self._line.control,
            coordinator_key=settings.coordinator_key,
            coordinator_host=host,
            met=self._met,
        )
        self._books = parts.books
        self._host = parts.make_host(self._engine_output, self._engine_failed)
        self._reach = reach
        self._tell = tell
        self._telling = Telling()
        self._clock = clock
        self._log = structlog.get_logger("worker")
        self._events: deque[ev.Event] = deque()
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._join: wire.JoinRequest | None = None
        self._networks: tuple[str, ...] = ()
        self._epoch = 0
        self._loaded_job: str | None = None
        self._stop: do.Stop | None = None
        self._said = ""
        self._status_at = 0.0
        self._is_blind = False  # the status file could not be written

    async def run(self) -> do.Stop:
        """Serve until the session stops. Raises EngineError or ConfigError when the worker cannot even start."""
        try:
            self._write_status(replace(self._session.report(), because="starting the engine"), self._clock(), None)
            engine = await self._host.start()
            peer = self._peers.start()
            if peer is not None:
                peer = peer.model_copy(update={"control_port": self._line.port})
            self._join = join_request(self._settings, self._books.public_key, engine, peer)
            self._books.engine = f"{engine.kind} ({engine.version}) on {engine.device}, {engine.dtype}"
            self._spawn(self._warm_up())
            self._spawn(self._poll_account())
            self._spawn(self._neighbourhood.run())
            self._spawn(self._line.run())
            self._spawn(self._tidings.run())
            return await self._serve()
        finally:
            await self._close()

    def request_drain(self, reason: str) -> None:
        """Finish the leases in hand and go; asked again: go now. Called on the event loop (signals)."""
        self._push(ev.DrainRequested(reason))

    async def _serve(self) -> do.Stop:
        self._handle(ev.Woke())
        while self._stop is None:
            await self._wait(self._session.next_deadline())
            if not self._events:
                self._handle(ev.Woke())
            while self._events and self._stop is None:
                self._handle(self._events.popleft())
            self._show()
        self._show(ended=self._stop.reason)
        return self._stop

    def _handle(self, event: ev.Event) -> None:
        for instruction in self._session.handle(event, self._clock()):
            self._perform(instruction)

    async def _wait(self, deadline: float | None) -> None:
        if self._events or deadline is None:
            return
        self._news.clear()
        try:
            async with asyncio.timeout(max(deadline - self._clock(), 0.0)):
                await self._news.wait()
        except TimeoutError:
            return

    def _push(self, event: ev.Event) -> None:
        self._events.append(event)
        self._news.set()

    def _perform(self, instruction: do.Instruction) -> None:  # noqa: PLR0912 (one line for each instruction)
        match instruction:
            case do.SendJoin():
                self._call(ev.Call.JOIN, 0, self._send_join)
            case do.SendBeat():
                self._call(ev.Call.BEAT, instruction.epoch, lambda: self._send_beat(instruction))
            case do.AskLease():
                self._call(ev.Call.LEASE, instruction.epoch, lambda: self._ask_lease(instruction))
            case do.FetchManifest():
                self._call(ev.Call.MANIFEST, self._epoch, lambda: self._fetch_manifest(instruction.version))
            case do.FetchPieces():
                self._spawn(self._fetch_pieces(instruction.version))
            case do.Weigh():
                self._spawn(self._weigh(instruction.version))
            case do.StopFetch():
                self._swarm.stop_fetch(instruction.version)
            case do.Prefetch():
                self._spawn(self._swarm.prefetch(instruction.news, epoch=lambda: self._epoch))
            case do.SwapWeights():
                self._spawn(self._swap(instruction))
            case do.SendConfirm():
                self._call(ev.Call.CONFIRM, instruction.epoch, lambda: self._confirm(instruction))
            case do.StartGeneration():
                self._order(lambda: self._host.admit(instruction.requests))
            case do.AbortGeneration():
                keys = {(instruction.lease_id, slot) for slot in instruction.slots}
                self._order(lambda: self._host.abort(keys))
            case do.SubmitCompletions():
                self._call(ev.Call.SUBMIT, instruction.epoch, lambda: self._submit(instruction), lease_id=instruction.lease_id)
            case do.DropVersions():
                self._spawn(self._drop(instruction.versions))
            case do.SendLeave():
                self._call(ev.Call.LEAVE, instruction.epoch, lambda: self._leave(instruction))
            case do.Stop():
                self._stop = instruction

    # --- calls: each pushes its answer, or raises CallError

    async def _send_join(self) -> None:
        assert self._join is not None
        welcome = await self._client.join(self._join)
        self._epoch, self._networks = welcome.session_epoch, welcome.peer_networks
        self._log.info("joined", worker=welcome.worker_id, session=welcome.session_epoch, notice=welcome.notice)
        self._push(ev.Joined(welcome.worker_id, welcome.session_epoch, welcome.heartbeat_s))

    async def _send_beat(self, beat: do.SendBeat) -> None:
        rate = self._books.measure(*self._host.meter())
        price = price_file.asked(self._settings.state_dir)
        message = beat_message(beat, tokens_per_s=rate, uplink=self._peers.uplink, control=self._line.way, price=price)
        reply = await self._client.heartbeat(message)
        self._priced(reply)
        self._line.told(reply.control, self._networks)
        jobs = [notice.job_id for notice in reply.versions]
        job_id = self._loaded_job if self._loaded_job in jobs else next(iter(jobs), None)
        self._neighbourhood.work_for(job_id, self._networks)
        self._tidings.work_for(job_id)
        self._push(orders(reply))

    def _priced(self, reply: wire.HeartbeatReply) -> None:
        """The price in force; it outlives a join, which names it again."""
        if reply.price_refused and reply.price_refused != self._books.price_refused:
            self._log.warning("the price is not taken", reason=reply.price_refused)
        self._books.price, self._books.price_refused = reply.price_uusd_per_hour, reply.price_refused
        if self._join is not None and self._join.price_uusd_per_hour != reply.price_uusd_per_hour:
            self._join = self._join.model_copy(update={"price_uusd_per_hour": reply.price_uusd_per_hour})

    def _met(self, neighbours: Sequence[Neighbour]) -> None:
        self._line.meet(neighbours)
        self._tidings.meet([peer.key for peer in neighbours])

    async def _post_control(self, path: str, body: bytes) -> bytes:
        return await self._client.control(path, body, epoch=self._epoch)

    async def _ask_lease(self, ask: do.AskLease) -> None:
        version = ask.version
        request = wire.LeaseRequest(
            session_epoch=ask.epoch,
            job_id=version.job_id,
            version=version.number,
            digest=version.digest,
            free_slots=ask.free_slots,
            wait_s=ask.wait_s,
        )
        reply = await self._client.lease(request)
        self._push(granted(reply, ask.epoch, offset_s=self._clock() - self._client.server_now()))

    async def _fetch_manifest(self, version: Version) -> None:
        try:
            await self._swarm.offer(version, epoch=self._epoch)
        except SwarmError as error:
            raise CallError(ev.Outcome.TRY_AGAIN, "bad_manifest", str(error)) from error
        self._push(ev.ManifestArrived(version))

    async def _confirm(self, confirm: do.SendConfirm) -> None:
        reply = await self._client.confirm(confirm_message(confirm))
        self._reach("worker.confirmed")
        self._push(ev.ConfirmAnswered(confirm.version, reply.accepted, reply.reason, epoch=confirm.epoch))

    async def _submit(self, submission: do.SubmitCompletions) -> None:
        frame = await asyncio.to_thread(frame_of, submission)
        self._reach("worker.submitted.before")
        reply = await self._client.submit(frame, epoch=submission.epoch)
        self._reach("worker.submitted.after")
        if not self._books.take_receipt(submission, reply):
            self._log.warning("the receipt is not signed for these slots", lease=submission.lease_id)
        self._push(settled_by(submission, reply))

    async def _leave(self, leave: do.SendLeave) -> None:
        await self._client.leave(wire.Leave(session_epoch=leave.epoch, reason=leave.reason[:1000]))
        self._push(ev.Left())

    # --- weights

    async def _warm_up(self) -> None:
        try:
            await asyncio.to_thread(warm_up, DELTAS)
        except OSError as error:  # what is compiled cannot be kept: it is compiled when it is needed
            self._log.warning("the delta loops are not kept", reason=str(error))

    async def _fetch_pieces(self, version: Version) -> None:
        try:
            finished = await self._swarm.bring(version, epoch=lambda: self._epoch, on_progress=self._books.fetch_progress)
        except (SwarmError, CallError, TrustError, OSError) as error:
            self._log.warning("not fetched", version=str(version), reason=str(error))
            self._push(ev.FetchFailed(version, str(error), blame_for(error)))
            return
        finally:
            self._books.fetch_ended()
        self._reach("worker.fetched")
        self._push(finished)

    async def _weigh(self, version: Version) -> None:
        """What a jump to a newer version would cost; where that cannot be learned, the running fetch goes on."""
        try:
            await self._swarm.offer(version, epoch=self._epoch)
            left, jump = self._swarm.weigh(version)
        except (SwarmError, CallError, TrustError, OSError) as error:
            self._log.debug("not weighed", version=str(version), reason=str(error))
            left, jump = 0, 0
        self._push(ev.Weighed(version, left, jump))

    async def _drop(self, versions: Collection[Version]) -> None:
        try:
            await self._swarm.drop(versions)
        except OSError as error:  # what is left is removed at the next start
            self._log.warning("old versions are not removed", reason=str(error))

    async def _swap(self, swap: do.SwapWeights) -> None:
        version = swap.version
        load = self._loaded_job != version.job_id
        self._loaded_job = None if load else self._loaded_job
        try:
            await self._host.swap(
                self._swarm.weights(version),
                load=load,
                abort_running=swap.abort_running,
                canary_ids=self._swarm.canary_ids(version),
                measure=self._measure if load else lambda _: 0.0,
                on_swapped=lambda swapped: self._swapped(version, swapped),
            )
        except EngineError as error:
            if not error.poisoned:  # a poisoned engine reports by its own way
                self._push(ev.SwapFailed(version, str(error), kept=not load))

    def _measure(self, core: EngineCore) -> float:
        """The decode rate, after the first load unless it is set; no work was asked for yet, so nothing runs."""
        if self._settings.engine.tokens_per_s > 0 or self._books.tokens_per_s > 0:
            return 0.0
        rate = decode_rate(core, slots=min(self._settings.engine.slots, _BENCH_SLOTS))
        return min(rate, self._settings.engine.throttle or rate)

    def _swapped(self, version: Version, swapped: Swapped) -> None:
        """Called among the engine's outputs, before any that the new weights made."""
        self._reach("worker.swapped")
        self._loaded_job = version.job_id
        if swapped.tokens_per_s > 0:
            self._books.tokens_per_s = swapped.tokens_per_s
        self._push(ev.SwapFinished(version, swapped.canary_logprobs, swapped.seconds))

    # --- engine, on the event loop

    def _engine_output(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Finished((lease_id, slot), completion):
                    self._reach("worker.generated")
                    self._push(ev.CompletionFinished(lease_id, slot, completion))
                case Aborted((lease_id, slot)):
                    self._push(ev.CompletionAborted(lease_id, slot))
                case Unmakeable((lease_id, slot), reason):
                    self._push(ev.CompletionFailed(lease_id, slot, reason))

    def _engine_failed(self, reason: str) -> None:
        self._log.debug("the engine failed", reason=reason)  # the worker's last words say it to its owner
        self._push(ev.EngineFailed(reason))

    def _order(self, order: Callable[[], None]) -> None:
        try:
            order()
        except EngineError as error:
            self._push(ev.EngineFailed(str(error)))

    # --- tasks

    def _call(self, call: ev.Call, epoch: int, work: Callable[[], Awaitable[None]], *, lease_id: str = "") -> None:
        """`work` makes the coroutine once its task runs: a task that ends before it began has then none to leave unawaited."""
        self._spawn(self._reported(call, epoch, work, lease_id))

    async def _reported(self, call: ev.Call, epoch: int, work: Callable[[], Awaitable[None]], lease_id: str) -> None:
        """Carry out a call; a failure becomes an event."""
        retry_after_s = 0.0
        try:
            await work()
        except TrustError as error:  # at first a wrong URL or invite; later something in between, which ends nothing
            outcome, code, reason = ev.Outcome.TRY_AGAIN if self._epoch else ev.Outcome.FATAL, "not_trusted", str(error)
        except CallError as error:
            outcome, code, reason, retry_after_s = error.outcome, error.code, str(error), error.retry_after_s
        except OSError as error:
            outcome, code, reason = ev.Outcome.TRY_AGAIN, "os_error", str(error)
        else:
            self._tell_if(self._telling.answered(call, self._clock()))
            return
        self._log.debug("call failed", call=call.value, code=code, reason=reason)
        failed = ev.CallFailed(call, outcome, code, reason, epoch=epoch, retry_after_s=retry_after_s, lease_id=lease_id)
        self._tell_if(self._telling.failed(failed, self._clock()))
        self._push(failed)

    def _tell_if(self, line: str | None) -> None:
        if line is not None:
            self._tell(line)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that raises what it should not is a fault of this program: the worker ends, loudly."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("internal fault", error=repr(error), exc_info=error)
            self._push(ev.EngineFailed(f"internal fault: {error!r}"))

    async def _poll_account(self) -> None:
        while True:
            await asyncio.sleep(ACCOUNT_EVERY_S)
            if self._epoch:
                try:
                    self._books.account = await self._client.account(self._epoch)
                except (CallError, TrustError, OSError) as error:
                    self._log.debug("account not read", reason=str(error))

    def _show(self, *, ended: str | None = None) -> None:
        report = self._session.report()
        words = "working" if report.working else report.because
        if words != self._said:
            self._said = words
            self._log.debug("working" if report.working else "not working", because=report.because)
            self._status_at = 0.0
        now = self._clock()
        if ended is not None or now >= self._status_at:
            self._status_at = now + STATUS_EVERY_S
            self._write_status(report, now, ended)

    def _write_status(self, report: Report, now: float, ended: str | None) -> None:
        """The work goes on without a status file: a full disk must not end it."""
        self._books.control, self._books.neighbours = self._line.way, self._tidings.words
        try:
            self._books.write(report, now=now, ended=ended)
        except OSError as error:
            if not self._is_blind:
                self._log.warning("the status file cannot be written", reason=str(error))
            self._is_blind = True
        else:
            self._is_blind = False

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._host.close()
        await self._swarm.close()
        await self._line.close()
        await self._peers.close()
        await self._client.close()
