"""What becomes of a step's figures: interlocks that speak as events, and the sinks that get every step once."""

from __future__ import annotations

import pytest

from coordinator.domain.model import Event, JobState, Metric
from coordinator.service.deps import Deps
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.operator_jobs import patched
from coordinator.wire.job import JobPatch
from tests.integration.driving.pretend import PretendLearners
from tests.integration.driving.scene import STEPS, check, config, drive, row, submit


async def events(deps: Deps, job_id: str, kind: str) -> list[Event]:
    return await deps.store.read(lambda r: r.select(Event, job_id=job_id, kind=kind, order_by="seq"))


async def test_an_interlock_is_an_event_in_words_and_s_stays(deps: Deps) -> None:
    """Drifting from the first step on: said after the third, and again at the tenth."""
    learners = PretendLearners()
    learners.figures = {"effective_sample_size": 0.5}
    job = await drive(deps, await submit(deps, config()), learners)
    said = await events(deps, job.id, "interlock")
    assert [(event.data["step"], event.data["code"]) for event in said] == [
        (2, "low_effective_sample_size"),
        (10, "low_effective_sample_size"),
    ]
    assert "Lower staleness.max (2 now)" in said[0].data["reason"]
    assert job.config.staleness.max == 2
    await check(deps, job)


async def test_s_goes_down_by_itself_where_the_job_says_so(deps: Deps) -> None:
    """From 2 to 1 after the third step, and no further; the job ends and its audit is clean."""
    learners = PretendLearners()
    learners.figures = {"mismatch_kl/all/mean": 0.7}
    job = await drive(deps, await submit(deps, config(staleness={"auto_reduce": True})), learners)
    (lowered,) = await events(deps, job.id, "staleness_reduced")
    assert (lowered.data["from"], lowered.data["to"]) == (2, 1)
    assert "high_mismatch_kl at S = 2" in lowered.data["reason"]
    assert (job.state, job.config.staleness.max) == (JobState.COMPLETED, 1)
    await check(deps, job)


async def test_sound_figures_say_nothing(deps: Deps) -> None:
    learners = PretendLearners()
    learners.figures = {"effective_sample_size": 0.99, "mismatch_kl/all/mean": 0.01, "entropy/all/mean": 1.0, "optim/applied": 1.0}
    job = await drive(deps, await submit(deps, config()), learners)
    assert await events(deps, job.id, "interlock") == []


async def test_a_job_without_correction_cannot_be_made_stale(deps: Deps) -> None:
    """By PATCH as little as in the job file."""
    job = await row(deps, await submit(deps, config(staleness={"max": 0}, algorithm={"correction": "none"})))
    with pytest.raises(RequestRefused, match=r"staleness\.max is 1 with algorithm.correction 'none'"):
        patched(job, JobPatch(staleness_max=1))


async def test_the_sinks_get_every_committed_step_once_and_whole(deps: Deps) -> None:
    """The rows' figures, the coordinator's own included; after the last step the last evaluation."""
    learners = PretendLearners()
    job = await drive(deps, await submit(deps, config()), learners)
    (learner,) = learners.learners
    assert [request.step for request in learner.log] == list(range(STEPS + 1))
    for request in learner.log[:STEPS]:
        rows = await deps.store.read(lambda r, step=request.step: r.select(Metric, job_id=job.id, step=step))
        kept = {metric.name: metric.value for metric in rows if not metric.name.startswith("publish/")}
        assert {name: value for name, value in request.metrics.items() if not name.startswith("publish/")} == kept
        assert request.metrics["reward"] == request.metrics["reward/all/mean"]
    assert "eval/all/count" in learner.log[STEPS].metrics


async def test_a_learner_that_starts_again_gets_the_steps_that_its_file_lacks(deps: Deps) -> None:
    """The pretended one has no file, so it is told everything again."""
    learners = PretendLearners(lose_at={"train:7"})
    await drive(deps, await submit(deps, config()), learners)
    assert [request.step for request in learners.learners[0].log] == list(range(7))
    assert [request.step for request in learners.learners[1].log] == list(range(STEPS + 1))


async def test_a_learner_whose_file_cannot_tell_gets_new_steps_only(deps: Deps) -> None:
    """Else its other sinks would be given every step a second time."""
    learners = PretendLearners(lose_at={"train:7"})
    learners.logged = [0, None]
    await drive(deps, await submit(deps, config()), learners)
    assert [request.step for request in learners.learners[0].log] == list(range(7))
    assert [request.step for request in learners.learners[1].log] == list(range(7, STEPS + 1))
