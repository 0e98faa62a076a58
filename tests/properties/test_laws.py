"""The simulation's own checks have teeth: each finds the broken row it is there for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.domain.admission import Submitted
from coordinator.domain.model import Job, JobState, PublicationState, Worker, WorkerState
from coordinator.wire.job import AlgorithmConfig, BudgetConfig, EnvironmentConfig, JobConfig, StalenessConfig
from simulator.coordinator import Coordinator
from simulator.laws import LawBroken, Starvation, check_batch
from simulator.rows import STOP_TOKEN


@pytest.fixture
def coordinator() -> Coordinator:
    """One worker that confirmed version 0, one group of two per step."""
    config = JobConfig(
        name="job",
        model="model",
        environment=EnvironmentConfig(type="digit_sort"),
        algorithm=AlgorithmConfig(group_size=2, groups_per_step=1),
        staleness=StalenessConfig(max=1),
        budget=BudgetConfig(steps=5),
    )
    job = Job("job", "job", "owner", config, JobState.RUNNING, "", 0.0, 0.0, "model")
    made = Coordinator(job, grace_s=10.0, lost_after_s=20.0)
    row = Worker("w", "", "w", "", "", WorkerState.STANDBY, "", 0.0, 0.0, 0.0, 1, {}, 0, max_slots=2, tokens_per_s=10.0)
    made.join(row, 0.0)
    made.publish(0, "d0", 0.0)
    made.confirm("w", 0, "d0", 1.0)
    return made


def produce(coordinator: Coordinator) -> None:
    for lease in coordinator.lease("w", 2, 2.0):
        for slot in lease.slots:
            done = Submitted(
                slot=slot,
                token_ids=np.array([3, STOP_TOKEN], np.int32),
                logprobs=np.array([-1.0, -1.0], np.float32),
                versions=np.array([0, 0], np.int32),
                stop_reason="stop",
                generate_s=1.0,
            )
            assert coordinator.submit(lease, 1, done, claimed={0: "d0"}, now=3.0).accepted
            assert coordinator.submit(lease, 1, done, claimed={0: "d0"}, now=3.0).code == "duplicate"
            coordinator.grade(int(lease.group_id[1:]), slot, float(slot), 4.0)


def test_a_sound_batch_passes(coordinator: Coordinator) -> None:
    """Sealed from the rows, within the bound."""
    produce(coordinator)
    batch = coordinator.seal(5.0)
    assert batch is not None
    check_batch(coordinator, batch)


def test_a_batch_beyond_the_bound_is_found(coordinator: Coordinator) -> None:
    """As if the step had moved on by two since the tokens were made."""
    produce(coordinator)
    batch = coordinator.seal(5.0)
    assert batch is not None
    coordinator.job = replace(coordinator.job, committed_steps=2)
    with pytest.raises(LawBroken, match="next step is 2"):
        check_batch(coordinator, batch)
    with pytest.raises(LawBroken, match="staleness 2 in step 2"):
        check_batch(coordinator, replace(batch, step=2))


def test_a_lost_digest_in_a_batch_is_found(coordinator: Coordinator) -> None:
    """A batch that is sealed after its weights were replaced."""
    produce(coordinator)
    batch = coordinator.seal(5.0)
    assert batch is not None
    lost = replace(coordinator.publications[0], state=PublicationState.ROLLED_BACK)
    coordinator.publications[0] = lost
    with pytest.raises(LawBroken, match="rolled-back digest"):
        check_batch(coordinator, batch)


def test_an_idle_worker_that_gets_nothing_is_found(coordinator: Coordinator) -> None:
    """Nobody grants for longer than a beat although less than a step is issued."""
    starvation = Starvation(5.0)
    starvation.check(coordinator, ["w"], 10.0)
    starvation.check(coordinator, ["w"], 15.0)
    with pytest.raises(LawBroken, match=r"idle since 10\.0 s"):
        starvation.check(coordinator, ["w"], 15.5)


def test_a_busy_or_outdated_worker_does_not_starve(coordinator: Coordinator) -> None:
    """Only idle workers with a version of at least t - S count; an outage starts the clock anew."""
    starvation = Starvation(5.0)
    starvation.check(coordinator, ["w"], 10.0)
    starvation.check(coordinator, [], 12.0)
    starvation.check(coordinator, ["w"], 16.0)
    starvation.pause()
    starvation.check(coordinator, ["w"], 22.0)
    coordinator.job = replace(coordinator.job, committed_steps=2)
    starvation.check(coordinator, ["w"], 40.0)
