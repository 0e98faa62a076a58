"""When each worker was last heard, between two flushes to the rows.

A beat must not cost a row write. What is kept here is only liveness and the worker's own figures; losing it in a crash
changes no decision, because after a restart every worker is given a grace (`sweeping.recover`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

UPLINK_GUESS = 12.5e6  # bytes a second
FETCH_PATIENCE_S = 900.0  # a fetch that showed no sign for so long keeps nothing any more


@dataclass(frozen=True, slots=True)
class Heard:
    """The newest signs of life of one worker."""

    worker_id: str
    epoch: int
    at: float
    tokens_per_s: float | None = None  # None: no beat since the last flush named it
    activity: str | None = None
    control: str = ""  # which way its control messages take, in words
    uplink: float = 0.0  # bytes a second, as it measured; 0: not known
    held: frozenset[tuple[str, int, str]] = frozenset()  # (job, version, digest) of the newest beat
    excused_until: float = 0.0  # silence before this does not count: the coordinator itself was away


@dataclass(frozen=True, slots=True)
class _Fetch:
    """What a worker was told to fetch, and the newest sign that it does."""

    job_id: str
    version: int
    edges: frozenset[str]
    at: float


class Presence:
    """Signs of life by worker id. Holds one entry for each worker that is not gone."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}
        self._unsaved: dict[str, None] = {}
        self._fetching: dict[str, _Fetch] = {}  # by worker id
        self._asked: dict[str, tuple[str, float]] = {}  # by worker id: of which job last, and when
        self._confirmed: dict[tuple[str, str], int] = {}  # by worker and job: the newest version
        self.saved_at = 0.0

    def hear(self, heard: Heard) -> None:
        """A beat, or a join (which starts the entry anew)."""
        self._heard[heard.worker_id] = heard
        self._unsaved[heard.worker_id] = None

    def remember(self, heard: Heard) -> None:
        """Take an entry over from the rows; there is nothing to save."""
        self._heard[heard.worker_id] = heard

    def touch(self, worker_id: str, *, epoch: int, at: float) -> None:
        """Any signed request is a sign of life."""
        known = self._heard.get(worker_id)
        self.hear(Heard(worker_id, epoch, at) if known is None or known.epoch != epoch else replace(known, at=at))

    def get(self, worker_id: str) -> Heard | None:
        """The newest signs of life, or None when the worker is not present."""
        return self._heard.get(worker_id)

    def forget(self, worker_id: str) -> None:
        """The worker left or was lost."""
        self._heard.pop(worker_id, None)
        self._unsaved.pop(worker_id, None)
        self._fetching.pop(worker_id, None)
        self._asked.pop(worker_id, None)
        for key in [key for key in self._confirmed if key[0] == worker_id]:
            del self._confirmed[key]

    def asks(self, worker_id: str, job_id: str, version: int, *, at: float) -> None:
        """The worker asked the job for work. With older weights than it confirmed it does not wait for work: it avoids it."""
        if version >= self._confirmed.get((worker_id, job_id), version):
            self._asked[worker_id] = (job_id, at)

    def asked_in_vain(self, worker_id: str, job_id: str) -> None:
        """Its last request was one that no work can answer."""
        if self._asked.get(worker_id, ("", 0.0))[0] == job_id:
            del self._asked[worker_id]

    def asked_at(self, worker_id: str, job_id: str) -> float:
        """When the worker last asked for work, if it was this job's; 0: not since it is present."""
        job, at = self._asked.get(worker_id, ("", 0.0))
        return at if job == job_id else 0.0

    def fetches(self, worker_id: str, job_id: str, version: int, *, at: float, edges: frozenset[str] = frozenset()) -> None:
        """The worker was given the manifest of a version and a path of `edges` (ids): their pieces stay while it fetches them."""
        self._fetching[worker_id] = _Fetch(job_id, version, edges, at)

    def goes_on_fetching(self, worker_id: str, *, at: float) -> None:
        """It asked for a piece."""
        known = self._fetching.get(worker_id)
        if known is not None:
            self._fetching[worker_id] = replace(known, at=at)

    def has_fetched(self, worker_id: str, job_id: str, version: int) -> None:
        """It confirmed that version, or a newer one."""
        self._confirmed[worker_id, job_id] = max(version, self._confirmed.get((worker_id, job_id), version))
        known = self._fetching.get(worker_id)
        if known is not None and known.job_id == job_id and known.version <= version:
            del self._fetching[worker_id]

    def being_fetched(self, job_id: str, *, since: float) -> frozenset[int]:
        """Versions of the job that some worker fetches, with a sign of it after `since`."""
        return frozenset(one.version for one in self._fetching.values() if one.job_id == job_id and one.at > since)

    def edges_in_use(self, job_id: str, *, since: float) -> frozenset[str]:
        """Ids of the edges by which some worker fetches, with a sign of it after `since`."""
        return frozenset(edge for one in self._fetching.values() if one.job_id == job_id and one.at > since for edge in one.edges)

    def fetchers(self, job_id: str, *, since: float) -> frozenset[str]:
        """Ids of the workers that fetch a version of the job, with a sign of it after `since`."""
        return frozenset(worker for worker, one in self._fetching.items() if one.job_id == job_id and one.at > since)

    def median_uplink(self) -> float:
        """Of the workers that measured theirs, bytes a second: about the rate at which a version spreads. UPLINK_GUESS if none did.

        The median, because rates are claims: one worker's changes little.
        """
        known = [one.uplink for one in self._heard.values() if one.uplink > 0]
        return median(known) if known else UPLINK_GUESS

    def all(self) -> Iterable[Heard]:
        """Every present worker."""
        return list(self._heard.values())

    @property
    def unsaved(self) -> int:
        """How many workers were heard since their rows were last written."""
        return len(self._unsaved)

    def take_unsaved(self, most: int) -> list[Heard]:
        """Up to `most` entries to write to rows; they count as saved from here on."""
        taken = list(self._unsaved)[:most]
        for worker_id in taken:
            del self._unsaved[worker_id]
        return [self._heard[worker_id] for worker_id in taken]

    def lost_at(self, heard: Heard, lost_after_s: float) -> float:
        """When the worker counts as lost unless it is heard again."""
        return max(heard.at + lost_after_s, heard.excused_until)

    def earliest_loss(self, lost_after_s: float) -> float | None:
        """The next possible loss of a worker."""
        return min((self.lost_at(heard, lost_after_s) for heard in self._heard.values()), default=None)
