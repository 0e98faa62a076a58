"""Rollouts of several turns in jailed processes: played by the plane, contained as rewards are, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.adapters.planes import JailedPlanes
from coordinator.domain.model import Job, JobState
from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.jail import JailLimits
from coordinator.environments.plane import JailedDataPlane
from coordinator.service.deps import ServiceSettings
from coordinator.service.ports import Continued, Graded, PlayedTurn
from coordinator.wire.job import JobConfig

# A rollout that does what the model says: the tests send the name of an action.
CODE = """
import os, random, sys, time

def spin():
    while True: pass

def stubborn():
    import signal
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: pass

def fork(): os.fork()

def allocate():
    kept = []
    while True: kept.append(bytes(64 << 20))

def write_outside(): open(OUTSIDE + "/stolen", "w")

def read_outside(): open(OUTSIDE + "/secret").read()

def connect():
    import socket
    socket.create_connection(("127.0.0.1", 22), timeout=1)

def die(): os._exit(0)

def leave(): sys.exit(3)

def forge():
    answer = b'{"id":"0","graded":[["scored",5000.0,"forged",""]],"metrics":{}}'
    for number in range(64):
        try: os.write(number, len(answer).to_bytes(4, "little") + answer)
        except OSError: pass

def stop_itself(): os.kill(os.getpid(), 19)

def oversized():
    for number in range(3, 64):
        try: os.write(number, b"\\xff\\xff\\xff\\x7f")
        except OSError: pass
    time.sleep(60)

def signal_parent():
    import fcntl
    readable, _ = os.pipe()
    fcntl.fcntl(readable, fcntl.F_SETOWN, os.getppid())

def surrogates(): raise ValueError("half \\ud800 and \\x00")

def place_outside_the_vocabulary():
    import coordinator.environments.replay as replay
    replay.Replay._reply = lambda self, number, given, tools: replay.Asked((10**9,))

def go_on_for_ever():
    import coordinator.environments.replay as replay
    replay.Replay._check_limits = lambda self, number, asked: None

async def rollout(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(reply.choices[0].message)
        said = reply.choices[0].message.content
        if said == "end":
            return {"score": len(messages) / 2, "luck": random.random()}
        if said == "none":
            return None
        if said == "text":
            return "great"
        if said in globals():
            globals()[said]()
        messages.append({"role": "user", "content": f"heard {said}"})
"""
LIMITS = JailLimits(address_space_bytes=1 << 30)


@pytest.fixture
async def plane(tmp_path: Path, made: ModuleType) -> Any:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    file = tmp_path / "play.py"
    file.write_text(f"OUTSIDE = {str(outside)!r}\n{CODE}")
    environment = {"type": "python:play.py:rollout", "max_turns": 3, "grade_timeout_s": 2.0}
    started = made.make_plane(
        made.write_model(tmp_path / "model"),
        environment=environment,
        limits=LIMITS,
        train=made.write_rows(tmp_path / "rows.jsonl", [{"prompt": "say"}]),
        code=file,
    )
    await started.start()
    yield started
    await started.close()
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def play(plane: JailedDataPlane, made: ModuleType, *texts: str) -> Graded | Continued:
    """The environment's last word when the model says these."""
    (prompt,) = await plane.prompts("train", [0])
    turns: list[PlayedTurn] = []
    said: Graded | Continued = Continued(())
    for text in texts:
        if turns:
            assert isinstance(said, Continued), said
            turns[-1] = replace(turns[-1], placed=said.token_ids)
        turns.append(PlayedTurn(tuple(made.ids_of(text)), "stop"))
        said = await plane.play("train", 0, prompt.token_ids, turns)
    return said


def graded(said: Graded | Continued) -> tuple[str, float | None]:
    assert isinstance(said, Graded), said
    return said.outcome, said.reward


async def test_a_rollout_is_played_to_its_score(plane: JailedDataPlane, made: ModuleType) -> None:
    said = await play(plane, made, "hi", "end")
    assert graded(said) == ("scored", 2.0)
    assert isinstance(said, Graded)
    assert said.text == "hi<eos>\n<|user|>\nheard hi<eos>\n<|assistant|>\nend<eos>"
    assert 0 <= plane.reward_metrics()["luck"] < 1
    assert graded(await play(plane, made, "none")) == ("unscored", None)
    assert graded(await play(plane, made, "text")) == ("failed", None)


QUICK: Sequence[tuple[str, str]] = (
    ("fork", "failed"),
    ("allocate", "failed"),
    ("die", "failed"),
    ("forge", "failed"),
    ("surrogates", "failed"),
)
HOSTILE: Sequence[tuple[str, str]] = (
    *QUICK,
    ("spin", "timeout"),
    ("stubborn", "timeout"),
    ("write_outside", "failed"),
    ("read_outside", "failed"),
    ("connect", "failed"),
    ("leave", "failed"),
    ("stop_itself", "timeout"),
    ("oversized", "failed"),
    ("signal_parent", "failed"),
)


@pytest.mark.parametrize("actions", [QUICK, pytest.param(HOSTILE, marks=pytest.mark.long)], ids=["some", "all"])
async def test_a_hostile_rollout_is_contained_and_the_plane_goes_on(
    plane: JailedDataPlane, made: ModuleType, actions: Sequence[tuple[str, str]]
) -> None:
    """Loops, forks, memory, files, sockets, exits and forged results: each an outcome of its own, never a score."""
    for action, outcome in actions:
        said = await play(plane, made, action)
        assert graded(said) == (outcome, None), action
        said.detail.encode()  # type: ignore[union-attr]  # a database can hold it
        assert graded(await play(plane, made, "end")) == ("scored", 1.0), f"after {action}"


async def test_the_parent_trusts_no_child_about_limits_or_the_vocabulary(plane: JailedDataPlane, made: ModuleType) -> None:
    """Author code can change the code around it, in its own process."""
    said = await play(plane, made, "hi", "hi", "go_on_for_ever")
    assert graded(said) == ("failed", None)
    assert "beyond environment.max_turns" in said.detail  # type: ignore[union-attr]
    said = await play(plane, made, "place_outside_the_vocabulary")
    assert graded(said) == ("failed", None)
    assert "tokens of the vocabulary" in said.detail  # type: ignore[union-attr]


async def test_guess_number_is_won_by_halving(tmp_path: Path, made: ModuleType) -> None:
    """Seven guesses find any number up to 99."""
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment={"type": "guess_number", "max_turns": 7})
    info = await plane.start()
    assert (info.train_prompts, info.eval_prompts) == (None, 99)
    (prompt,) = await plane.prompts("train", [5])
    low, high, turns = 1, 99, list[PlayedTurn]()
    while True:
        guess = (low + high) // 2
        turns.append(PlayedTurn(tuple(made.ids_of(f"it is {guess}")), "stop"))
        said = await plane.play("train", 5, prompt.token_ids, turns)
        if isinstance(said, Graded):
            break
        turns[-1] = replace(turns[-1], placed=said.token_ids)
        words = "".join(made.CHARACTERS[token - 4] for token in said.token_ids if token >= 4)
        low, high = (guess + 1, high) if "higher" in words else (low, guess - 1)
    assert graded(said) == ("scored", 1 / len(turns))
    assert plane.reward_metrics() == {"guess/turns": float(len(turns)), "guess/found": 1.0}
    (prompt,) = await plane.prompts("eval", [41])
    said = await plane.play("eval", 41, prompt.token_ids, [PlayedTurn(tuple(made.ids_of("42")), "stop")])
    assert graded(said) == ("scored", 1.0)
    assert plane.reward_metrics()["guess/turns"] == len(turns), "held-out figures are none of training's"
    await plane.close()


