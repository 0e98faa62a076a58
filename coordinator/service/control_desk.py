"""What the coordinator answers on the control plane, whether a question came over libp2p or over HTTPS."""

from __future__ import annotations

from typing import Protocol

from coordinator.domain.model import Worker, WorkerState
from coordinator.service.deps import Deps
from coordinator.service.seeding import Seeder
from coordinator.service.worker_neighbours import peers_of
from coordinator.wire.signing import public_hex
from p2p.adapters.control.desk import Desk
from p2p.adapters.control.ports import Handler
from p2p.domain.control import RateLimit
from p2p.domain.control_board import Board
from p2p.domain.control_messages import PEERS, PeersRequest, may_say
from p2p.errors import ControlRefused

ASKED_RATE, ASKED_BURST = 2.0, 20.0  # questions a second of one worker, both ways together: an honest one asks every five seconds


class Answering(Protocol):
    """Whoever takes questions: the desk, and the network beside it."""

    def handle(self, protocol: str, handler: Handler) -> None:
        """Answer requests of this protocol."""
        ...


def control_desk(deps: Deps, seeder: Seeder, net: Answering | None = None) -> Desk:
    """The board and the answers; `net` gives the same answers. Everything but the board is read off rows."""
    coordinator = public_hex(deps.key)
    desk = Desk(Board(), lambda _topic, author, payload: may_say(author, payload, coordinator=coordinator))
    limit = RateLimit(rate=ASKED_RATE, burst=ASKED_BURST)

    def answers(way: str) -> Handler:
        async def peers(asker: str, payload: bytes) -> bytes:
            if not limit.allows(asker, deps.clock.now()):
                raise ControlRefused(f"you ask more than {ASKED_RATE:g} times a second: ask again later")
            deps.control.asked[way] += 1
            request = PeersRequest.from_bytes(payload)
            return (await peers_of(deps, seeder, await _worker(deps, asker), request.job_id)).to_bytes()

        return peers

    desk.handle(PEERS, answers("https"))
    if net is not None:
        net.handle(PEERS, answers("libp2p"))
    return desk


async def _worker(deps: Deps, public_key: str) -> Worker:
    """The worker with this key (hex): the transport proved it. Raises ControlRefused."""
    found = await deps.store.read(lambda reader: reader.select(Worker, public_key=public_key))
    live = [worker for worker in found if worker.state is not WorkerState.GONE]
    if not live:
        raise ControlRefused("this key belongs to no worker that is here: join first")
    return live[0]
