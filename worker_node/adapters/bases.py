"""The versions that low-rank edges begin at: which one each job has, and which lie here although nothing serves them.

A worker that keeps its job's base comes from it to any other version for the bytes of the adapters, however long it was away.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from coordinator.wire.messages import BaseVersion
from worker_node.domain import weights
from worker_node.domain.weights import Version


class Bases:
    """Knows what the coordinator called a base; `root` is on the disk that must have room."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._named: dict[str, Version] = {}  # by job
        self.aside: frozenset[Version] = frozenset()  # kept here, unknown to the session

    def named(self, job_id: str, base: BaseVersion | None) -> None:
        """A manifest came, and with it the job's base or none."""
        self._named.pop(job_id, None)
        if base is not None:
            self._named[job_id] = Version(job_id, base.version, base.digest)

    def of(self, job_id: str) -> Version | None:
        """The base of a job."""
        return self._named.get(job_id)

    def has_room(self, nbytes: int) -> bool:
        """Whether the disk takes a base of so many bytes beside what is fetched next."""
        return weights.may_keep(nbytes=nbytes, free=shutil.disk_usage(self._root).free)

    def found(self, stored: Collection[Version]) -> None:
        """What lay on disk at the start: a base is set aside where something newer of its job is there."""
        self.aside = weights.to_set_aside(stored, self._named.values(), left=stored)

    def dropped(self, versions: Iterable[Version], left: Collection[Version], *, nbytes: int) -> frozenset[Version]:
        """Which of these are kept all the same: bases of jobs that something is `left` of, while the disk has room for `nbytes`."""
        candidates = frozenset(versions) | self.aside
        bases = self._named.values() if self.has_room(nbytes) else ()
        self.aside = weights.to_set_aside(candidates, bases, left=left)
        return self.aside

    def set_aside(self, version: Version) -> None:
        """It was brought only to be kept."""
        self.aside |= {version}

    def taken_back(self, version: Version) -> None:
        """The session fetched it, and decides about it again."""
        self.aside -= {version}
