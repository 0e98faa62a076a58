"""What keeps a job from learning and no state tells, in words; and what it is doing just now. Pure: from rows and figures alone."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.domain.model import Event, Job, Metric
from coordinator.wire.rest import WorkView

TRUNCATED_METRIC = "is_truncated/all/mean"
MOST_TRUNCATED = 0.25  # share of a step's rollouts that may be masked before it is told


def warnings(job: Job, work: WorkView, truncated: Metric | None) -> list[str]:
    """Rewards that fail or are all alike, and rollouts that are masked. `truncated`: of the newest step."""
    found = [_reward_failed(job, work), _rewards_alike(job, work), _masked(job, truncated)]
    return [words for words in found if words is not None]


def _reward_failed(job: Job, work: WorkView) -> str | None:
    failed = sum(work.rollouts.get(state, 0) for state in ("grader_failed", "grader_timeout"))
    if not failed:
        return None
    return f"the reward failed or ran out of time for {failed} rollouts; read why: echo2 job rollouts {job.id}"


def _rewards_alike(job: Job, work: WorkView) -> str | None:
    alike = work.rejected.get("no_signal", 0)
    trained = work.groups.get("trained", 0) * job.config.algorithm.group_size
    if not alike or alike < trained:
        return None
    return f"{alike} rollouts lie in groups whose rewards are all equal: they teach nothing. Is the task too hard or too easy?"


def _masked(job: Job, truncated: Metric | None) -> str | None:
    if truncated is None or truncated.value < MOST_TRUNCATED or job.config.algorithm.truncated != "mask":
        return None
    return (
        f"{truncated.value:.0%} of the rollouts of step {truncated.step} hit sampling.max_new_tokens "
        f"({job.config.sampling.max_new_tokens}) and are masked, so they train nothing: raise it, or set algorithm.truncated to 'keep'"
    )


def doing(newest: Sequence[Event]) -> str:
    """What the learner does that takes long and moves no figure, from the newest events, last first; "" where nothing is told."""
    telling = next(
        (event for event in newest if event.kind in ("evaluating", "evaluated", "learner_lost", "learner_starting")), None
    )
    if telling is None or telling.kind != "evaluating":
        return ""
    return f"evaluating step {telling.data['version']}: {telling.data['prompts']} held-out prompts"
