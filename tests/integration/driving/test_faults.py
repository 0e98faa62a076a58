"""Faults of other systems, tried on the real driver and its store; the numbers are those of docs/faults.md."""

from __future__ import annotations

from coordinator.domain.model import Event, JobState
from coordinator.service.deps import Deps
from tests.integration.driving.pretend import PretendLearners
from tests.integration.driving.scene import config, drive, submit


async def test_fault_12_the_last_evaluation_is_made_before_the_job_ends_and_says_its_version(deps: Deps) -> None:
    """The learner is lost in the last step: the evaluation of the last version still comes, once, and so does the end."""
    learners = PretendLearners(lose_at={"train:3"})
    wanted = config(checkpoints={"every_steps": 2, "eval_every_steps": 2}, budget={"steps": 4})
    job = await drive(deps, await submit(deps, wanted), learners)
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, 4)
    events = await deps.store.read(lambda r: r.select(Event, job_id=job.id, order_by="seq"))
    assert [event.data["version"] for event in events if event.kind == "evaluated"] == [0, 2, 4]
    kinds = [event.kind for event in events]
    last = max(place for place, kind in enumerate(kinds) if kind == "evaluated")
    assert "job_completed" in kinds[last + 1 :]
