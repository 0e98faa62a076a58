"""Which policy version to hold, fetch, swap in and drop. Identity of a version is (job, number, digest)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROOM_FOR_BASE = 2  # models that must still fit beside a base that is kept: the next version, and its pieces


@dataclass(frozen=True, slots=True)
class Version:
    """One published policy version."""

    job_id: str
    number: int
    digest: str

    def __str__(self) -> str:
        return f"version {self.number} ({self.digest[:8]})"


@dataclass(frozen=True, slots=True)
class Forthcoming:
    """A version that is being encoded against a base; `transfer` names the batches of its pieces."""

    job_id: str
    number: int
    base_digest: str
    transfer: str


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


def to_prefetch(shelf: Shelf, news: Sequence[Forthcoming], *, job_id: str | None, asked: str) -> Forthcoming | None:
    """The forthcoming version whose pieces to bring ahead: of the job served, on a base that is here, while nothing else is fetched.

    `asked` is the transfer asked for last. Nothing is lost when it is never announced: its pieces go with the next fetch.
    """
    if shelf.fetching is not None:
        return None
    stored = [version for version in shelf.stored if version.job_id == job_id]
    held, newest_held = {version.digest for version in stored}, max((version.number for version in stored), default=-1)
    usable = [one for one in news if one.job_id == job_id and one.base_digest in held and one.number > newest_held]
    newest = max(usable, key=lambda one: (one.number, one.transfer), default=None)
    return newest if newest is not None and newest.transfer != asked else None


def to_weigh(shelf: Shelf, target: Version | None) -> Version | None:
    """A version of the same job that is newer than the one being fetched: jumping to it may cost less than what is left."""
    running = shelf.fetching
    if target is None or running is None or target.job_id != running.job_id or target in shelf.stored:
        return None
    return target if target.number > running.number else None


def to_swap(shelf: Shelf, target: Version | None) -> Version | None:
    """The stored version to put into the engine now: the target, if it is stored and not loaded already."""
    if target is None or target == shelf.loaded or target not in shelf.stored:
        return None
    return target


def to_drop(shelf: Shelf, target: Version | None, *, in_use: Iterable[Version] = ()) -> frozenset[Version]:
    """Stored versions that nothing needs: not loaded, not the target, not named in `in_use`."""
    kept = {shelf.loaded, target, *in_use}
    return frozenset(version for version in shelf.stored if version not in kept)


def to_set_aside(unneeded: Iterable[Version], bases: Iterable[Version], *, left: Iterable[Version]) -> frozenset[Version]:
    """Of versions that nothing needs, those to keep all the same: a job's base, while something newer of the job is left here."""
    known = frozenset(bases)
    newest = {one.job_id: one.number for one in sorted(left, key=lambda one: one.number)}
    return frozenset(one for one in unneeded if one in known and newest.get(one.job_id, one.number) > one.number)


def may_keep(*, nbytes: int, free: int) -> bool:
    """Whether a disk with so many bytes `free` can do without the `nbytes` of a base: the next fetches must not fail for it."""
    return free >= ROOM_FOR_BASE * nbytes
