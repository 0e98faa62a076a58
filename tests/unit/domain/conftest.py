"""Factories: valid rows by default, overridden by keyword."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from coordinator.domain.admission import CompletionLimits, Submitted
from coordinator.domain.model import (
    Batch,
    BatchState,
    Group,
    GroupState,
    Job,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Refusal,
    Rollout,
    RolloutState,
    Worker,
    WorkerState,
)
from coordinator.wire.job import AlgorithmConfig, BudgetConfig, EnvironmentConfig, JobConfig, StalenessConfig

Make = Callable[..., Any]


def factory(kind: type, **defaults: Any) -> Make:
    def make(**changes: Any) -> Any:
        unknown = set(changes) - {f.name for f in fields(kind)}
        assert not unknown, f"{kind.__name__} has no {unknown}"
        return kind(**{**defaults, **changes})

    return make


@pytest.fixture
def make_config() -> Make:
    def make(*, bound: int = 2, steps: int = 2, group_size: int = 2, groups_per_step: int = 2) -> JobConfig:
        return JobConfig(
            name="job",
            model="model",
            environment=EnvironmentConfig(type="digit_sort"),
            algorithm=AlgorithmConfig(group_size=group_size, groups_per_step=groups_per_step),
            staleness=StalenessConfig(max=bound),
            budget=BudgetConfig(steps=steps),
        )

    return make


@pytest.fixture
def make_job(make_config: Make) -> Make:
    return factory(
        Job,
        id="j",
        name="job",
        owner="o",
        config=make_config(),
        state=JobState.RUNNING,
        reason="",
        state_since=0.0,
        created_at=0.0,
        model_dir="model",
    )


@pytest.fixture
def make_group() -> Make:
    return factory(
        Group,
        id="g0",
        job_id="j",
        number=0,
        prompt_index=0,
        prompt_ids=(1,),
        size=2,
        state=GroupState.ISSUED,
        issued_at=0.0,
    )


@pytest.fixture
def make_rollout() -> Make:
    return factory(Rollout, group_id="g0", slot=0, job_id="j", group_number=0, state=RolloutState.OPEN)


@pytest.fixture
def make_lease() -> Make:
    return factory(
        Lease,
        id="l",
        job_id="j",
        group_id="g0",
        worker_id="w",
        session_epoch=3,
        slots=(0, 1),
        version=5,
        digest="d5",
        last_step=7,
        deadline=100.0,
        fence=2,
        state=LeaseState.LIVE,
        issued_at=0.0,
    )


@pytest.fixture
def make_worker() -> Make:
    return factory(
        Worker,
        id="w",
        public_key="",
        name="worker",
        owner="o",
        invite_id="i",
        state=WorkerState.ACTIVE,
        reason="",
        state_since=0.0,
        joined_at=0.0,
        last_seen_at=0.0,
        session_epoch=1,
        engine={},
        price_uusd_per_hour=0,
        max_slots=8,
    )


@pytest.fixture
def make_batch() -> Make:
    return factory(
        Batch,
        job_id="j",
        step=0,
        state=BatchState.COMMITTED,
        groups=(0, 1),
        path="",
        digest="",
        rollouts=4,
        no_signal=False,
        staleness={"0": 2},
        sealed_at=10.0,
    )


@pytest.fixture
def make_publication() -> Make:
    return factory(
        Publication,
        job_id="j",
        version=0,
        digest="d0",
        state=PublicationState.PUBLISHED,
        manifest="",
        signature="",
        directory="",
        canary_logprobs=(),
        published_at=1.0,
    )


@pytest.fixture
def make_refusal() -> Make:
    return factory(
        Refusal,
        id="r",
        worker_id="w",
        job_id="j",
        lease_id="l",
        group_id="g0",
        slot=0,
        code="too_fast",
        reason="slot 0: too fast",
        blame="worker",
        paid=False,
        tokens=4,
        at=0.0,
    )


@pytest.fixture
def make_submitted() -> Make:
    def make(
        *,
        slot: int = 0,
        ids: Any = (4, 5, 1),
        logprobs: Any = None,
        versions: Any = None,
        stop_reason: str = "stop",
        generate_s: float = 1.0,
    ) -> Submitted:
        length = len(ids)
        return Submitted(
            slot=slot,
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([-0.5] * length if logprobs is None else logprobs, np.float32),
            versions=np.asarray([5] * length if versions is None else versions, np.int32),
            stop_reason=stop_reason,
            generate_s=generate_s,
        )

    return make


@pytest.fixture
def make_limits() -> Make:
    return factory(
        CompletionLimits,
        vocab_size=10,
        stop_token_ids=(1, 2),
        max_new_tokens=4,
        lease_version=5,
        last_step=7,
        bound=2,
        committed_steps=6,
        confirmed={5: "d5", 6: "d6"},
        claimed={5: "d5", 6: "d6"},
        rolled_back=frozenset(),
        fastest_tokens_per_s=1000.0,
    )
