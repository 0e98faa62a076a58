"""Keeps rendered prompts ahead of the groups that will carry them."""

from __future__ import annotations

from coordinator.domain.model import Group, Job
from coordinator.domain.seeds import prompt_index
from coordinator.service.deps import Deps, LiveJob
from coordinator.service.ports import Prompt, Reader

REFILL_S = 5.0


async def next_number(reader: Reader, job_id: str) -> int:
    """The number that the next group of the job will have."""
    highest = await reader.highest(Group, "number", job_id=job_id)
    return 0 if highest is None else highest + 1


async def fill_prompts(deps: Deps, job: Job, live: LiveJob, train_prompts: int | None) -> int:
    """Render what is missing among the next groups' prompts; the number rendered."""
    first = await deps.store.read(lambda reader: next_number(reader, job.id))
    ahead = 2 * job.config.algorithm.groups_per_step * (job.config.staleness.max + 1)
    missing = live.prompts.missing(range(first, first + max(32, min(ahead, 1024))))
    if not missing:
        return 0
    indices = [prompt_index(job.config.seed, number, train_prompts) for number in missing]
    prompts = await live.plane.prompts("train", indices)
    live.prompts.fill(dict[int, Prompt](zip(missing, prompts, strict=True)), first)
    deps.wake.notify(job.id)
    return len(missing)


async def keep_prompts(deps: Deps, job: Job, live: LiveJob, train_prompts: int | None) -> None:
    """Fill for ever: whenever rows of the job changed."""
    with deps.wake.watch(job.id) as watch:
        while True:
            await fill_prompts(deps, job, live, train_prompts)
            await watch.wait(REFILL_S)
