"""Slots that are played in turns: an accepted turn is graded by the environment, or leads to the next one.

The record of a slot is append-only: the prompt, then for each turn the tokens that were sampled and those that the environment placed
after them. Each turn is an ordinary lease whose prompt is the record so far; what was sampled is never encoded again. Everything
that follows the prompt, sampled or placed, counts against `sampling.max_new_tokens`, so that a slot always fits the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.domain.model import Rollout, RolloutState, Turn
from coordinator.domain.staleness import last_step
from coordinator.domain.states import ROLLOUT, move
from coordinator.wire.job import JobConfig

STICKY_S = 3.0  # who made the last turn holds its cache; for so long the next one waits for that worker
KEPT_S = 1.0  # and for so long a slot stays free there while the environment looks: a slow one is not worth an idle engine


def is_played(config: JobConfig) -> bool:
    """Whether the job's slots may take several turns."""
    return config.environment.max_turns > 1


def turn_tokens(config: JobConfig, preceding: int) -> int | None:
    """The most tokens that a turn may sample after `preceding` ones; None where that is the job's own limit. Below 1: none are left."""
    if not is_played(config):
        return None
    left = config.sampling.max_new_tokens - preceding
    most = config.environment.turn_tokens
    return left if most is None else min(left, most)


def awaited_worker(rollout: Rollout) -> str | None:
    """Whose cache holds the record of an open slot: who made the turn before. None for a first turn, and once that worker gave the next one up."""
    return rollout.worker_id if rollout.continued_at is not None and rollout.attempts == 0 else None


def may_take(rollout: Rollout, worker_id: str, *, now: float, alone: bool) -> bool:
    """Whether an open slot may be leased to a worker now.

    A turn goes to who made the one before it, whose cache holds the record, and to anyone after STICKY_S. A slot that came back
    unfinished goes to another worker, unless there is none (`alone`).
    """
    if rollout.continued_at is not None and rollout.attempts == 0:
        return awaited_worker(rollout) == worker_id or now >= rollout.continued_at + STICKY_S
    return alone or rollout.worker_id != worker_id


def latest_step(version: int, bound: int, *, oldest: int | None) -> int:
    """The last step that can use a turn begun on `version`, when the oldest token of the turns before it is of version `oldest`."""
    return last_step(version if oldest is None else min(version, oldest), bound)


def continued(rollout: Rollout, sampled: Sequence[int], placed: Sequence[int], *, now: float) -> tuple[Turn, Rollout]:
    """An accepted turn that the environment answered with `placed` tokens: its row, and the slot open for the next turn."""
    state = move(ROLLOUT, rollout.state, "continued")
    assert rollout.lease_id and rollout.worker_id and rollout.blob and rollout.accepted_at is not None  # noqa: PT018 (accepted)
    turn = Turn(
        group_id=rollout.group_id,
        slot=rollout.slot,
        turn=rollout.turn,
        job_id=rollout.job_id,
        lease_id=rollout.lease_id,
        worker_id=rollout.worker_id,
        blob=rollout.blob,
        blob_start=rollout.blob_start,
        length=rollout.length,
        stop_reason=rollout.stop_reason,
        generate_s=rollout.generate_s,
        accepted_at=rollout.accepted_at,
        token_ids=(*sampled, *placed),
    )
    opened = replace(
        rollout,
        state=state,
        lease_id=None,
        attempts=0,
        blob=None,
        blob_start=0,
        length=0,
        stop_reason="",
        generate_s=0.0,
        accepted_at=None,
        turn=rollout.turn + 1,
        preceding=rollout.preceding + len(turn.token_ids),
        continued_at=now,
    )
    return turn, opened


def is_under_way(rollout: Rollout) -> bool:
    """Whether a slot has begun and its outcome is still to come: one between two turns is not one that nobody took."""
    if rollout.state is RolloutState.OPEN:
        return rollout.turn > 0
    return rollout.state in (RolloutState.LEASED, RolloutState.ACCEPTED)


def has_tokens(rollout: Rollout) -> bool:
    """Whether tokens of a slot were accepted, in this turn or one before."""
    return rollout.oldest_version is not None


def record(turns: Sequence[Turn]) -> tuple[int, ...]:
    """What follows the prompt before the next turn. `turns` of one slot, in order."""
    return tuple(token for turn in turns for token in turn.token_ids)
