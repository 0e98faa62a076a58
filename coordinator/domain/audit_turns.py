"""The turns of slots that an environment continues: each settled once, under its own lease, and the record without gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.domain.model import Lease, Rollout, Turn


@dataclass(frozen=True, slots=True)
class CountedTurn:
    """What audits need of a turn's row. Its tokens are counted: all of a job's would fill the memory."""

    group_id: str
    slot: int
    turn: int
    job_id: str
    lease_id: str
    worker_id: str
    length: int  # sampled tokens
    accepted_at: float
    tokens: int  # sampled and placed


def counted(turn: Turn) -> CountedTurn:
    """A turn's row without its tokens."""
    return CountedTurn(
        group_id=turn.group_id,
        slot=turn.slot,
        turn=turn.turn,
        job_id=turn.job_id,
        lease_id=turn.lease_id,
        worker_id=turn.worker_id,
        length=turn.length,
        accepted_at=turn.accepted_at,
        tokens=len(turn.token_ids),
    )


def turn_findings(rollouts: Sequence[Rollout], leases: Mapping[str, Lease], turns: Sequence[CountedTurn]) -> Iterator[str]:
    """Findings, each in words; none: every slot's turns before its newest are there, count from 0, and make up its record."""
    slots = {(rollout.group_id, rollout.slot): rollout for rollout in rollouts}
    of_slot: dict[tuple[str, int], list[CountedTurn]] = {key: [] for key in slots}
    for turn in turns:
        of_slot.setdefault((turn.group_id, turn.slot), []).append(turn)
    for (group_id, slot), some in sorted(of_slot.items()):
        rollout = slots.get((group_id, slot))
        place = f"{group_id} slot {slot}"
        if rollout is None:
            yield f"{place} has {len(some)} turns and no rollout"
            continue
        yield from _record(place, rollout, sorted(some, key=lambda one: one.turn))
        for turn in some:
            yield from _settlement(f"{place} turn {turn.turn}", turn, leases.get(turn.lease_id))


def _record(place: str, rollout: Rollout, turns: Sequence[CountedTurn]) -> Iterator[str]:
    numbers = [turn.turn for turn in turns]
    if numbers != list(range(rollout.turn)):
        yield f"{place} is at turn {rollout.turn} and has rows of turns {numbers} before it"
        return
    tokens = sum(turn.tokens for turn in turns)
    if tokens != rollout.preceding:
        yield f"{place} says that {rollout.preceding} tokens precede turn {rollout.turn}, its turns have {tokens}"
    if turns and rollout.oldest_version is None:
        yield f"{place} has {len(turns)} turns and no policy version"


def _settlement(place: str, turn: CountedTurn, lease: Lease | None) -> Iterator[str]:
    if lease is None or turn.slot not in lease.slots or lease.group_id != turn.group_id:
        yield f"{place} was settled under lease {turn.lease_id}, which does not hold it"
    elif lease.worker_id != turn.worker_id:
        yield f"{place} was settled by worker {turn.worker_id}, lease {lease.id} is worker {lease.worker_id}'s"
    if not 1 <= turn.length <= turn.tokens:
        yield f"{place} has {turn.length} sampled tokens of {turn.tokens}"
