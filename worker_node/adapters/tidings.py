"""What this worker hears and says on its job's topics of the control plane.

Announcements make the session ask for its orders at once. Batches go to the bulk node, which takes those of transfers that it wants. What
neighbours hold is only shown: the bulk connections tell it exactly, and at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from functools import partial

import structlog

from p2p.adapters.bulk.node import TransferState
from p2p.adapters.control.ports import Control, Receiver
from p2p.domain.control_messages import Announcement, HaveMap, SignedBatch, may_say, ranges_of, topic_of
from p2p.errors import ControlError
from worker_node.adapters.peers import Peers
from worker_node.domain.weights import Version

log = structlog.get_logger("control")
SAY_S = 5.0
WAITING = 64  # batches
_TOLD = 256  # neighbours whose words are kept


class Tidings:
    """Subscriptions for one job at a time. `run` ends when it is cancelled."""

    def __init__(self, control: Control, peers: Peers, *, me: str, coordinator: str, heard: Callable[[Version], None]) -> None:
        """`me` and `coordinator`: public keys (hex). `heard` is told of each announced version."""
        self._control = control
        self._peers = peers
        self._me = me
        self._coordinator = coordinator
        self._heard = heard
        self._job_id: str | None = None
        self._neighbours: frozenset[str] = frozenset()
        self._haves: dict[str, HaveMap] = {}  # by holder, newest last
        self._batches: asyncio.Queue[SignedBatch] = asyncio.Queue(WAITING)
        self._said = b""

    def work_for(self, job_id: str | None) -> None:
        """Listen to this job, and to no other."""
        if job_id == self._job_id:
            return
        for topic in self._topics():
            self._control.unsubscribe(topic)
        self._job_id, self._said = job_id, b""
        self._haves.clear()
        for topic, receive in self._topics().items():
            self._control.subscribe(topic, receive, validate=partial(self._may_say, topic))

    def meet(self, keys: Collection[str]) -> None:
        """Whose word on what they hold is heard and passed on: neighbours only."""
        self._neighbours = frozenset(keys)

    @property
    def words(self) -> str:
        """What neighbours say they hold of the newest transfer here."""
        newest = self._newest()
        told = [] if newest is None else [have for have in self._haves.values() if have.transfer == newest.transfer]
        if not told:
            return ""
        whole = sum(have.pieces.bit_count() == have.count for have in told)
        return f"{whole} of {len(told)} neighbours hold what is known of the newest transfer"

    async def run(self) -> None:
        """Pass batches on, and say now and then what is here."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on())
            tasks.create_task(self._keep_saying())

    async def _pass_on(self) -> None:
        while True:
            batch = await self._batches.get()
            await asyncio.to_thread(self._peers.take_batch, batch.text, batch.signature)

    async def _keep_saying(self) -> None:
        while True:
            await asyncio.sleep(SAY_S)
            newest = self._newest()
            if newest is None or self._job_id is None:
                continue
            have = HaveMap(self._me, newest.transfer, newest.pieces, ranges_of(newest.mask), int(self._peers.uplink)).to_bytes()
            if have != self._said:
                self._said = have
                with contextlib.suppress(ControlError):
                    await self._control.publish(topic_of(self._job_id, "haves"), have)

    def _newest(self) -> TransferState | None:
        ours = [one for one in self._peers.state().transfers if one.job_id == self._job_id]
        return max(ours, key=lambda one: (one.version, one.transfer), default=None)

    def _topics(self) -> dict[str, Receiver]:
        if self._job_id is None:
            return {}
        receivers = {"versions": self._announced, "batches": self._told_batch, "haves": self._told_have}
        return {topic_of(self._job_id, what): receive for what, receive in receivers.items()}

    def _may_say(self, topic: str, author: str, payload: bytes) -> bool:
        """Runs in the network's thread too."""
        return (author == self._coordinator or author in self._neighbours) and may_say(
            topic, author, payload, coordinator=self._coordinator
        )

    def _announced(self, _author: str, payload: bytes) -> None:
        with contextlib.suppress(ControlError):
            announced = Announcement.from_bytes(payload)
            if announced.job_id == self._job_id:
                self._heard(Version(announced.job_id, announced.version, announced.digest))

    def _told_batch(self, _author: str, payload: bytes) -> None:
        with contextlib.suppress(ControlError, asyncio.QueueFull):  # the bulk connections bring it too
            self._batches.put_nowait(SignedBatch.from_bytes(payload))

    def _told_have(self, _author: str, payload: bytes) -> None:
        with contextlib.suppress(ControlError):
            have = HaveMap.from_bytes(payload)
            self._haves.pop(have.holder, None)
            self._haves[have.holder] = have
            if len(self._haves) > _TOLD:
                del self._haves[next(iter(self._haves))]
