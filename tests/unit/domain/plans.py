"""Jobs, figures and questions for the tests of plans: every figure is given, so that each result can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.domain.plan_answer import Question
from coordinator.domain.plan_facts import settled_facts
from coordinator.wire.job import (
    AlgorithmConfig,
    BudgetConfig,
    EnvironmentConfig,
    JobConfig,
    SamplingConfig,
    StalenessConfig,
    WorkersConfig,
)
from pricing.offers import Offer
from tests.unit.pricing.markets import offer

PLAIN = {
    "train_s": 10.0,
    "delta_bytes": 1.25e6,
    "delta_growth": 0.0,
    "keyframe_bytes": 1.25e6,
    "snapshot_s": 0.0,
    "apply_s": 0.0,
    "load_s": 0.0,
    "grade_s": 0.5,
    "seeder_mbps": 100.0,
    "mean_tokens": 100.0,
    "tokens_per_s": 50.0,
    "completion_bytes_up": 0.0,
    "completion_bytes_down": 0.0,
}
MARKET = (
    offer("a", 0.10, 0.5, count=4, up_mbps=10.0, down_mbps=100.0),
    offer("b", 0.30, 1.0, count=2, up_mbps=10.0, down_mbps=100.0),
)


def job(*, bound: int = 4, steps: int = 100, size: int = 4, groups: int = 4, **more: Any) -> JobConfig:
    """G = 4, B = 4: sixteen rollouts a step."""
    return JobConfig(
        name="planned",
        model=more.pop("model", "nowhere/model-8B"),
        environment=EnvironmentConfig(type="digit_sort"),
        algorithm=AlgorithmConfig(group_size=size, groups_per_step=groups, learning_rate=more.pop("learning_rate", 1e-6)),
        staleness=StalenessConfig(
            max=bound, publish_every=more.pop("publish_every", "auto"), on_update=more.pop("on_update", "keep")
        ),
        sampling=SamplingConfig(max_new_tokens=more.pop("max_new_tokens", 200)),
        workers=WorkersConfig(trust=more.pop("trust", "any")),
        budget=BudgetConfig(steps=steps, **more),
    )


def question(
    asked: JobConfig | None = None,
    market: Sequence[Offer] = MARKET,
    *,
    headroom: float = 1.25,
    required_rate: float | None = None,
    seed: int = 0,
    **figures: float,
) -> Question:
    """With the figures of `PLAIN`, but those that are named."""
    asked = asked or job()
    facts = settled_facts(asked, given=PLAIN | figures, measured={})
    return Question(asked, tuple(market), facts, headroom, required_rate, seed=seed)