async def test_a_template_s_date_is_the_job_s_own(tmp_path: Path, made: ModuleType) -> None:
    """Else every rollout that is under way at midnight would read another opening than it began with."""
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    model = made.write_model(tmp_path / "m", chat_template=template)
    values = {
        "name": "dated",
        "model": "m",
        "environment": {"type": "guess_number", "max_turns": 2},
        "algorithm": {"group_size": 2, "groups_per_step": 1},
        "workers": {"engines": ["scripted"]},
        "budget": {"steps": 1},
    }
    submitted = 365 * 86_400.0
    job = Job("j", "dated", "u", JobConfig.model_validate(values), JobState.RUNNING, "", submitted, submitted, str(model))
    plane = JailedPlanes(ServiceSettings(data_dir=tmp_path), processes=1).plane(job)
    await plane.start()
    (prompt,) = await plane.prompts("train", [0])
    assert prompt.text.startswith("01 Jan 1971")
    await plane.close()


async def test_single_and_several_turns_mix(tmp_path: Path, made: ModuleType) -> None:
    environment = {
        "type": "guess_number",
        "max_turns": 2,
        "sources": [{"name": "guess"}, {"name": "sort", "type": "digit_sort"}],
    }
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=environment)
    info = await plane.start()
    assert (info.train_prompts, info.eval_prompts) == (None, 99 + 1024)
    prompts = await plane.prompts("train", range(6))
    sorts = [prompt for prompt in prompts if "Guess" not in prompt.text]
    assert 0 < len(sorts) < 6
    digits = "".join(sorted(letter for letter in sorts[0].text if letter.isdigit()))
    said = await plane.play("train", sorts[0].index, sorts[0].token_ids, [PlayedTurn(tuple(made.ids_of(digits)), "stop")])
    assert graded(said) == ("scored", 1.0)
    await plane.close()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"type": "guess_number"}, "takes several turns: set environment.max_turns"),
        ({"type": "digit_sort", "max_turns": 3}, "asks for one completion only"),
    ],
)
async def test_turns_must_be_allowed_exactly_where_they_are_taken(
    tmp_path: Path, made: ModuleType, environment: dict[str, object], words: str
) -> None:
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=environment)
    with pytest.raises(EnvironmentBroken, match=words):
        await plane.start()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def reward(client, row): return 1.0", "write `async def rollout"),
        ("async def reward(client): return 1.0", r"must take \(client, row\)"),
        ("async def reward(client, row): return 1.0", "has no first request: the function returned without asking the model"),
        ("async def reward(client, row): raise ValueError('bad row')", "has no first request: ValueError: bad row"),
    ],
)
async def test_a_function_that_cannot_be_played_stops_the_job_at_its_start(
    tmp_path: Path, made: ModuleType, code: str, words: str
) -> None:
    plane = made.reward_plane(tmp_path, code, environment={"max_turns": 3})
    with pytest.raises(EnvironmentBroken, match=words):
        await plane.start()


def test_sections_that_do_not_go_together_are_refused() -> None:
    from pydantic import ValidationError

    from coordinator.wire.environment import EnvironmentConfig

    for more, words in (
        ({"turn_tokens": 4}, "set environment.max_turns too"),
        ({"max_turns": 2, "rewards": [{"type": "math"}]}, "scores its rollouts itself"),
        ({"max_turns": 2, "grade_whole_groups": True}, "grade_whole_groups looks at single completions"),
    ):
        with pytest.raises(ValidationError, match=words):
            EnvironmentConfig.model_validate({"type": "guess_number", **more})
