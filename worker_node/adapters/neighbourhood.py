"""Whom this worker dials: asked of the coordinator over the control plane, again and again, for the job of the moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection, Sequence

import structlog

from p2p.adapters.control.ports import Control
from p2p.domain.addresses import may_dial
from p2p.domain.control_messages import PEERS, Neighbour, PeersReply, PeersRequest
from p2p.domain.tickets import SEEDER
from p2p.errors import ControlError
from worker_node.adapters.peers import Peers

log = structlog.get_logger("peers")
EVERY_S, RARELY_S = 5.0, 30.0  # doubled from the one to the other while the answers stay the same
ANSWER_S = 10.0
FAMILIES = {"0.0.0.0": socket.AF_INET, "::": socket.AF_UNSPEC}  # noqa: S104 (compared, never bound): a seeder on all addresses of its host

_Places = frozenset[tuple[str, str, int, str]]  # of the peers to dial: id, host, port, certificate; they are named in any order


class Neighbourhood:
    """Keeps `peers` connected. `run` ends when it is cancelled."""

    def __init__(
        self,
        peers: Peers,
        control: Control,
        *,
        coordinator_key: str,
        coordinator_host: str,
        met: Callable[[Sequence[Neighbour]], None] = lambda _: None,
    ) -> None:
        """`coordinator_host`: the name or address literal under which it is reached. `met` is told whom the coordinator named."""
        self._met = met
        self._peers = peers
        self._control = control
        self._coordinator_key = coordinator_key
        self._coordinator_host = coordinator_host
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
        pause_s, before = EVERY_S, None
        while True:
            self._news.clear()
            found = await self._meet_for(self._job_id)
            pause_s = min(2 * pause_s, RARELY_S) if found is not None and found == before else EVERY_S
            before = found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()

    async def _meet_for(self, job_id: str | None) -> _Places | None:
        """Whom the coordinator named; None when it could not be asked, or there is no job."""
        if job_id is not None:
            return await self._meet(job_id)
        self._peers.meet_nobody()
        self._met(())
        return None

    async def _meet(self, job_id: str) -> _Places | None:
        """Whom the coordinator named; None when it could not be asked."""
        request = PeersRequest(job_id).to_bytes()
        try:
            reply = PeersReply.from_bytes(await self._control.request(self._coordinator_key, PEERS, request, timeout_s=ANSWER_S))
        except ControlError as error:
            log.debug("no neighbours", reason=str(error))
            self._peers.meet_nobody_new(job_id)
            return None
        found = [(peer, place) for peer in reply.peers if (place := await self._place_of(peer)) is not None]
        self._peers.meet(job_id, found)
        self._met(reply.peers)
        return frozenset((peer.worker_id, *place, peer.certificate_sha256) for peer, place in found)

    async def _place_of(self, peer: Neighbour) -> tuple[str, int] | None:
        """Where to dial a peer; None if it may not be dialled."""
        if peer.bulk is None:
            return None
        host, port = peer.bulk.host, peer.bulk.port
        if peer.worker_id == SEEDER:
            return await self._seeders_place(host, port)
        refusal = may_dial(host, port, self._networks)
        if refusal is not None:
            log.debug("peer not dialled", peer=peer.worker_id, reason=refusal)
            return None
        return host, port

    async def _seeders_place(self, host: str, port: int) -> tuple[str, int] | None:
        """The seeder is the coordinator's, whom we trust already, and on the coordinator's host if it listens on every address."""
        family = FAMILIES.get(host)
        if family is None:
            return host, port
        try:
            return await asyncio.to_thread(resolve, self._coordinator_host, family), port
        except OSError as error:
            log.debug("seeder not dialled", host=self._coordinator_host, reason=str(error))
            return None


def resolve(host: str, family: socket.AddressFamily) -> str:
    """The first address of a name. Raises OSError."""
    return str(socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)[0][4][0])
