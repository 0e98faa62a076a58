"""What the coordinator answers on the control plane, whether a question came over libp2p or over HTTPS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coordinator.service.deps import Deps
from coordinator.service.seeding import Seeder
from coordinator.service.speaking import HAVES, TOPICS
from coordinator.service.worker_neighbours import Neighbourhoods, worker_with
from coordinator.wire.signing import public_hex
from p2p.adapters.control.desk import Desk
from p2p.adapters.control.https import POLL, PUBLISH
from p2p.adapters.control.ports import Handler
from p2p.domain.control import RateLimit
from p2p.domain.control_board import Board, Poll, Publication
from p2p.domain.control_messages import PEERS, PeersRequest, may_say
from p2p.domain.manifest import JOB
from p2p.errors import ControlRefused

ASKED_RATE, ASKED_BURST = 2.0, 20.0  # questions a second of one worker, both ways together: an honest one asks every five seconds
WORKER_SLOTS = 2  # values of one worker under one topic: an honest one has one


class Answering(Protocol):
    """Whoever takes questions: the desk, and the network beside it."""

    def handle(self, protocol: str, handler: Handler) -> None:
        """Answer requests of this protocol."""
        ...


class _GuardedDesk(Desk):
    """Serves workers that may serve the jobs whose topics they name, and nobody else.

    Have-maps do not stand on the board: each would go to everyone who polls, and nothing but a display needs them.
    """

    def __init__(self, known: Neighbourhoods, *, coordinator: str) -> None:
        board = Board(keeper=coordinator, most_slots=WORKER_SLOTS)
        super().__init__(board, lambda topic, author, payload: may_say(topic, author, payload, coordinator=coordinator))
        self._known = known
        self._coordinator = coordinator

    async def post(self, author: str, path: str, body: bytes) -> bytes:
        """As `Desk.post`. Raises ControlRefused."""
        if path == POLL:
            await self._check(author, Poll.from_bytes(body).topics)
        if path == PUBLISH:
            said = Publication.from_bytes(body)
            await self._check(author, (said.topic,))
            if said.topic.endswith(f"/{HAVES}") and may_say(said.topic, author, said.payload, coordinator=self._coordinator):
                return b""
        return await super().post(author, path, body)

    async def _check(self, author: str, topics: Sequence[str]) -> None:
        for job_id in sorted({_job_of(topic) for topic in topics}):
            await self._known.check_key(author, job_id)


def _job_of(topic: str) -> str:
    job_id, _, what = topic.rpartition("/")
    if what not in TOPICS or not JOB.fullmatch(job_id):
        raise ControlRefused(f"{topic[:200]!r} is no topic: name one as JOB/WHAT, where WHAT is one of {', '.join(TOPICS)}")
    return job_id


def control_desk(deps: Deps, seeder: Seeder, net: Answering | None = None) -> Desk:
    """The board and the answers; `net` gives the same answers. Everything but the board is read off rows."""
    known = Neighbourhoods(deps, seeder)
    desk = _GuardedDesk(known, coordinator=public_hex(deps.key))
    limit = RateLimit(rate=ASKED_RATE, burst=ASKED_BURST)

    def answers(way: str) -> Handler:
        async def peers(asker: str, payload: bytes) -> bytes:
            if not limit.allows(asker, deps.clock.now()):
                raise ControlRefused(f"you ask more than {ASKED_RATE:g} times a second: ask again later")
            deps.control.asked[way] += 1
            request = PeersRequest.from_bytes(payload)
            return (await known.peers_of(await worker_with(deps, asker), request.job_id)).to_bytes()

        return peers

    desk.handle(PEERS, answers("https"))
    if net is not None:
        net.handle(PEERS, answers("libp2p"))
    return desk
