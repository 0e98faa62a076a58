"""The coordinator as a source of pieces: it has them all, at the price of its uplink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2p.adapters.piece_store import PieceStore
from p2p.domain.manifest import Piece
from p2p.errors import FetchFailed, PieceAbsent, PieceCorrupt
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.downlink import Downlink
from worker_node.errors import CallError

ORIGIN = "coordinator"
_NOT_NOW = ("unknown_piece", "http_404", "busy", "too_many_requests")  # not there, or too busy: no fault of the source


class CoordinatorPieces:
    """A PieceSource. What a peer brought since the fetch began is read from the store, not asked for."""

    def __init__(
        self, client: CoordinatorClient, job_id: str, epoch: Callable[[], int], store: PieceStore, downlink: Downlink
    ) -> None:
        """`epoch` tells the session of the moment: a fetch may outlive the one it began in."""
        self._client = client
        self._job_id = job_id
        self._epoch = epoch
        self._store = store
        self._downlink = downlink
        self.bytes = 0  # that came from the coordinator

    @property
    def name(self) -> str:
        return ORIGIN

    async def read(self, piece: Piece) -> bytes:
        here = await asyncio.to_thread(self._stored, piece)
        if here is not None:
            return here
        try:
            with self._downlink.over_https():
                data = await self._client.piece(
                    self._job_id,
                    piece.digest,
                    piece.size,
                    epoch=self._epoch(),
                    pace=self._downlink.pace,
                    slack_s=self._downlink.slack_s(piece.size),
                )
        except CallError as error:
            kind = PieceAbsent if error.code in _NOT_NOW else FetchFailed
            raise kind(f"{ORIGIN}: {error}") from error
        self.bytes += len(data)
        return data

    def _stored(self, piece: Piece) -> bytes | None:
        try:
            return self._store.read(piece.digest)
        except (KeyError, PieceCorrupt, OSError):
            return None
