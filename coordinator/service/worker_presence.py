"""When each worker was last heard, between two flushes to the rows.

A beat must not cost a row write. What is kept here is only liveness and the worker's own figures; losing it in a crash
changes no decision, because after a restart every worker is given a grace (`sweeping.recover`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Heard:
    """The newest signs of life of one worker."""

    worker_id: str
    epoch: int
    at: float
    tokens_per_s: float | None = None  # None: no beat since the last flush named it
    activity: str | None = None
    held: frozenset[tuple[str, int, str]] = frozenset()  # (job, version, digest) of the newest beat
    excused_until: float = 0.0  # silence before this does not count: the coordinator itself was away


class Presence:
    """Signs of life by worker id. Holds one entry for each worker that is not gone."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}
        self._unsaved: dict[str, None] = {}
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
