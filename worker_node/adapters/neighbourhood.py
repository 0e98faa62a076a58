"""Whom this worker dials: asked of the coordinator over the control plane, again and again, for the job of the moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection

import structlog

from p2p.adapters.control.ports import Control
from p2p.domain.addresses import may_dial
from p2p.domain.control_messages import PEERS, Neighbour, PeersReply, PeersRequest, Place
from p2p.errors import ControlError
from worker_node.adapters.peers import SEEDER, Peers

log = structlog.get_logger("peers")
EVERY_S = 5.0
ANSWER_S = 10.0
UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 (compared, never bound): the seeder listens on every address of the coordinator's host


class Neighbourhood:
    """Keeps `peers` connected. `run` ends when it is cancelled."""

    def __init__(self, peers: Peers, control: Control, *, coordinator_key: str, coordinator_host: str) -> None:
        """`coordinator_host`: the name or address literal under which the coordinator is reached."""
        self._peers = peers
        self._control = control
        self._coordinator_key = coordinator_key
        self._coordinator_host = coordinator_host
        self._coordinator_address: str | None = None
        self._job_id: str | None = None
        self._networks: tuple[str, ...] = ()
        self._news = asyncio.Event()

    def work_for(self, job_id: str | None, networks: Collection[str]) -> None:
        """The job whose weights are exchanged from now on, and the private networks that may be dialled."""
        if (job_id, tuple(networks)) != (self._job_id, self._networks):
            self._job_id, self._networks = job_id, tuple(networks)
            self._news.set()

    async def run(self) -> None:
        """Ask and dial."""
        while True:
            self._news.clear()
            if self._job_id is not None:
                await self._meet(self._job_id)
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _meet(self, job_id: str) -> None:
        request = PeersRequest(job_id).to_bytes()
        try:
            reply = PeersReply.from_bytes(await self._control.request(self._coordinator_key, PEERS, request, timeout_s=ANSWER_S))
            self._coordinator_address = self._coordinator_address or await asyncio.to_thread(_resolve, self._coordinator_host)
        except (ControlError, OSError) as error:
            log.debug("no neighbours", reason=str(error))
            return
        found = [(peer, host) for peer in reply.peers if (host := self._host_of(peer)) is not None]
        self._peers.meet(job_id, found)

    def _host_of(self, peer: Neighbour) -> tuple[str, int] | None:
        """Where to dial a peer; None if it may not be dialled. The seeder is beside the coordinator, whom we trust already."""
        place: Place | None = peer.bulk
        if place is None:
            return None
        if peer.worker_id == SEEDER:
            host = self._coordinator_address if place.host in UNSPECIFIED else place.host
            return None if host is None else (host, place.port)
        refusal = may_dial(place.host, place.port, self._networks)
        if refusal is not None:
            log.debug("peer not dialled", peer=peer.worker_id, reason=refusal)
            return None
        return place.host, place.port


def _resolve(host: str) -> str:
    """The first address of a name. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
