"""The leases in hand: which slots wait, run, are finished or under way to the coordinator.

A finished completion leaves only when the coordinator answered for its slot, or when its lease is dropped with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random

from coordinator.wire.messages import Lease
from worker_node.domain.backoff import Backoff
from worker_node.domain.events import GrantedLease
from worker_node.domain.generation import Completion, GenerationRequest
from worker_node.domain.instructions import AbortGeneration, SubmitCompletions
from worker_node.domain.weights import Version

MOST_TOKENS_A_SUBMISSION = 1 << 20
MOST_COMPLETIONS_A_SUBMISSION = 4096


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion and the digests of the versions that made it, as they were when it finished."""

    completion: Completion
    made_by: frozenset[Version]
    at: float


@dataclass(slots=True)
class LeaseInHand:
    """One lease and where its slots are. A slot is in at most one of the collections."""

    lease: Lease
    ends_at: float
    backoff: Backoff
    waiting: set[int]
    running: set[int] = field(default_factory=set)
    finished: dict[int, Finished] = field(default_factory=dict)
    flying: tuple[int, ...] = ()  # slots of `finished` in the submission now in flight
    retry_at: float = -inf

    @property
    def is_over(self) -> bool:
        """Whether nothing of the lease is left to do."""
        return not (self.waiting or self.running or self.finished)

    @property
    def unfinished(self) -> int:
        """Slots that occupy the engine or will."""
        return len(self.waiting) + len(self.running)

    def ready(self, confirmed: frozenset[Version]) -> list[int]:
        """Finished slots that may be submitted: every version in them was confirmed."""
        return sorted(slot for slot, done in self.finished.items() if done.made_by <= confirmed)

    def submit_at(self, slots: list[int], coalesce_s: float) -> float:
        """When these ready slots should leave: at once when the lease has no more to come, else after a short wait."""
        if not slots or self.flying:
            return inf
        if not self.unfinished:
            return self.retry_at
        return max(self.retry_at, min(self.finished[slot].at for slot in slots) + coalesce_s)


