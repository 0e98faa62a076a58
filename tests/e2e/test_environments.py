"""Environments in whole jobs: tasks of other projects on the torch engine, several rewards, and completions that cannot be graded."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, scripted_job

# What hostile code of an author does, by the first letter of a completion: it hangs, forks, takes memory, writes, connects, dies or forges a result.
DEEDS = """
import os, socket

def forge(numbers):
    forged = b'{"id":"0","graded":[["scored",5000.0,"forged",""]],"metrics":{}}'
    for number in numbers:
        try: os.write(number, len(forged).to_bytes(4, "little") + forged)
        except OSError: pass

def deed(said):
    letter = ord(said[0]) % 16 if said else 15
    if letter == 0:
        while True: pass
    if letter == 1: os.fork()
    if letter == 2: kept = [bytes(64 << 20) for _ in range(1000)]
    if letter == 3: open("/tmp/echo2-environment-stolen", "w")
    if letter == 4: socket.create_connection(("127.0.0.1", 22), timeout=1)
    if letter == 5: os._exit(3)
    if letter == 6: forge(range(3, 64))
    if letter == 7: os.kill(os.getpid(), 19)

def digit_share(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)
"""
# The first reward gives variance to any model.
REWARDS = (
    DEEDS
    + """
def digits(completions, **_):
    return [digit_share(text) for text in completions]

def hostile(completions, **_):
    forge((1, 2))
    deed(completions[0])
    return [0.0 for _ in completions]
"""
)


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


# Of several turns: its own environment asks twice, offers a tool, and a stop and a reward look at the whole trace. The share of digits varies.
QUIZ = """
import verifiers.v1 as vf

class Sums(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        return a + b

class QuizTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Sums(vf.ToolsetConfig())]

    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        said = "".join(m.content or "" for m in trace.assistant_messages)
        return sum(c.isdigit() for c in said) / max(len(said), 1)

class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield QuizTask(vf.TaskData(prompt=f"{n} + {n}?"), self.config.task)

class QuizConfig(vf.EnvConfig):
    student: vf.AgentConfig = vf.AgentConfig()

class QuizEnv(vf.Env[QuizConfig]):
    async def run(self, task, agents):
        async with agents.student.interaction(task) as talk:
            await talk.turn()
            await talk.turn("twice that?")

__all__ = ["QuizTaskset", "QuizEnv"]
"""
# The same deeds, now in a rollout's second turn.
ROLLOUT = (
    DEEDS
    + """
