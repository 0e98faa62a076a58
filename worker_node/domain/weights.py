"""Which policy version to hold, fetch, swap in and drop. Identity of a version is (job, number, digest)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Version:
    """One published policy version."""

    job_id: str
    number: int
    digest: str

    def __str__(self) -> str:
        return f"version {self.number} ({self.digest[:8]})"


@dataclass(frozen=True, slots=True)
class Shelf:
    """What this worker has. `stored` lies verified and whole on disk; `loaded` is in the engine."""

    stored: frozenset[Version] = field(default_factory=frozenset)
    loaded: Version | None = None
    fetching: Version | None = None


def choose(notices: Sequence[Version], *, current_job: str | None, busy: bool) -> Version | None:
    """The version this worker should serve.

    It stays with the job it has loaded while the coordinator still names that job or while work is in hand (an engine
    holds one model); otherwise it takes the first job named.
    """
    for notice in notices:
        if notice.job_id == current_job:
            return notice
    if busy or not notices:
        return None
    return notices[0]


def to_fetch(shelf: Shelf, target: Version | None, *, given_up: frozenset[Version]) -> Version | None:
    """The version to start fetching now: the target unless it is here, given up, or another fetch runs (it is finished first)."""
    if target is None or shelf.fetching is not None:
        return None
    if target in shelf.stored or target in given_up:
        return None
    return target


def to_swap(shelf: Shelf, target: Version | None) -> Version | None:
    """The stored version to put into the engine now: the target, if it is stored and not loaded already."""
    if target is None or target == shelf.loaded or target not in shelf.stored:
        return None
    return target


def to_drop(shelf: Shelf, target: Version | None, *, in_use: Iterable[Version] = ()) -> frozenset[Version]:
    """Stored versions that nothing needs: not loaded, not the target, not named in `in_use`."""
    kept = {shelf.loaded, target, *in_use}
    return frozenset(version for version in shelf.stored if version not in kept)
