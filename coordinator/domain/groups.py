"""When a group closes, when it dies, and whether its rewards teach anything.

A group closes whole: every slot has its outcome. With `min_group` it closes short, but only once nothing is under way any
more: waiting for what is under way keeps slow (long) completions in, so that short closing does not favour short answers.
Reasons start with a stable code and a colon: ``too_few_scored: 1 of 16 ...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.domain.model import Group, GroupState, Rollout, RolloutState
from coordinator.domain.staleness import last_step
from coordinator.domain.turns import has_tokens, is_under_way

ZERO_VARIANCE = 1e-6
TOO_FEW_SCORED = "too_few_scored"
SCORED_AT_LEAST = 2  # an advantage is relative to the others of the group

_OUTCOMES = frozenset({RolloutState.SCORED, RolloutState.UNSCORED, RolloutState.GRADER_FAILED, RolloutState.GRADER_TIMEOUT})
_ANSWERED = _OUTCOMES | {RolloutState.ACCEPTED}
_MISSING = frozenset({RolloutState.OPEN, RolloutState.LEASED})


@dataclass(frozen=True, slots=True)
class Closing:
    """READY for a batch, or REJECTED, and why."""

    state: GroupState
    reason: str


def is_whole(group: Group, rollouts: Sequence[Rollout], *, min_group: int | None) -> bool:
    """Whether nothing more will come for a group before its scores: every slot is answered, or `min_group` are and none is leased."""
    answered = sum(rollout.state in _ANSWERED for rollout in rollouts)
    if answered == group.size:
        return True
    leased = any(rollout.state is RolloutState.LEASED for rollout in rollouts)
    return min_group is not None and not leased and answered >= max(SCORED_AT_LEAST, min_group)


def close(group: Group, rollouts: Sequence[Rollout], *, min_group: int | None) -> Closing | None:
    """What an ISSUED group becomes now; None while it stays open.

    A slot without a score (unscored, grader failed or timed out) counts as an outcome; at least two scores, or `min_group`,
    are needed to be READY.
    """
    outcomes = sum(rollout.state in _OUTCOMES for rollout in rollouts)
    scored = sum(rollout.state is RolloutState.SCORED for rollout in rollouts)
    needed = max(SCORED_AT_LEAST, min_group or 0)
    if outcomes == group.size:
        return _closed(group, rollouts, scored, needed)
    under_way = any(is_under_way(rollout) for rollout in rollouts)
    if min_group is None or under_way or scored < needed:
        return None
    return Closing(GroupState.READY, f"closed short: {scored} of {group.size} slots scored, min_group is {min_group}")


def _closed(group: Group, rollouts: Sequence[Rollout], scored: int, needed: int) -> Closing:
    if scored >= needed:
        return Closing(GroupState.READY, f"whole: {scored} of {group.size} slots scored")
    failed = sum(r.state in (RolloutState.GRADER_FAILED, RolloutState.GRADER_TIMEOUT) for r in rollouts)
    return Closing(
        GroupState.REJECTED,
        f"{TOO_FEW_SCORED}: {scored} of {group.size} slots scored, {needed} are needed ({failed} times the grader failed)",
    )


def ungradable(newest: Sequence[Group], *, since: float, at_least: int) -> str | None:
    """Why grading itself looks broken: the newest `at_least` groups issued after `since` all ended for want of scores.

    `newest` holds groups whose grading ended, newest first. One good group among them means that the reward function works.
    """
    counted = [group for group in newest if group.issued_at >= since][:at_least]
    if len(counted) < at_least or not all(group.reason.startswith(TOO_FEW_SCORED) for group in counted):
        return None
    return (
        f"grading_failed: the last {at_least} groups ended without enough scores, the newest: {counted[0].reason}. "
        "Look at the details (echo2 job rollouts), mend the reward function, then resume or submit anew."
    )


def died(group: Group, rollouts: Sequence[Rollout], *, step: int, bound: int, newest_version: int | None) -> str | None:
    """Why an ISSUED group can no longer be trained within the bound; None while it can.

    `step` is the learner's next step (t), `newest_version` the newest that is published: nothing fresher can fill a missing
    slot now.
    """
    oldest = min((r.oldest_version for r in rollouts if r.oldest_version is not None), default=None)
    if oldest is not None and step > last_step(oldest, bound):
        return (
            f"stale: group {group.number} holds tokens of version {oldest}, which serve steps up to "
            f"{last_step(oldest, bound)}; the learner is at step {step}"
        )
    missing = any(rollout.state in _MISSING for rollout in rollouts)
    if missing and newest_version is not None and step > last_step(newest_version, bound):
        return (
            f"stale: group {group.number} has missing slots and the newest version {newest_version} serves steps up to "
            f"{last_step(newest_version, bound)}; the learner is at step {step}"
        )
    return None


def ends_void(rollouts: Sequence[Rollout]) -> bool:
    """Whether a group that ends now ends void: nothing of it was ever accepted, no turn of a slot either."""
    return all(rollout.state in _MISSING and not has_tokens(rollout) for rollout in rollouts)


def is_zero_variance(rewards: Sequence[float | None]) -> bool:
    """Whether the scores are all alike (within 1e-6) or fewer than two: no advantage is left to learn from."""
    scores = [reward for reward in rewards if reward is not None]
    return len(scores) < SCORED_AT_LEAST or max(scores) - min(scores) <= ZERO_VARIANCE


def open_slots(rollouts: Sequence[Rollout]) -> tuple[int, ...]:
    """Slots that wait for a lease, ascending."""
    return tuple(sorted(rollout.slot for rollout in rollouts if rollout.state is RolloutState.OPEN))