async def rollout(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    for number in range(3):
        reply = await client.chat.completions.create(messages=messages)
        said = reply.choices[0].message.content
        messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
        if number == 1:
            deed(said)
    return digit_share(said)
"""
)
# One letter a token, and turns that end as the model ends them.
TEMPLATE = (
    "{% if tools %}tools {{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}. {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + {n} =", "answer": 2 * n}) + "\n" for n in range(20)))
    made = scripted_job(tiny_model, budget={"steps": 3})
    made["algorithm"] = {**made["algorithm"], "group_size": 4}
    return made


def metrics(cluster: Cluster, job_id: str) -> set[str]:
    return {name for (name,) in cluster.rows("SELECT DISTINCT name FROM metrics WHERE job_id = ?", job_id)}


def trained(cluster: Cluster, job: dict[str, Any], *, within_s: float) -> tuple[str, dict[str, Any]]:
    """The id of a job that ended with its three steps, and its audit, which found nothing."""
    job_id = cluster.submit(job)
    ended = cluster.until_ended(job_id, within_s=within_s, restart=False)
    assert (ended["state"], ended["committed_steps"]) == ("completed", 3), ended["reason"]
    report = cluster.audit(job_id)
    assert report["ok"], report["findings"]
    return job_id, report


def outcomes(cluster: Cluster, job_id: str) -> Counter[str]:
    return Counter(state for (state,) in cluster.rows("SELECT state FROM rollouts WHERE job_id = ?", job_id))


def was_contained(cluster: Cluster, job_id: str) -> None:
    """Some rollouts could not be graded, and none of what was tried is a score or left a trace."""
    states = outcomes(cluster, job_id)
    print(f"\nrollouts by outcome: {dict(states)}")
    assert states["grader_failed"] + states["grader_timeout"] > 0
    assert max(reward for (reward,) in cluster.rows("SELECT reward FROM rollouts WHERE reward IS NOT NULL")) <= 1.0
    assert not Path("/tmp/echo2-environment-stolen").exists()


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
            job_id, _ = trained(cluster, {**job, "name": name, "environment": section}, within_s=180)
            assert {f"reward/logged/{metric}" for metric in METRICS[name]} <= metrics(cluster, job_id)
            states = outcomes(cluster, job_id)
            print(f"\n{name}: {dict(states)}")
            assert states["scored"] >= 3 * 2 * 4


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
        job_id, _ = trained(cluster, job, within_s=120)
        was_contained(cluster, job_id)


def turns_of_scored(cluster: Cluster, job_id: str) -> Counter[int]:
    """Scored rollouts by the number of their turns."""
    rows = cluster.rows("SELECT turn FROM rollouts WHERE job_id = ? AND reward IS NOT NULL", job_id)
    return Counter(turn + 1 for (turn,) in rows)


@pytest.mark.long
def test_rollouts_of_several_turns_train_a_model(tmp_path: Path, job: dict[str, Any], tiny_model: Path) -> None:
    """A real package for verifiers with its own environment and a tool, and the built-in one, on the torch engine."""
    pytest.importorskip("verifiers", reason="the extra for verifiers is not installed")
    installed, model = tmp_path / "installed", tmp_path / "chat"
    installed.mkdir()
    (installed / "echo2_quiz.py").write_text(QUIZ)
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    sections = {
        "quiz": {"type": "verifiers:echo2_quiz", "max_turns": 4, "turn_tokens": 8},
        "guess": {"type": "guess_number", "max_turns": 3, "turn_tokens": 8},
    }
    with Cluster(tmp_path, variables={"PYTHONPATH": str(installed)}) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w", engine="torch", options=("--slots", "8"))
        for name, section in sections.items():
            made = {**job, "model": str(model), "name": name, "environment": section, "sampling": {"max_new_tokens": 120}}
            made["checkpoints"] = {"every_steps": 3, "eval_every_steps": 3, "eval_prompts": 5}
            job_id, report = trained(cluster, made, within_s=300)
            states, turns = outcomes(cluster, job_id), turns_of_scored(cluster, job_id)
            print(
                f"\n{name}: rollouts {dict(states)}, scored ones by turns {dict(turns)}, turns that went on {report['counts']['turns']}"
            )
            assert states["scored"] >= 3 * 2 * 4
            assert max(turns) >= 2
            assert {"reward/logged/turns", "reward/logged/guess/turns"} & metrics(cluster, job_id)
        held_out = dict(cluster.rows("SELECT step, value FROM metrics WHERE job_id = ? AND name = 'eval/all/count'", job_id))
        assert held_out == {0: 5.0, 3: 5.0}  # of guess_number, before and after; the package has no held-out split
        assert {"eval/all/mean", "eval/all/mean_turns"} <= metrics(cluster, job_id)


@pytest.mark.long
def test_a_job_goes_on_when_rollouts_of_several_turns_misbehave(tmp_path: Path, job: dict[str, Any]) -> None:
    """Loops, forks, memory, files, sockets, exits and forged results in a second turn: none is a score, and the job ends as planned."""
    code = tmp_path / "play.py"
    code.write_text(ROLLOUT)
    job["environment"] = {
        "type": f"python:{code}:rollout",
        "train": str(tmp_path / "rows.jsonl"),
        "max_turns": 3,
        "turn_tokens": 6,
        "grade_timeout_s": 1.0,
    }
    job["sampling"] = {"max_new_tokens": 60}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w")
        job_id, _ = trained(cluster, job, within_s=300)
        was_contained(cluster, job_id)
        assert set(turns_of_scored(cluster, job_id)) == {3}
