"""What earlier rows say of a job to come: the newest job on the same model, running or ended, measured what a plan would assume."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from coordinator.domain.model import Batch, EdgeRow, Group, GroupState, Job, Rollout, Turn
from coordinator.domain.plan_facts import DELTA_GROWTH, Fact, Source
from coordinator.domain.turns import is_played
from coordinator.service.ports import Reader
from coordinator.service.timings import Timings, read_timings
from coordinator.service.tokens import Caller
from coordinator.wire.job import JobConfig

JOBS = 200  # looked back on
GROUPS = 512
COMPLETIONS = 512
TURNS = 256  # their rows hold tokens
FEWEST = 16  # of groups or completions; fewer say nothing


async def measured_facts(reader: Reader, caller: Caller, config: JobConfig) -> dict[str, Fact]:
    """Figures from the newest job on this model that the caller may see and that trained a step; none without one."""
    owned = {"owner": caller.token.id} if caller.is_author else {}
    for job in await reader.select(Job, order_by="-created_at", limit=JOBS, **owned):
        if job.config.model == config.model and job.committed_steps > 0:
            return await _facts(reader, job, config)
    return {}


async def _facts(reader: Reader, job: Job, config: JobConfig) -> dict[str, Fact]:
    timings = await read_timings(reader, job)
    edges = await reader.select(EdgeRow, job_id=job.id, order_by="-version", limit=GROUPS)
    groups = await reader.select(
        Group, job_id=job.id, state=[GroupState.TRAINED, GroupState.REJECTED], order_by="-number", limit=GROUPS
    )
    newest = await reader.select(Rollout, job_id=job.id, accepted_at__gt=0.0, order_by="-accepted_at", limit=COMPLETIONS)
    turns = await reader.select(Turn, job_id=job.id, order_by="-accepted_at", limit=TURNS)
    found = _timed(job, config, timings) | _sizes(job, edges) | _groups(job, config, groups)
    return found | _completions(job, config, newest) | _turns(job, config, newest, turns)


def _timed(job: Job, config: JobConfig, timings: Timings) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    train_s = timings.train_s()
    if train_s is not None:
        scale = config.rollouts_per_step / job.config.rollouts_per_step
        scaled = "" if scale == 1 else f", {scale:g} times as long for as many more rollouts a step"
        found["train_s"] = _measured(job, train_s * scale, f"mean of {_steps(timings.batches)} steps{scaled}")
    if timings.apply_s:
        found["apply_s"] = _measured(job, fmean(timings.apply_s.values()), f"mean over {len(timings.apply_s)} workers")
    return found


def _steps(batches: Sequence[Batch]) -> int:
    return max(1, sum(batch.step > 0 for batch in batches))


def _sizes(job: Job, edges: Sequence[EdgeRow]) -> dict[str, Fact]:
    """The newest keyframe, and the newest delta as one over a single step would be."""
    found: dict[str, Fact] = {}
    keyframe = next((edge for edge in edges if edge.base_version is None), None)
    if keyframe is not None:
        found["keyframe_bytes"] = _measured(job, keyframe.nbytes, f"version {keyframe.version}")
    for edge in edges:
        if edge.base_version is not None and edge.version > edge.base_version and edge.nbytes > 0:
            steps = edge.version - edge.base_version
            size = edge.nbytes / steps**DELTA_GROWTH
            found["delta_bytes"] = _measured(job, size, f"version {edge.version} against {edge.base_version}")
            break
    return found


def _groups(job: Job, config: JobConfig, groups: Sequence[Group]) -> dict[str, Fact]:
    alike = sum(group.reason.startswith("no_signal") for group in groups)
    taught = alike + sum(group.state is GroupState.TRAINED for group in groups)
    if taught < FEWEST or job.config.environment.type != config.environment.type:
        return {}
    return {"no_signal": _measured(job, min(alike / taught, 0.999), f"{alike} of its newest {taught} groups")}


def _completions(job: Job, config: JobConfig, newest: Sequence[Rollout]) -> dict[str, Fact]:
    """Lengths and speeds, where the same is asked for. With several turns all that follows the prompt counts, an environment's tokens too."""
    newest = [row for row in newest if row.length > 0]
    lengths = [row.preceding + row.length for row in newest]
    same = (job.config.environment.type, job.config.sampling.max_new_tokens)
    if len(lengths) < FEWEST or same != (config.environment.type, config.sampling.max_new_tokens):
        return {}
    mean, words = fmean(lengths), f"its newest {len(lengths)} completions"
    found = {"mean_tokens": _measured(job, mean, words), "length_cv": _measured(job, pstdev(lengths) / mean, words)}
    seconds = sum(row.generate_s for row in newest)
    if seconds > 0:
        found["tokens_per_s"] = _measured(job, sum(row.length for row in newest) / seconds, words)
    graded = [row.graded_at - row.accepted_at for row in newest if row.graded_at is not None and row.accepted_at is not None]
    if graded:
        found["grade_s"] = _measured(job, max(0.0, fmean(graded)), f"its newest {len(graded)} grades")
    return found


def _turns(job: Job, config: JobConfig, newest: Sequence[Rollout], turns: Sequence[Turn]) -> dict[str, Fact]:
    """How many turns the rollouts that have an outcome took, and how much of what follows their prompts the environment placed."""
    ended = [row for row in newest if row.length > 0 and row.graded_at is not None]
    same = (job.config.environment.type, job.config.environment.max_turns, job.config.sampling.max_new_tokens)
    if (
        not is_played(job.config)
        or len(ended) < FEWEST
        or same != (config.environment.type, config.environment.max_turns, config.sampling.max_new_tokens)
    ):
        return {}
    words = f"its newest {len(ended)} rollouts"
    placed = fmean(len(turn.token_ids) - turn.length for turn in turns) if turns else 0.0
    share = placed * sum(row.turn for row in ended) / sum(row.preceding + row.length for row in ended)
    return {
        "turns": _measured(job, fmean(row.turn + 1 for row in ended), words),
        "placed_share": _measured(job, min(share, 0.999), f"{words}, {len(turns)} turns"),
    }


def _measured(job: Job, value: float, words: str) -> Fact:
    return Fact(float(value), Source.MEASURED, f"job {job.id}: {words}")
