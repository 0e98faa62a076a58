"""`echo2 demo` as a user runs it, small: every option works and the report holds what it promises."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.domain.countdown import is_right, problem

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent
PROMISED = {
    "steps",
    "S",
    "max_staleness",
    "reward_first10",
    "reward_last10",
    "greedy_before",
    "greedy_after",
    "workers_contributing",
    "learner_utilisation",
    "admitted",
    "rejected",
    "wall_s",
}


def demo(out: Path, *options: str, timeout_s: float = 240) -> dict[str, object]:
    """Run the demo; its report."""
    env = {"PATH": os.environ["PATH"], "HOME": str(out.parent), "OMP_NUM_THREADS": "1"}
    command = [BIN / "echo2", "demo", "--out", out, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = json.loads(done.stdout)
    assert shown == json.loads((out / "report.json").read_text())
    assert (out / "report.png").stat().st_size > 10_000
    return shown


@pytest.mark.parametrize(("staleness", "steps", "options"), [(0, 4, ()), (2, 15, ("--kill-a-worker",))])
def test_small_demo(staleness: int, steps: int, options: tuple[str, ...], tmp_path: Path, tiny_model: Path) -> None:
    """A brought model and a Python reward; S = 0, and a killed worker."""
    environment = f"python:{HERE / 'rewards.py'}:digit_share"
    brought = ("--model", str(tiny_model), "--environment", environment, "--train", str(HERE / "prompts.jsonl"))
    report = demo(
        tmp_path / "out", "--steps", str(steps), "--workers", "2", "--staleness", str(staleness), "--seed", "3", *brought, *options
    )
    assert set(report) >= PROMISED
    assert (report["steps"], report["S"]) == (steps, staleness)
    assert report["max_staleness"] <= staleness
    assert report["admitted"] == steps * 16
    assert report["audit_ok"] is True
    assert report["killed_worker"] == ("worker-1" if options else None)
    (figures,) = (tmp_path / "out").rglob("metrics.jsonl")
    said = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [line["step"] for line in said] == list(range(steps + 1))  # the last line is the final evaluation's
    assert all({"reward/all/mean", "entropy/all/mean", "optim/grad_norm"} <= set(line) for line in said[:steps])


@pytest.mark.long
def test_the_whole_demo(tmp_path: Path) -> None:
    """What `make demo` promises: the reward rises by at least 0.20, greedy accuracy ends at 0.80 or more, four workers contribute."""
    report = demo(tmp_path / "out", timeout_s=900)
    assert report["reward_last10"] - report["reward_first10"] >= 0.20
    assert report["greedy_after"] >= 0.80
    assert report["workers_contributing"] == 4
    assert report["max_staleness"] <= report["S"] == 3


BEGINNER = """
import sys
from pathlib import Path
from coordinator.learner import warm_start
from coordinator.learner.warm_start_lessons import RECIPES, Recipe
warm_start.make(Path(sys.argv[1]), seed=1, progress=lambda *_: None, recipe=Recipe(RECIPES["countdown"].lesson, 60))
"""


def test_countdown_starts_and_its_rewards_are_right(tmp_path: Path) -> None:
    """Two steps with a beginner of the recipe's teacher; every stored reward is what the rules say of the stored text."""
    beginner = tmp_path / "beginner"
    subprocess.run([sys.executable, "-c", BEGINNER, beginner], check=True, env={"OMP_NUM_THREADS": "1"})
    report = demo(tmp_path / "out", "--steps", "2", "--workers", "1", "--environment", "countdown", "--model", str(beginner))
    assert (report["steps"], report["audit_ok"]) == (2, True)
    with closing(sqlite3.connect(tmp_path / "out" / "work" / "coordinator" / "echo2.sqlite3")) as store:
        query = (
            "select g.prompt_index, r.text, r.reward from rollouts r join groups g on g.id = r.group_id where r.state = 'scored'"
        )
        scored = store.execute(query).fetchall()
    assert len(scored) >= 2 * 16
    assert [reward for _, _, reward in scored] == [float(is_right(problem(0, "train", at), text)) for at, text, _ in scored]
    assert any(set(text) <= set("0123456789+-*()") for _, text, _ in scored)


@pytest.mark.long
def test_the_whole_countdown_recipe(tmp_path: Path) -> None:
    """What the README promises: the sampled reward rises by at least 0.10."""
    report = demo(tmp_path / "out", "--recipe", "countdown", timeout_s=1800)
    assert report["reward_last10"] - report["reward_first10"] >= 0.10
    assert report["greedy_after"] > report["greedy_before"]
    assert report["workers_contributing"] == 4
    assert report["max_staleness"] <= report["S"] == 3
