"""The demo's job: settings measured for its toy model, and modest ones for a model that the user brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.demo.market import USD, USD_PER_HOUR


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `echo2 demo` was asked for."""

    workers: int = 4
    steps: int = 150
    staleness: int = 3
    kill_a_worker: bool = False
    churn: bool = False
    market: bool = False  # throttled workers with prices, a paced learner: who works is chosen by cost
    link_mbit: float = 0.0  # each worker's link for weights, both ways; 0: not limited
    model: Path | None = None
    environment: str = "digit_sort"
    train: Path | None = None
    seed: int = 0
    out: Path = Path("echo2-demo")
    as_json: bool = False


# GRPO on the toy: clip 0.2 with a dual clip at 2 and group-std advantages. A dual clip costs nothing at small S and removes gradient
# spikes at large S; the learning rate is the largest that stays stable for S up to 6.
TOY_ALGORITHM = {
    "loss": "ppo_clip",
    "dual_clip": 2.0,
    "advantage": "group_std",
    "group_size": 8,
    "groups_per_step": 16,
    "learning_rate": 1e-4,
    "warmup_steps": 5,
    "grad_clip": 1.0,
    "truncated": "keep",
}
BROUGHT_ALGORITHM = {"group_size": 4, "groups_per_step": 4, "learning_rate": 1e-6}
TOY_NEW_TOKENS = 10
BROUGHT_NEW_TOKENS = 48
MARKET_GROUPS = 8


def demo_job(options: DemoOptions, model: str) -> dict[str, Any]:
    """The job as the API takes it."""
    toy = options.model is None
    environment: dict[str, Any] = {"type": options.environment}
    if options.train is not None:
        environment["train"] = str(options.train.resolve())
    job: dict[str, Any] = {
        "name": "demo",
        "model": model,
        "seed": options.seed,
        "environment": environment,
        "algorithm": TOY_ALGORITHM if toy else BROUGHT_ALGORITHM,
        "staleness": {"max": options.staleness},
        "sampling": {"max_new_tokens": TOY_NEW_TOKENS if toy else BROUGHT_NEW_TOKENS},
        "checkpoints": {"every_steps": 20, "eval_every_steps": options.steps, "eval_prompts": 256 if toy else 32},
        "budget": {"steps": options.steps},
    }
    if options.market:
        job["algorithm"] = {**job["algorithm"], "groups_per_step": MARKET_GROUPS}
        job["budget"] |= {"usd": USD, "usd_per_hour": USD_PER_HOUR}
    return job
