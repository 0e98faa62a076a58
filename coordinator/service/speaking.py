"""What the coordinator says on the control plane: the newest version of each job, and the piece batches of edges that are being encoded.

Level-triggered: what the rows and the open transfers say is compared with what was said. Everything is said twice, on the board for those who come
by HTTPS and, where there is one, by the network. Nobody depends on it: heartbeats name versions, bulk connections carry batches.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

import structlog
from blake3 import blake3

from coordinator.domain.model import Job, JobState, Publication, PublicationState, Worker, WorkerState
from coordinator.domain.states import TERMINAL
from coordinator.service.deps import NEWS, Deps
from coordinator.service.ports import Reader
from coordinator.wire.messages import PeerAddress
from coordinator.wire.signing import public_hex
from p2p.adapters.control.ports import Receiver, Validator
from p2p.domain.control_board import Board
from p2p.domain.control_messages import Announcement, SignedBatch, may_say, topic_of
from p2p.domain.control_peers import ControlAddress

log = structlog.get_logger()
LOOK_S = 5.0
MEMBERS_GAP_S = 0.25  # workers come in crowds
BATCH_SLOTS = 16  # batches repeated for one job: whoever missed older ones gets them on the bulk connections
NEIGHBOURS = 8  # listening workers that the coordinator dials, in case its own port is closed
VERSIONS, BATCHES, HAVES = TOPICS = "versions", "batches", "haves"


class Net(Protocol):
    """The control network, as far as the service uses it. Nothing here waits for anyone."""

    async def publish(self, topic: str, payload: bytes, *, slot: str = "") -> None: ...

    async def retract(self, topic: str) -> None: ...

    def subscribe(self, topic: str, receive: Receiver, *, validate: Validator) -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    def know(self, address: ControlAddress) -> None: ...

    def set_neighbours(self, keys: frozenset[str]) -> None: ...

    def set_members(self, keys: frozenset[str] | None) -> None: ...


async def keep_speaking(deps: Deps, voice: Voice) -> None:
    """Say what is new at once, and look at the rows now and then."""
    with deps.wake.watch(NEWS) as watch:
        while True:
            try:
                await voice.look()
            except ConnectionError:
                raise  # the store has ended
            except Exception:
                log.exception("speaking_failed")
            await watch.wait(LOOK_S)


async def keep_members(deps: Deps, net: Net) -> None:
    """Let enrolled workers, and nobody else, take part in the network."""
    with deps.wake.watch("workers") as watch:
        while True:
            try:
                await admit(deps, net)
            except ConnectionError:
                raise
            except Exception:
                log.exception("members_not_read")
            await asyncio.sleep(MEMBERS_GAP_S)
            await watch.wait(LOOK_S)


async def admit(deps: Deps, net: Net) -> None:
    """Members are the workers of now; some of those that listen are dialled."""
    live = [WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.DRAINING]
    workers = await deps.store.read(lambda reader: reader.select(Worker, state=live, order_by="id"))
    net.set_members(frozenset({public_hex(deps.key), *(worker.public_key for worker in workers)}))
    listening = [address for worker in workers if (address := _address(worker)) is not None][:NEIGHBOURS]
    for address in listening:
        net.know(address)
    net.set_neighbours(frozenset(address.key for address in listening))


def _address(worker: Worker) -> ControlAddress | None:
    if worker.peer is None:
        return None
    peer = PeerAddress.model_validate(worker.peer)
    return None if peer.control_port is None else ControlAddress(worker.public_key, peer.host, peer.control_port)


class Voice:
    """Remembers what was said. Losing it is harmless: it is said again."""

    def __init__(self, deps: Deps, board: Board, net: Net | None) -> None:
        self._deps = deps
        self._board = board
        self._net = net
        self._me = public_hex(deps.key)
        self._said: dict[str, Announcement | None] = {}  # by job
        self._told: dict[str, dict[str, int]] = {}  # job -> open transfer -> batches said

    async def look(self) -> None:
        """One look: say what was not said, take back what is over."""
        jobs = await self._deps.store.read(_live_jobs)
        for job_id in jobs:
            if job_id not in self._said:
                self._said[job_id] = None
                self._listen(job_id)
            await self._announce(job_id)
            await self._say_batches(job_id)
        for job_id in self._said.keys() - set(jobs):
            await self._leave(job_id)

    async def _announce(self, job_id: str) -> None:
        said = self._said[job_id]
        row = await self._deps.store.read(lambda reader: _newest(reader, job_id, said))
        if row is None:
            return
        manifest = await asyncio.to_thread(lambda: blake3(row.manifest.encode()).hexdigest())
        announcement = Announcement(job_id, row.version, row.digest, manifest).signed(self._deps.key)
        self._said[job_id] = announcement
        await self._say(topic_of(job_id, VERSIONS), "", announcement.to_bytes())

    async def _say_batches(self, job_id: str) -> None:
        """Deltas only: nobody without the base can use what is not announced."""
        told = self._told.get(job_id, {})
        known = self._deps.transfers.deltas(job_id)
        topic = topic_of(job_id, BATCHES)
        if told and not known:
            await self._take_back(topic)
        for transfer in known:
            for number in range(told.get(transfer.id, 0), len(transfer.documents)):
                document = SignedBatch(*transfer.documents[number])
                await self._say(topic, str(number % BATCH_SLOTS), document.to_bytes())
        self._told[job_id] = {transfer.id: len(transfer.documents) for transfer in known}

    async def _say(self, topic: str, slot: str, payload: bytes) -> None:
        self._board.put(topic, self._me, slot, payload)
        if self._net is not None:
            await self._net.publish(topic, payload, slot=slot)

    async def _take_back(self, topic: str) -> None:
        self._board.clear(topic)
        if self._net is not None:
            await self._net.retract(topic)

    def _listen(self, job_id: str) -> None:
        """Pass on what is gossiped. What workers say they hold stays off the board: every have-map would go to everyone who polls."""
        if self._net is None:
            return
        for what in TOPICS:
            topic = topic_of(job_id, what)
            self._net.subscribe(topic, self._receiver(topic), validate=partial(self._may_say, topic))

    def _receiver(self, topic: str) -> Receiver:
        if topic.endswith(f"/{HAVES}"):
            return lambda _author, _payload: None
        return lambda author, payload: self._board.put(topic, author, "", payload)

    def _may_say(self, topic: str, author: str, payload: bytes) -> bool:
        return may_say(topic, author, payload, coordinator=self._me)

    async def _leave(self, job_id: str) -> None:
        """The job has ended."""
        for what in TOPICS:
            topic = topic_of(job_id, what)
            await self._take_back(topic)
            if self._net is not None:
                self._net.unsubscribe(topic)
        del self._said[job_id]
        self._told.pop(job_id, None)


async def _live_jobs(reader: Reader) -> list[str]:
    return [job.id for job in await reader.select(Job, state=[state for state in JobState if state not in TERMINAL[JobState]])]


async def _newest(reader: Reader, job_id: str, said: Announcement | None) -> Publication | None:
    """The newest public version, unless it is what was said. A publication's row is large: it is read only if it is news."""
    public = PublicationState.PUBLISHED
    version = await reader.highest(Publication, "version", job_id=job_id, state=public)
    if version is None:
        return None
    if (
        said is not None
        and said.version == version
        and await reader.count(Publication, job_id=job_id, version=version, digest=said.digest, state=public)
    ):
        return None
    return (await reader.select(Publication, job_id=job_id, version=version, state=public, limit=1))[0]
