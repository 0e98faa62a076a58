"""Reward against S through the real learner: a table, a figure, and whether the shipped loss keeps its promise.

    python -m tests.bench.reward_against_staleness [--seeds 5] [--losses dppo plain ...] [--bounds 0,1,3,6,11] [--json FILE --resume] [--figure PNG]

Digit sorting by a pupil of a noisy teacher, 80 steps of 16 groups of 8 at the demo's learning rate; the batch of step t is sampled by
version max(0, t - S) through the worker's torch engine, and the reward is that of the current version, mean of the last 20 steps. A run
takes about 15 CPU seconds. Each is written to the file when it ends; with `--resume` those that are there are not run again. Exit code 0
all claims hold, 1 one does not, 3 runs are missing for one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from coordinator.demo.job import TOY_ALGORITHM, TOY_NEW_TOKENS
from coordinator.environments.base import EnvironmentSpec
from coordinator.environments.build import build_environment
from coordinator.learner import warm_start
from coordinator.learner.process import make_deterministic
from coordinator.learner.warm_start_lessons import RECIPES
from coordinator.wire.job import JobConfig
from tests.bench.one_process_job import Lagged, stepped
from tests.bench.reward_against_staleness_table import claims, rewards, table

LOSSES: dict[str, dict[str, Any]] = {
    "dppo": {"loss": "dppo"},
    "plain": {"loss": "ppo_clip", "dual_clip": None},
    "ppo_clip": {"loss": "ppo_clip", "dual_clip": 2.0},
    "decoupled": {"loss": "decoupled"},
}
SHARED = {name: value for name, value in TOY_ALGORITHM.items() if name not in ("loss", "dual_clip")}
RECIPE, TAUGHT_BY = "noisy_digit_sort", 1
STEPS, LAST = 80, 20
FAILED, INCOMPLETE, WRONG = 1, 3, 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run."""

    loss: str
    bound: int
    seed: int


def main() -> int:
    """The exit code."""
    options = _parser().parse_args()
    store = Path(options.json)
    if store.exists() and not options.resume:
        sys.stderr.write(f"--json {store} exists: add --resume to go on with it, or name another file\n")
        return WRONG
    make_deterministic()
    model = _model(store.with_suffix(".model"))
    settings = settings_of(model)
    kept = _kept(store)
    if kept is not None and kept["settings"] != settings:
        sys.stderr.write(f"--json {store} holds runs with other settings ({kept['settings']}): name another file\n")
        return WRONG
    runs: list[dict[str, Any]] = [] if kept is None else kept["runs"]
    for run in _carried_out([one for one in _wanted(options) if not _is_done(one, runs)], runs, model, options.jobs):
        runs.append(run)
        _keep(store, {"settings": settings, "runs": sorted(runs, key=_order)})
        sys.stdout.write(f"{run['loss']} S={run['S']} seed {run['seed']}: {run['reward']:.3f} ({run['cpu_s']:.0f} CPU s)\n")
        sys.stdout.flush()
    return show(sorted(runs, key=_order), options.seeds, Path(options.figure) if options.figure else None)


def show(runs: Sequence[Mapping[str, Any]], seeds: int, figure: Path | None) -> int:
    """Print table and claims, draw; the exit code."""
    sys.stdout.write("\n".join(table(runs)) + "\n\n")
    found = claims(rewards(runs), seeds)
    for claim in found:
        sys.stdout.write(f"{'open' if claim.holds is None else 'holds' if claim.holds else 'FAILS'}: {claim.words}\n")
    if figure is not None:
        from tests.bench.reward_against_staleness_figure import draw

        draw(runs, figure)
    if any(claim.holds is False for claim in found):
        return FAILED
    return INCOMPLETE if any(claim.holds is None for claim in found) else 0


def settings_of(model: Path) -> dict[str, Any]:
    """What the runs have in common; runs of other settings do not go into the same file."""
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    return {
        "recipe": RECIPE,
        "taught_by": TAUGHT_BY,
        "model": digest,
        "steps": STEPS,
        "last": LAST,
        "algorithm": SHARED,
        "losses": LOSSES,
    }


