"""Law 3 and retention: what is public, what is confirmed, and whether those who need old bits still find them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from coordinator.domain.model import (
    EdgeRow,
    Group,
    GroupState,
    Holding,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Rollout,
    Worker,
    WorkerState,
)
from p2p.domain.manifest import Manifest
from p2p.domain.signing import check_manifest
from p2p.errors import ManifestError
from worker_node.domain.weights import Version

if TYPE_CHECKING:
    from simulator.faults.worker import SimWorker
    from simulator.faults.world import World


class Fetch(NamedTuple):
    """A fetch under way: in which lives of both ends it began."""

    worker_life: int
    host_life: int


class Weights:
    """Looks at publications, holdings and edges, and hears of fetches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables
        self._fetches: dict[tuple[str, Version], Fetch] = {}

    def publication(self, before: Publication | None, after: Publication) -> None:
        """Law 3: what is public is what a learner held, described by a signed manifest of exactly that."""
        if after.state is PublicationState.ROLLED_BACK:
            self._stained(after)
        elif after.state is PublicationState.RETIRED and before is not None and before.state is PublicationState.PUBLISHED:
            self._retired(after)
        if after.state is not PublicationState.PUBLISHED or (before is not None and before.state is after.state):
            return
        if after.digest not in self._world.truth.weights.get(after.version, []):
            self._broke(f"law 3: version {after.version} ({after.digest[:8]}) is public and no learner ever held it")
        same = [
            p for p in self._tables[Publication].values() if p.version == after.version and p.state is PublicationState.PUBLISHED
        ]
        if len(same) > 1:
            self._broke(f"law 2: version {after.version} is public with {len(same)} digests")
        try:
            check_manifest(self._world.public_key, after.manifest, after.signature)
            manifest = Manifest.from_json(after.manifest)
        except (ManifestError, ValueError) as error:
            self._broke(f"law 3: the manifest of version {after.version} is refused: {error}")
            return
        if (manifest.version, manifest.digest) != (after.version, after.digest):
            self._broke(f"law 3: the manifest of version {after.version} describes {manifest.version} ({manifest.digest[:8]})")
        if not {piece.digest for piece in manifest.all_pieces()} <= self._world.truth.pieces:
            self._broke(f"law 3: version {after.version} is public and its pieces are not on disk")

    def _retired(self, old: Publication) -> None:
        """Retention is by lease, and by what workers hold as their newest."""
        newest: dict[str, int] = {}
        for holding in self._tables[Holding].values():
            newest[holding.worker_id] = max(holding.version, newest.get(holding.worker_id, -1))
        if old.version in newest.values():
            self._broke(f"retention: version {old.version} was retired and a worker holds nothing newer")
        if any(x.version == old.version and x.state is LeaseState.LIVE for x in self._tables[Lease].values()):
            self._broke(f"retention: version {old.version} was retired and is leased")

    def _stained(self, lost: Publication) -> None:
        """Law 2: nothing that a lost digest made goes on."""
        if any(h.digest == lost.digest for h in self._tables[Holding].values()):
            self._broke(f"law 2: version {lost.version} was rolled back and is still held")
        if any(x.digest == lost.digest and x.state is LeaseState.LIVE for x in self._tables[Lease].values()):
            self._broke(f"law 2: version {lost.version} was rolled back and is still leased")
        for row in self._tables[Rollout].values():
            if lost.digest in row.digests.values() and self._tables[Group][row.group_id].state in (
                GroupState.ISSUED,
                GroupState.READY,
            ):
                self._broke(f"law 2: version {lost.version} was rolled back and group {row.group_number} still holds tokens of it")

    def confirmed(self, before: Holding | None, holding: Holding) -> None:
        """Only what the engine really holds is confirmed."""
        if before is not None:
            return
        worker = self._world.worker(holding.worker_id)
        really = worker.served.get(holding.version)
        if really is not None and really != holding.digest:
            self._broke(
                f"law 3: {worker.name} was confirmed for version {holding.version} ({holding.digest[:8]}), its engine held {really[:8]}"
            )

    def ways(self) -> None:
        """Retention: whoever holds nothing comes to the newest version over edges that are kept, also in the middle of a replay."""
        public = [p for p in self._tables[Publication].values() if p.state is PublicationState.PUBLISHED]
        newest = max(public, key=lambda one: one.version, default=None)
        edges = list(self._tables[EdgeRow].values())
        reached: set[str | None] = {None}
        while more := {edge.digest for edge in edges if edge.base_digest in reached} - reached:
            reached |= more
        if newest is not None and newest.digest not in reached:
            self._broke(f"retention: nothing leads to version {newest.version} any more for one that holds nothing")

    def fetch_begins(self, worker: SimWorker, version: Version, host_life: int) -> None:
        """The coordinator told it a path."""
        self._fetches[worker.id, version] = Fetch(worker.life, host_life)

    def piece_gone(self, worker: SimWorker, version: Version, piece: str) -> None:
        """Retention: what a live worker was told to fetch stays, unless the version was rolled back or the coordinator crashed."""
        fetch = self._fetches.get((worker.id, version))
        row = self._tables[Publication].get((version.job_id, version.number, version.digest))
        told_now = fetch is not None and fetch == Fetch(worker.life, self._world.host.life)
        public = row is not None and row.state is PublicationState.PUBLISHED
        listed = worker.id in self._tables[Worker] and self._tables[Worker][worker.id].state is not WorkerState.GONE
        if told_now and public and listed and not self._world.has_ended:
            self._broke(f"retention: piece {piece[:8]} of {version} went while {worker.name} fetches it")

    def _broke(self, words: str) -> None:
        self._world.broke(words)
