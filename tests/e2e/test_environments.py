"""Environments in whole jobs: tasks of other projects on the torch engine, several rewards, and completions that cannot be graded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, scripted_job

# One reward gives variance to any model; the other hangs, dies, takes memory, forks, writes, connects or forges a result, by the completion's first letter.
REWARDS = """
import os, socket

def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def hostile(completions, **_):
    forged = b'{"id":"0","graded":[["scored",5000.0,"forged",""]],"metrics":{}}'
    for number in range(1, 64):
        try: os.write(number, len(forged).to_bytes(4, "little") + forged) if number < 3 else None
        except OSError: pass
    print(forged.decode(), flush=True)
    letter = ord(completions[0][0]) % 16 if completions[0] else 15
    if letter == 0:
        while True: pass
    if letter == 1: os.fork()
    if letter == 2: kept = [bytes(64 << 20) for _ in range(1000)]
    if letter == 3: open("/tmp/echo2-environment-stolen", "w")
    if letter == 4: socket.create_connection(("127.0.0.1", 22), timeout=1)
    if letter == 5: os._exit(3)
    return [0.0 for _ in completions]
"""


TASKSET = """
import verifiers.v1 as vf

class WordData(vf.TaskData):
    word: str = ""

class WordTask(vf.Task[WordData]):
    @vf.reward
    async def backwards(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word[::-1])

class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("abc", "bcd", "cde"):
            yield WordTask(WordData(prompt=f"Reverse {word}", word=word), self.config.task)

__all__ = ["WordTaskset"]
"""


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + {n} =", "answer": 2 * n}) + "\n" for n in range(20)))
    made = scripted_job(tiny_model, budget={"steps": 3})
    made["algorithm"] = {**made["algorithm"], "group_size": 4}
    return made


def metrics(cluster: Cluster, job_id: str) -> set[str]:
    return {name for (name,) in cluster.rows("SELECT DISTINCT name FROM metrics WHERE job_id = ?", job_id)}


def sections(code: Path, rows: Path) -> dict[str, dict[str, Any]]:
    """One task of each package with its own scorer, and a mixture. The second reward has variance for any model."""
    digits = {"type": f"python:{code}:digits", "weight": 0.5}
    gym = {"type": "reasoning_gym:chain_sum", "options": {"max_terms": 3}}
    return {
        "reasoning_gym": {**gym, "rewards": [{"type": gym["type"], "name": "own"}, digits]},
        "verifiers": {"type": "verifiers:echo2_words", "rewards": [{"type": "verifiers:echo2_words", "name": "own"}, digits]},
        "mixture": {
            "type": "dataset",
            "sources": [{"name": "gym", **gym}, {"name": "rows", "train": str(rows)}],
            "rewards": [digits],
            "grade_whole_groups": True,
        },
    }


METRICS = {
    "reasoning_gym": {"own", "digits"},
    "verifiers": {"own", "digits", "backwards"},
    "mixture": {"digits", "source/gym", "source/rows"},
}


@pytest.mark.long
def test_tasks_of_other_projects_train_a_model(tmp_path: Path, job: dict[str, Any]) -> None:
    """Real packages, the torch engine, a job each; their scorers' figures are metrics."""
    for package in ("reasoning_gym", "verifiers"):
        pytest.importorskip(package, reason=f"the extra for {package} is not installed")
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "echo2_words.py").write_text(TASKSET)
    with Cluster(tmp_path, variables={"PYTHONPATH": str(installed)}) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w", engine="torch", options=("--slots", "8"))
        for name, section in sections(tmp_path / "r.py", tmp_path / "rows.jsonl").items():
            job_id = cluster.submit({**job, "name": name, "environment": section})
            ended = cluster.until_ended(job_id, within_s=180, restart=False)
            assert (ended["state"], ended["committed_steps"]) == ("completed", 3), ended["reason"]
            assert cluster.audit(job_id)["ok"]
            assert {f"reward/logged/{metric}" for metric in METRICS[name]} <= metrics(cluster, job_id)
            rollouts = cluster.rows("SELECT state, count(*) FROM rollouts WHERE job_id = ? GROUP BY state", job_id)
            print(f"\n{name}: {dict(rollouts)}")
            assert dict(rollouts)["scored"] >= 3 * 2 * 4


@pytest.mark.long
def test_a_job_goes_on_with_ungradable_completions_counted(tmp_path: Path, job: dict[str, Any]) -> None:
    """Loops, forks, memory, files, sockets, exits and forged results: none is a score, and the job ends as planned."""
    code = tmp_path / "r.py"
    job["environment"] = {
        "type": "dataset",
        "train": str(tmp_path / "rows.jsonl"),
        "rewards": [{"type": f"python:{code}:digits"}, {"type": f"python:{code}:hostile", "weight": 1e-3}],
        "grade_timeout_s": 1.0,
    }
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w")
        job_id = cluster.submit(job)
        ended = cluster.until_ended(job_id, within_s=120, restart=False)
        assert ended["state"] == "completed", ended["reason"]
        assert cluster.audit(job_id)["ok"]
        states = Counter(state for (state,) in cluster.rows("SELECT state FROM rollouts WHERE job_id = ?", job_id))
        rewards = [reward for (reward,) in cluster.rows("SELECT reward FROM rollouts WHERE reward IS NOT NULL")]
        print(f"\nrollouts by outcome: {dict(states)}")
        assert states["grader_failed"] + states["grader_timeout"] > 0
        assert max(rewards) <= 1.0
        assert not Path("/tmp/echo2-environment-stolen").exists()