def config_of(wanted: Wanted, steps: int = STEPS) -> JobConfig:
    """The job of a run."""
    return JobConfig.model_validate(
        {
            "name": f"{wanted.loss}-{wanted.bound}-{wanted.seed}",
            "model": "warm-start",
            "seed": wanted.seed,
            "environment": {"type": "digit_sort"},
            "algorithm": {**SHARED, **LOSSES[wanted.loss]},
            "staleness": {"max": wanted.bound},
            "sampling": {"max_new_tokens": TOY_NEW_TOKENS},
            "budget": {"steps": steps},
        }
    )


def carried_out(wanted: Wanted, model: Path, steps: int = STEPS, last: int = LAST) -> dict[str, Any]:
    """One run from the warm start to the end."""
    make_deterministic()
    begun = time.process_time()
    config = config_of(wanted, steps)
    environment = build_environment(EnvironmentSpec("digit_sort", wanted.seed, str(model)))
    job = Lagged(model, config, environment, wanted.bound, measured_from=steps - last)
    with tempfile.TemporaryDirectory(prefix="reward-against-staleness-") as folder:
        taken = list(stepped(job, Path(folder)))
    late = [one.figures for one in taken[-last:]]
    return {
        "loss": wanted.loss,
        "S": wanted.bound,
        "seed": wanted.seed,
        "reward": fmean(one.current_reward for one in taken if one.current_reward is not None),
        "reward_of_batches": [
            round(fmean(one.figures["reward/all/mean"] for one in taken[at : at + 10]), 4) for at in range(0, steps, 10)
        ],
        "kl": fmean(one["mismatch_kl/all/mean"] for one in late),
        "effective_samples": fmean(one["effective_sample_size"] for one in late),
        "ratio_max": max(one.figures["ratio/all/max"] for one in taken),
        "grad_norm_max": max(one.figures["optim/grad_norm"] for one in taken),
        "cpu_s": round(time.process_time() - begun, 1),
    }


def shared_run(wanted: Wanted, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A run that was done under the name of the other clip and is the same bit for bit: no ratio ever reached the dual clip."""
    other = {"plain": "ppo_clip", "ppo_clip": "plain"}.get(wanted.loss)
    for run in runs:
        is_same = (run["loss"], run["S"], run["seed"]) == (other, wanted.bound, wanted.seed)
        if is_same and run["ratio_max"] < LOSSES["ppo_clip"]["dual_clip"]:
            return {**run, "loss": wanted.loss, "cpu_s": 0.0, "same_as": other}
    return None


def _carried_out(wanted: Sequence[Wanted], done: list[dict[str, Any]], model: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """The runs as they end; `done` grows meanwhile."""
    if jobs == 1:
        for one in wanted:
            yield shared_run(one, done) or carried_out(one, model)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(carried_out, wanted, [model] * len(wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--losses", nargs="*", choices=tuple(LOSSES), default=tuple(LOSSES))
    parser.add_argument("--bounds", type=_bounds, default=(0, 1, 3, 6, 11), help="S, as in 0,1,3,6,11")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes; with more than one, equal runs of two losses are not shared"
    )
    parser.add_argument("--json", default="reward_against_staleness.json", help="runs, and beside it the warm start (.model)")
    parser.add_argument("--resume", action="store_true", help="go on with the file")
    parser.add_argument("--figure", default="", help="PNG to draw")
    return parser


def _bounds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _wanted(options: argparse.Namespace) -> list[Wanted]:
    return [Wanted(loss, bound, seed) for loss in options.losses for bound in options.bounds for seed in range(options.seeds)]


def _is_done(wanted: Wanted, runs: Sequence[Mapping[str, Any]]) -> bool:
    return any((run["loss"], run["S"], run["seed"]) == (wanted.loss, wanted.bound, wanted.seed) for run in runs)


def _order(run: Mapping[str, Any]) -> tuple[int, int, int]:
    return list(LOSSES).index(run["loss"]), run["S"], run["seed"]


def _model(directory: Path) -> Path:
    if not directory.exists():
        warm_start.make(directory, seed=TAUGHT_BY, progress=lambda *_: None, recipe=RECIPES[RECIPE])
    return directory


def _kept(store: Path) -> dict[str, Any] | None:
    return json.loads(store.read_text()) if store.exists() else None


def _keep(store: Path, content: Mapping[str, Any]) -> None:
    fresh = store.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(store)


if __name__ == "__main__":
    sys.exit(main())
