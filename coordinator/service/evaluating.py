"""Held-out evaluation, pinned to one version and labelled by it."""

from __future__ import annotations

import asyncio

from coordinator.domain.model import Job
from coordinator.service.deps import Deps
from coordinator.service.job_ports import Learner, LearnerLost
from coordinator.service.ports import DataPlane, Graded, Prompt, Tx
from coordinator.service.recording import record_event, record_metrics
from coordinator.wire import learner_link as link

AT_ONCE = 256


async def _graded(plane: DataPlane, pairs: list[tuple[Prompt, tuple[int, ...]]]) -> list[Graded]:
    """Slice by slice: the plane's queue is shared with training."""
    graded: list[Graded] = []
    for place in range(0, len(pairs), AT_ONCE):
        slices = await asyncio.gather(*(plane.grade("eval", p.index, [ids]) for p, ids in pairs[place : place + AT_ONCE]))
        graded.extend(result for results in slices for result in results)
    return graded


async def evaluate(deps: Deps, learner: Learner, plane: DataPlane, job: Job, *, count: int, deadline_s: float) -> None:
    """Greedy completions of the first `count` held-out prompts, scored; failures are counted, never averaged in."""
    prompts = await plane.prompts("eval", range(count))
    request = link.Evaluate(
        fence=job.learner_fence,
        prompts=tuple(p.token_ids for p in prompts),
        max_new_tokens=job.config.sampling.max_new_tokens,
        stop_token_ids=job.stop_token_ids,
    )
    answer = await learner.ask(request, deadline_s=deadline_s)
    if not isinstance(answer, link.Evaluated) or answer.version != job.committed_steps or len(answer.completions) != count:
        raise LearnerLost(f"the learner answered {answer.kind!r} to evaluate {count} prompts at version {job.committed_steps}")
    pairs = zip(prompts, answer.completions, strict=True)
    graded = await _graded(plane, list(pairs))
    rewards = [g.reward for g in graded if g.reward is not None]
    figures = {
        "eval/all/count": float(len(rewards)),
        "eval/all/failed": float(len(graded) - len(rewards)),
        "eval/all/mean_length": sum(len(ids) for ids in answer.completions) / max(count, 1),
    }
    if rewards:
        figures["eval/all/mean"] = sum(rewards) / len(rewards)

    async def save(tx: Tx) -> None:
        now = deps.clock.now()
        await record_metrics(tx, job.id, answer.version, figures, now=now)
        await record_event(tx, job.id, "evaluated", {"version": answer.version, **figures}, now=now)

    await deps.store.write(save)
    deps.wake.notify(job.id)
