"""Keeps rendered prompts ahead of the groups that will carry them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from coordinator.domain.model import Group, Job
from coordinator.domain.seeds import prompt_index
from coordinator.service.deps import Deps, LiveJob
from coordinator.service.ports import DataPlane, EnvironmentBroken, Prompt, Reader
from coordinator.service.recording import record_event

REFILL_S = 5.0
MOST_PASSED_OVER = 100


async def next_number(reader: Reader, job_id: str) -> int:
    """The number that the next group of the job will have."""
    highest = await reader.highest(Group, "number", job_id=job_id)
    return 0 if highest is None else highest + 1


def context_tokens(model_dir: Path) -> int | None:
    """The model's context, from its configuration; None when that does not tell."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    told = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return told if isinstance(told, int) else None


def fits(prompt: Prompt, *, new_tokens: int, context: int | None) -> bool:
    """Whether the prompt and its longest completion lie within the context: no worker could finish it otherwise."""
    return context is None or len(prompt.token_ids) + new_tokens <= context


async def fitting_prompts(
    plane: DataPlane, job: Job, indices: Mapping[int, int], train_prompts: int | None
) -> tuple[dict[int, Prompt], list[int]]:
    """Rendered prompts by group number, and the indices that were passed over because they are too long.

    A prompt that does not fit is replaced by the next of the data set. Raises EnvironmentBroken when MOST_PASSED_OVER in a row do not fit.
    """
    new_tokens, context = job.config.sampling.max_new_tokens, context_tokens(Path(job.model_dir))
    found: dict[int, Prompt] = {}
    passed_over: list[int] = []
    wanted = dict(indices)
    for _ in range(MOST_PASSED_OVER):
        prompts = dict(zip(wanted, await plane.prompts("train", list(wanted.values())), strict=True))
        found |= {number: p for number, p in prompts.items() if fits(p, new_tokens=new_tokens, context=context)}
        wanted = {number: index for number, index in wanted.items() if number not in found}
        if not wanted:
            return found, passed_over
        passed_over += wanted.values()
        wanted = {number: index + 1 if train_prompts is None else (index + 1) % train_prompts for number, index in wanted.items()}
    raise EnvironmentBroken(
        f"{MOST_PASSED_OVER} prompts in a row from {min(passed_over)} on are too long: with sampling.max_new_tokens {new_tokens} they exceed "
        f"the model's context of {context}; shorten the prompts, or lower sampling.max_new_tokens"
    )


async def fill_prompts(deps: Deps, job: Job, live: LiveJob, train_prompts: int | None) -> int:
    """Render what is missing among the next groups' prompts; the number rendered."""
    first = await deps.store.read(lambda reader: next_number(reader, job.id))
    ahead = 2 * job.config.algorithm.groups_per_step * (job.config.staleness.max + 1)
    missing = live.prompts.missing(range(first, first + max(32, min(ahead, 1024))))
    if not missing:
        return 0
    indices = {number: prompt_index(job.config.seed, number, train_prompts) for number in missing}
    prompts, passed_over = await fitting_prompts(live.plane, job, indices, train_prompts)
    if passed_over:
        told = {"indices": sorted(set(passed_over))[:100], "reason": "prompt and max_new_tokens exceed the model's context"}
        await deps.store.write(lambda tx: record_event(tx, job.id, "prompts_passed_over", told, now=deps.clock.now()))
    live.prompts.fill(prompts, first)
    deps.wake.notify(job.id)
    return len(missing)


async def keep_prompts(deps: Deps, job: Job, live: LiveJob, train_prompts: int | None) -> None:
    """Fill for ever: whenever rows of the job changed."""
    with deps.wake.watch(job.id) as watch:
        while True:
            await fill_prompts(deps, job, live, train_prompts)
            await watch.wait(REFILL_S)