class Work:
    """All leases in hand, by id."""

    def __init__(self, *, coalesce_s: float, overdue_s: float, retry_first_s: float, retry_most_s: float, rng: Random) -> None:
        self._coalesce_s = coalesce_s
        self._overdue_s = overdue_s
        self._retry = (retry_first_s, retry_most_s)
        self._rng = rng
        self._leases: dict[str, LeaseInHand] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """Leases in hand, oldest first."""
        return tuple(self._leases)

    @property
    def unfinished(self) -> int:
        """Slots that occupy the engine or will."""
        return sum(lease.unfinished for lease in self._leases.values())

    @property
    def backlog(self) -> int:
        """Finished completions that the coordinator has not answered for."""
        return sum(len(lease.finished) for lease in self._leases.values())

    @property
    def aborts_on_update(self) -> bool:
        """Whether any lease in hand demands that running completions end at an update."""
        return any(held.lease.on_update == "abort" for held in self._leases.values())

    def take(self, granted: GrantedLease) -> None:
        """Take a lease in hand; a lease already here is left as it is (the grant was repeated)."""
        if granted.lease.lease_id in self._leases:
            return
        first_s, most_s = self._retry
        backoff = Backoff(first_s=first_s, most_s=most_s, rng=self._rng)
        self._leases[granted.lease.lease_id] = LeaseInHand(granted.lease, granted.ends_at, backoff, set(granted.lease.slots))

    def start_waiting(self) -> tuple[GenerationRequest, ...]:
        """Mark every waiting slot as running and say what to generate."""
        requests: list[GenerationRequest] = []
        for held in self._leases.values():
            requests += [_request(held.lease, slot) for slot in sorted(held.waiting)]
            held.running |= held.waiting
            held.waiting.clear()
        return tuple(requests)

    def finish(self, lease_id: str, slot: int, done: Finished) -> bool:
        """Keep a finished completion; False when its lease is not in hand any more."""
        held = self._leases.get(lease_id)
        if held is None or slot not in held.running:
            return False
        held.running.discard(slot)
        held.finished[slot] = done
        return True

    def put_back(self, lease_id: str, slot: int) -> None:
        """A running slot was stopped and will be made again."""
        held = self._leases.get(lease_id)
        if held is not None and slot in held.running:
            held.running.discard(slot)
            held.waiting.add(slot)

    def give_up(self, lease_id: str, slot: int) -> None:
        """A running slot cannot be made here."""
        held = self._leases.get(lease_id)
        if held is not None:
            held.running.discard(slot)
            self._close_if_over(lease_id)

    def drop(self, lease_id: str) -> list[AbortGeneration]:
        """Forget a lease; what the engine must stop for it."""
        held = self._leases.pop(lease_id, None)
        if held is None or not held.running:
            return []
        return [AbortGeneration(lease_id, tuple(sorted(held.running)))]

    def give_up_unfinished(self) -> None:
        """The engine is gone: only finished completions are left to do."""
        for lease_id in self.ids:
            held = self._leases[lease_id]
            held.waiting.clear()
            held.running.clear()
            self._close_if_over(lease_id)

    def stop_running(self) -> list[AbortGeneration]:
        """Stop every running slot, to be made again later."""
        return [AbortGeneration(key, tuple(sorted(held.running))) for key, held in self._leases.items() if held.running]

    def discard_made_by(self, version: Version) -> int:
        """Make again every finished completion that the version had part in; how many there were."""
        count = 0
        for held in self._leases.values():
            for slot in [slot for slot, done in held.finished.items() if version in done.made_by]:
                del held.finished[slot]
                held.waiting.add(slot)
                count += 1
        return count

    def overdue(self, now: float) -> list[str]:
        """Leases with unfinished slots whose wall deadline passed long enough ago that no grace can save them."""
        return [key for key, held in self._leases.items() if held.unfinished and now >= held.ends_at + self._overdue_s]

    def submissions(self, now: float, *, epoch: int, confirmed: frozenset[Version]) -> Iterator[SubmitCompletions]:
        """Submissions due now, at most one in flight for a lease."""
        for held in self._leases.values():
            ready = held.ready(confirmed)
            if held.submit_at(ready, self._coalesce_s) <= now:
                yield _submission(held, ready, epoch)

    def settle(self, lease_id: str, slots: tuple[int, ...], now: float) -> bool:
        """The coordinator answered for these slots; those it did not name are sent again. False for an unknown lease."""
        held = self._leases.get(lease_id)
        if held is None:
            return False
        unnamed = set(held.flying) - set(slots)
        for slot in slots:
            held.finished.pop(slot, None)
        held.flying = ()
        held.retry_at = now + held.backoff.failed() if unnamed else -inf
        if not unnamed:
            held.backoff.succeeded()
        self._close_if_over(lease_id)
        return True

    def submission_failed(self, lease_id: str, now: float, retry_after_s: float) -> None:
        """Nothing was answered: the same completions leave again after the back-off."""
        held = self._leases.get(lease_id)
        if held is not None:
            held.flying = ()
            held.retry_at = now + held.backoff.failed(retry_after_s)

    def next_deadline(self, confirmed: frozenset[Version]) -> float:
        """When a submission or an overdue lease is due; infinity when neither is."""
        earliest = inf
        for held in self._leases.values():
            earliest = min(earliest, held.submit_at(held.ready(confirmed), self._coalesce_s))
            if held.unfinished:
                earliest = min(earliest, held.ends_at + self._overdue_s)
        return earliest

    def _close_if_over(self, lease_id: str) -> None:
        if self._leases[lease_id].is_over:
            del self._leases[lease_id]


def made_by(completion: Completion, labels: Mapping[int, Version]) -> frozenset[Version] | None:
    """The versions that made a completion; None when the engine names one that was never swapped in."""
    numbers = completion.version_numbers()
    if not numbers <= labels.keys():
        return None
    return frozenset(labels[number] for number in numbers)


def _request(lease: Lease, slot: int) -> GenerationRequest:
    seed = lease.seeds[lease.slots.index(slot)]
    return GenerationRequest((lease.lease_id, slot), lease.prompt_ids, seed, lease.sampling)


def _submission(held: LeaseInHand, ready: list[int], epoch: int) -> SubmitCompletions:
    slots = _bounded(held, ready)
    held.flying = tuple(slots)
    versions = frozenset[Version]().union(*(held.finished[slot].made_by for slot in slots))
    return SubmitCompletions(
        epoch=epoch,
        lease_id=held.lease.lease_id,
        fence=held.lease.fence,
        completions=tuple((slot, held.finished[slot].completion) for slot in slots),
        digests=tuple(sorted((version.number, version.digest) for version in versions)),
    )


def _bounded(held: LeaseInHand, ready: list[int]) -> list[int]:
    """As many slots as one submission may carry, at least one."""
    slots: list[int] = []
    tokens = 0
    for slot in ready[:MOST_COMPLETIONS_A_SUBMISSION]:
        tokens += held.finished[slot].completion.length
        if slots and tokens > MOST_TOKENS_A_SUBMISSION:
            break
        slots.append(slot)
    return slots
