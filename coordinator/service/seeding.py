"""Which edges the seeder offers to the swarm, and the word that gets them there.

Level-triggered: what the rows and the fetches of now ask for is compared with what is seeded. Batches of an edge that is still being encoded
go to the seeder directly (`Seeder.batch`), before there is a row; the next look finds them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from coordinator.domain.model import EdgeRow, Job, JobState, Publication, PublicationState
from coordinator.domain.states import TERMINAL
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader
from coordinator.wire.messages import PeerAddress
from p2p.domain.batches import text_hash
from p2p.domain.batching import edge_batches
from p2p.domain.hops import Hop
from p2p.domain.signing import sign_batch

log = structlog.get_logger()
SEEDER = "seeder"  # its name as a peer: tickets name it, and no worker id looks like it
NEWEST = 2  # versions whose edges are always offered
LOOK_S = 2.0
FETCH_PATIENCE_S = 900.0


class Seeder(Protocol):
    """The bulk node beside the coordinator."""

    @property
    def address(self) -> PeerAddress | None:
        """Where it listens; None while it does not run."""
        ...

    @property
    def uplink(self) -> float:
        """Its measured upload rate, bytes a second; 0 when not known."""
        ...

    def seeded(self) -> frozenset[str]:
        """Transfers that it offers whole, or of which batches came and the last one is still to come."""
        ...

    def batch(self, text: str, signature: str) -> None:
        """The next batch of a transfer; its pieces are in the store."""
        ...

    def retire(self, transfer: str) -> None:
        """Offer it no more."""
        ...


@dataclass(frozen=True, slots=True)
class NoSeeder:
    """Where none runs: workers fetch over HTTPS."""

    address: None = None
    uplink: float = 0.0

    def seeded(self) -> frozenset[str]:
        return frozenset()

    def batch(self, text: str, signature: str) -> None:
        """Nobody takes it."""

    def retire(self, transfer: str) -> None:
        """Nothing is offered."""


async def keep_seeding(deps: Deps, seeder: Seeder) -> None:
    """Look at the rows now and then, and at once when a job changed."""
    documents = Documents()
    with deps.wake.watch("jobs") as watch:
        while True:
            try:
                await seed(deps, seeder, documents)
            except ConnectionError:
                raise  # the store has ended
            except Exception:
                log.exception("seeding_failed")
            await watch.wait(LOOK_S)


class Documents:
    """Transfers by edge, and the transfers that no row knows yet: an edge's document is parsed once."""

    def __init__(self) -> None:
        self._transfers: dict[tuple[str, str], str | None] = {}
        self._unknown: dict[str, int] = {}

    def transfer_of(self, row: EdgeRow) -> str | None:
        """The transfer that carries the edge."""
        key = (row.job_id, row.id)
        if key not in self._transfers:
            self._transfers[key] = Hop.from_json(row.document).edge.transfer
        return self._transfers[key]

    def keep(self, rows: Sequence[EdgeRow]) -> None:
        """Forget edges that are not among these."""
        keys = {(row.job_id, row.id) for row in rows}
        self._transfers = {key: transfer for key, transfer in self._transfers.items() if key in keys}

    def abandoned(self, seeded: frozenset[str], known: frozenset[str], *, looks: int) -> list[str]:
        """Seeded transfers that no row names for so many looks in a row: their encoding was given up."""
        self._unknown = {transfer: self._unknown.get(transfer, 0) + 1 for transfer in seeded - known}
        return [transfer for transfer, count in self._unknown.items() if count >= looks]


ABANDONED_LOOKS = 900  # half an hour of looks: no encoding takes longer


async def seed(deps: Deps, seeder: Seeder, documents: Documents) -> None:
    """One look: offer what is wanted and not offered, retire what is offered and not wanted."""
    rows, wanted = await deps.store.read(lambda reader: _edges(reader, deps))
    documents.keep(rows)
    seeded = seeder.seeded()
    named = {transfer: row for row in rows if (transfer := documents.transfer_of(row)) is not None}
    for transfer, row in named.items():
        if row.id in wanted and transfer not in seeded:
            _offer(deps, seeder, transfer, row)
    stale = [transfer for transfer in seeded if transfer in named and named[transfer].id not in wanted]
    for transfer in [*stale, *documents.abandoned(seeded, frozenset(named), looks=ABANDONED_LOOKS)]:
        seeder.retire(transfer)


def _offer(deps: Deps, seeder: Seeder, transfer: str, row: EdgeRow) -> None:
    """Tell the edge's batches anew, as the encoder told them."""
    hop = Hop.from_json(row.document)
    told = [batch.to_json() for batch in edge_batches(hop.job_id, hop.version, hop.edge)]
    if text_hash(told[0]) != transfer:
        log.warning("transfer_not_reproduced", job=row.job_id, version=row.version, transfer=transfer[:16])
        return
    for text in told:
        seeder.batch(text, sign_batch(deps.key, text))


async def _edges(reader: Reader, deps: Deps) -> tuple[list[EdgeRow], set[str]]:
    """Edges of live jobs, and the ids of those to offer: to the newest versions, and those by which workers fetch now."""
    jobs = await reader.select(Job, state=[state for state in JobState if state not in TERMINAL[JobState]])
    rows: list[EdgeRow] = []
    wanted: set[str] = set()
    for job in jobs:
        edges = await reader.select(EdgeRow, job_id=job.id)
        public = await reader.select(
            Publication, job_id=job.id, state=PublicationState.PUBLISHED, order_by="-version", limit=NEWEST
        )
        newest = {publication.digest for publication in public}
        wanted |= {row.id for row in edges if row.digest in newest and row.encoding != "raw"}
        wanted |= deps.presence.edges_in_use(job.id, since=deps.clock.now() - FETCH_PATIENCE_S)
        rows += edges
    return rows, wanted
