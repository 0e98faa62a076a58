"""Which edges the seeder offers to the swarm, and the word that gets them there.

Level-triggered: what the rows and the fetches of now ask for is compared with what is seeded. Batches of an edge that is still being encoded
go to the seeder directly (`Seeder.batch`), before there is a row; the next look finds them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
ABANDONED_S = 60.0  # between an encoding and its row, or its next try, lies less


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

    def seeded(self) -> Mapping[str, bool]:
        """Transfers of which batches came, and whether the last one did."""
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

    def seeded(self) -> Mapping[str, bool]:
        return {}

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
    """What was learned of edges and transfers in earlier looks: an edge's document is parsed once."""

    def __init__(self) -> None:
        self._transfers: dict[tuple[str, str], str | None] = {}
        self._unknown_since: dict[str, float] = {}

    def transfer_of(self, row: EdgeRow) -> str | None:
        """The transfer that carries the edge; None if none does."""
        key = (row.job_id, row.id)
        if key not in self._transfers:
            self._transfers[key] = Hop.from_json(row.document).edge.transfer
        return self._transfers[key]

    def unfit(self, row: EdgeRow) -> None:
        """The edge's batches cannot be told again: no transfer carries it."""
        self._transfers[row.job_id, row.id] = None

    def keep(self, rows: Sequence[EdgeRow]) -> None:
        """Forget edges that are not among these."""
        keys = {(row.job_id, row.id) for row in rows}
        self._transfers = {key: transfer for key, transfer in self._transfers.items() if key in keys}

    def abandoned(self, unknown: Collection[str], *, now: float) -> list[str]:
        """Those of the transfers that nobody knew for ABANDONED_S: their edge is gone, or was never made whole."""
        self._unknown_since = {transfer: self._unknown_since.get(transfer, now) for transfer in unknown}
        return [transfer for transfer, since in self._unknown_since.items() if now - since >= ABANDONED_S]


async def seed(deps: Deps, seeder: Seeder, documents: Documents) -> None:
    """One look: offer what is wanted and not offered whole, retire what is offered and not wanted."""
    rows, wanted = await deps.store.read(lambda reader: _edges(reader, deps))
    documents.keep(rows)
    named = {transfer: row for row in rows if (transfer := documents.transfer_of(row)) is not None}
    seeded = seeder.seeded()
    for transfer, row in named.items():
        if row.id in wanted and not seeded.get(transfer) and not _offer(deps, seeder, transfer, row):
            log.warning("transfer_not_reproduced", job=row.job_id, version=row.version, transfer=transfer[:16])
            documents.unfit(row)
    stale = [transfer for transfer in seeded if transfer in named and named[transfer].id not in wanted]
    unknown = [transfer for transfer in seeded if transfer not in named and not deps.transfers.is_open(transfer)]
    for transfer in [*stale, *documents.abandoned(unknown, now=deps.clock.now())]:
        seeder.retire(transfer)


def _offer(deps: Deps, seeder: Seeder, transfer: str, row: EdgeRow) -> bool:
    """Tell the edge's batches anew, as the encoder told them; False if they come out otherwise."""
    hop = Hop.from_json(row.document)
    told = [batch.to_json() for batch in edge_batches(hop.job_id, hop.version, hop.edge)]
    if text_hash(told[0]) != transfer:
        return False
    for text in told:
        seeder.batch(text, sign_batch(deps.key, text))
    return bool(seeder.seeded().get(transfer))


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
