"""Held-out evaluation, pinned to one version and labelled by it.

The learner decodes greedily with the published bits; nothing of it is leased, paid, stored as a rollout, or trained on. Where an
environment takes several turns, all held-out rollouts that are under way take one turn together: one request to the learner whose prompts
are their records, then one look of the environment at each. The rounds end because the data plane goes on neither beyond
`environment.max_turns` nor beyond `sampling.max_new_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.domain.model import Job
from coordinator.domain.turns import is_played, turn_tokens
from coordinator.service.deps import Deps
from coordinator.service.job_ports import Learner, LearnerLost
from coordinator.service.ports import Continued, DataPlane, Graded, PlayedTurn, Prompt, Tx
from coordinator.service.recording import record_event, record_metrics
from coordinator.wire import learner_link as link

AT_ONCE = 256  # requests to the data plane, whose queue is shared with training


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out prompt, the turns that were decoded after it, and the outcome once there is one."""

    prompt: Prompt
    turns: tuple[PlayedTurn, ...] = ()
    graded: Graded | None = None

    @property
    def following(self) -> tuple[int, ...]:
        """All tokens after the prompt, sampled or placed."""
        return tuple(token for turn in self.turns for token in (*turn.token_ids, *turn.placed))

    @property
    def sampled(self) -> int:
        """How many of them the policy chose."""
        return sum(len(turn.token_ids) for turn in self.turns)


async def evaluate(deps: Deps, learner: Learner, plane: DataPlane, job: Job, *, count: int, deadline_s: float) -> None:
    """Greedy rollouts of the first `count` held-out prompts, scored; failures are counted, never averaged in.

    Each request to the learner may take `deadline_s`; there is one a turn. Raises LearnerLost.
    """
    await _begin(deps, job, count)
    rollouts = [HeldOut(prompt) for prompt in await plane.prompts("eval", range(count))]
    while under_way := [place for place, rollout in enumerate(rollouts) if rollout.graded is None]:
        sampled = await _completions(learner, job, [rollouts[place] for place in under_way], deadline_s)
        begun = [_with_turn(rollouts[place], ids, job.stop_token_ids) for place, ids in zip(under_way, sampled, strict=True)]
        for place, rollout in zip(under_way, await _answered(plane, job, begun), strict=True):
            rollouts[place] = rollout
    await _record(deps, job, rollouts)


async def _completions(learner: Learner, job: Job, rollouts: Sequence[HeldOut], deadline_s: float) -> tuple[tuple[int, ...], ...]:
    """The likeliest next turn of each rollout, by the version that the job is at. Raises LearnerLost."""
    records = [rollout.following for rollout in rollouts]
    request = link.Evaluate(
        fence=job.learner_fence,
        prompts=tuple((*rollout.prompt.token_ids, *record) for rollout, record in zip(rollouts, records, strict=True)),
        max_new_tokens=tuple(turn_tokens(job.config, len(record)) or job.config.sampling.max_new_tokens for record in records),
        stop_token_ids=job.stop_token_ids,
    )
    answer = await learner.ask(request, deadline_s=deadline_s)
    version, count = job.committed_steps, len(rollouts)
    if not isinstance(answer, link.Evaluated) or answer.version != version or len(answer.completions) != count:
        raise LearnerLost(f"the learner answered {answer.kind!r} to evaluate {count} prompts at version {version}")
    return answer.completions


def _with_turn(rollout: HeldOut, ids: tuple[int, ...], stops: tuple[int, ...]) -> HeldOut:
    reason = "stop" if ids and ids[-1] in stops else "length"
    return replace(rollout, turns=(*rollout.turns, PlayedTurn(ids, reason)))


async def _answered(plane: DataPlane, job: Job, rollouts: Sequence[HeldOut]) -> list[HeldOut]:
    """Each rollout with its outcome, or with what the environment placed after its newest turn. Slice by slice."""
    done: list[HeldOut] = []
    for start in range(0, len(rollouts), AT_ONCE):
        done += await asyncio.gather(*(_looked_at(plane, job, rollout) for rollout in rollouts[start : start + AT_ONCE]))
    return done


async def _looked_at(plane: DataPlane, job: Job, rollout: HeldOut) -> HeldOut:
    prompt, newest = rollout.prompt, rollout.turns[-1]
    if not is_played(job.config):
        (graded,) = await plane.grade("eval", prompt.index, [newest.token_ids])
        return replace(rollout, graded=graded)
    said = await plane.play("eval", prompt.index, prompt.token_ids, rollout.turns)
    if isinstance(said, Continued):
        return replace(rollout, turns=(*rollout.turns[:-1], replace(newest, placed=said.token_ids)))
    return replace(rollout, graded=said)


def figures_of(job: Job, rollouts: Sequence[HeldOut]) -> dict[str, float]:
    """The metrics of finished held-out rollouts. A mean is over those that have a score, a length is in sampled tokens."""
    rewards = [one.graded.reward for one in rollouts if one.graded is not None and one.graded.reward is not None]
    figures = {
        "eval/all/count": float(len(rewards)),
        "eval/all/failed": float(len(rollouts) - len(rewards)),
        "eval/all/mean_length": sum(one.sampled for one in rollouts) / max(len(rollouts), 1),
    }
    if is_played(job.config):
        figures["eval/all/mean_turns"] = sum(len(one.turns) for one in rollouts) / max(len(rollouts), 1)
    if rewards:
        figures["eval/all/mean"] = sum(rewards) / len(rewards)
    return figures


async def _begin(deps: Deps, job: Job, count: int) -> None:
    """Told beforehand: many prompts on a small machine take long, and nothing else moves meanwhile."""
    told = {"version": job.committed_steps, "prompts": count}
    await deps.store.write(lambda tx: record_event(tx, job.id, "evaluating", told, now=deps.clock.now()))
    deps.wake.notify(job.id)


async def _record(deps: Deps, job: Job, rollouts: Sequence[HeldOut]) -> None:
    figures = figures_of(job, rollouts)
    told: dict[str, object] = {"version": job.committed_steps, **figures}
    lost = [one.graded.detail for one in rollouts if one.graded is not None and one.graded.reward is None]
    if lost:
        told["first_failure"] = lost[0]  # no page shows held-out rollouts

    async def save(tx: Tx) -> None:
        now = deps.clock.now()
        await record_metrics(tx, job.id, job.committed_steps, figures, now=now)
        await record_event(tx, job.id, "evaluated", told, now=now)

    await deps.store.write(save)
    deps.wake.notify(job.id)
