"""Brings pieces of a version that is still being encoded. What they cost is known; whether they are ever needed is not.

So it is modest: one transfer at a time, no more bytes than a snapshot may take, from the coordinator only, and over as soon as anything
else is fetched. The pieces lie in the same store, so a fetch finds them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from p2p.adapters.fetch import PieceSource, fetch
from p2p.adapters.piece_store import PieceStore
from p2p.domain.batches import Chain
from p2p.domain.manifest import Piece, most_edge_bytes
from p2p.errors import BatchRefused, SwarmError
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.domain.weights import Forthcoming
from worker_node.errors import CallError, TrustError

log = structlog.get_logger("worker")


class Prefetch:
    """The newest prefetch of a worker, under way or over."""

    def __init__(self, client: CoordinatorClient, store: PieceStore, coordinator_key: str) -> None:
        self._client = client
        self._store = store
        self._coordinator_key = coordinator_key
        self._task: asyncio.Task[None] | None = None
        self._transfer = ""
        self._pieces: set[str] = set()
        self._bytes = 0

    @property
    def pieces(self) -> frozenset[str]:
        """Digests that were brought, or are about to be: not to be swept while their version may still be announced."""
        return frozenset(self._pieces)

    async def start(self, news: Forthcoming, source: PieceSource, *, raw_bytes: int, epoch: Callable[[], int]) -> None:
        """Begin; what was under way before ends. `raw_bytes` of the base's tensors bound what is believed."""
        await self.stop()
        with suppress(OSError):  # what a failing disk does not let go now goes with the next fetch
            for digest in self._pieces:  # abandoned, unless the next fetch brings them again
                await asyncio.to_thread(self._store.remove, digest)
        self._transfer, self._pieces, self._bytes = news.transfer, set(), 0
        self._task = asyncio.create_task(self._run(news, source, raw_bytes, epoch), name=f"prefetch-{news.number}")

    async def stop(self) -> None:
        """End; what was brought stays."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def take_bytes(self, transfers: frozenset[str]) -> int:
        """What was fetched ahead of one of these transfers, once: it belongs to the version's price."""
        if self._transfer not in transfers:
            return 0
        taken, self._bytes, self._pieces = self._bytes, 0, set()
        return taken

    async def _run(self, news: Forthcoming, source: PieceSource, raw_bytes: int, epoch: Callable[[], int]) -> None:
        chain = Chain(news.transfer, self._coordinator_key, most_bytes=most_edge_bytes(raw_bytes))
        try:
            while not chain.is_complete:
                reply = await self._client.batches(news.job_id, news.transfer, since=chain.next_number, epoch=epoch())
                added = [piece for signed in reply.batches for piece in chain.accept(signed.text, signed.signature)]
                _check_base(chain, news)
                await self._bring(added, source)
        except CallError as error:  # published meanwhile, most likely
            log.debug("prefetch ended", transfer=news.transfer[:12], reason=str(error))
        except (SwarmError, TrustError, OSError) as error:
            log.info("prefetch given up", transfer=news.transfer[:12], reason=str(error))

    async def _bring(self, added: list[Piece], source: PieceSource) -> None:
        wanted = tuple(dict.fromkeys(added))
        fresh = [piece for piece in wanted if not self._store.has(piece.digest)]
        self._pieces |= {piece.digest for piece in fresh}
        if fresh:
            report = await fetch(fresh, [source], self._store)
            self._bytes += sum(report.bytes_by_source.values())


def _check_base(chain: Chain, news: Forthcoming) -> None:
    """The batches must be of the edge that the news were about."""
    first = chain.first
    if first is not None and (first.job_id, first.version, first.base_digest) != (news.job_id, news.number, news.base_digest):
        raise BatchRefused(f"transfer {news.transfer[:12]} is of version {first.version}, not of version {news.number}: ignore it")
