"""The demo's job: settings measured for its toy models, and modest ones for a model that the user brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.demo.market import USD, USD_PER_HOUR
from coordinator.demo.processes import DemoFailed


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
    recipe: str = "digit_sort"  # which toy is made, where no model is brought
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


@dataclass(frozen=True, slots=True)
class Recipe:
    """A toy and the task that it was taught badly: named as the environment, and as the recipe of `coordinator.learner.warm_start`."""

    steps: int
    algorithm: dict[str, Any]
    made_in_s: int  # on a quiet machine
    says: str


RECIPES = {
    "digit_sort": Recipe(
        150,
        TOY_ALGORITHM,
        20,
        "making the toy model: 0.3 M parameters, taught by a sloppy teacher so that there is something to gain",
    ),
    "countdown": Recipe(
        200,
        {**TOY_ALGORITHM, "groups_per_step": 32},
        45,
        "making the toy model: 0.3 M parameters, taught countdown by a teacher who mostly just adds the numbers up",
    ),
}


def recipe_of(name: str) -> Recipe:
    """The recipe of this name. Raises DemoFailed."""
    if name not in RECIPES:
        raise DemoFailed(f"--recipe {name!r} must be {' or '.join(RECIPES)}")
    return RECIPES[name]


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
        "algorithm": RECIPES[options.recipe].algorithm if toy else BROUGHT_ALGORITHM,
        "staleness": {"max": options.staleness},
        "sampling": {"max_new_tokens": TOY_NEW_TOKENS if toy else BROUGHT_NEW_TOKENS},
        "checkpoints": {"every_steps": 20, "eval_every_steps": options.steps, "eval_prompts": 256 if toy else 32},
        "budget": {"steps": options.steps},
    }
    if options.market:
        job["algorithm"] = {**job["algorithm"], "groups_per_step": MARKET_GROUPS}
        job["budget"] |= {"usd": USD, "usd_per_hour": USD_PER_HOUR}
    return job
