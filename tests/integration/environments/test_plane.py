"""The data plane: prompts, grading, replacement of children, bounds, the alarm, and throughput."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments import pool as pool_module
from coordinator.environments.plane import EnvironmentBroken, PoolFull, _read, _Settled
from coordinator.environments.pool import PoolSettings
from coordinator.service.ports import DataPlane, Graded

DIGITS = {"type": "digit_sort"}
BY_NAME = """
import os, time
def reward(completions, **_):
    if completions[0] == "hang": time.sleep(60)
    if completions[0] == "bad": raise ValueError("bad")
    return [None if text == "none" else float(os.getpid()) for text in completions]
"""


async def test_prompts_and_scores_of_the_demo_task(tmp_path: Path, made: ModuleType) -> None:
    """End to end through a child: sizes, ids, text, rewards."""
    plane: DataPlane = made.make_plane(made.write_model(tmp_path / "m"), environment=DIGITS)
    info = await plane.start()
    assert (info.train_prompts, info.eval_prompts, info.stop_token_ids) == (None, 1024, (2,))
    prompts = await plane.prompts("train", [5, 0, 10**9])
    assert [prompt.index for prompt in prompts] == [5, 0, 10**9]
    for prompt in prompts:
        assert list(prompt.token_ids) == made.ids_of(prompt.text)[:-1]
        answer = "".join(sorted(prompt.text[:-1]))
        graded = await plane.grade("train", prompt.index, [made.ids_of(answer), made.ids_of(answer + "0"), [2]])
        assert [(one.outcome, one.reward) for one in graded] == [("scored", 1.0), ("scored", 0.0), ("scored", 0.0)]
        assert [one.text for one in graded] == [answer, answer + "0", ""]
    assert await plane.grade("train", 0, []) == []
    await plane.close()


async def test_wrong_questions_are_answered_in_words(tmp_path: Path, made: ModuleType) -> None:
    """An index outside the split, a split that does not exist, ids that are none."""
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=DIGITS)
    await plane.start()
    with pytest.raises(EnvironmentBroken, match="prompt 1024 of split 'eval' does not exist"):
        await plane.prompts("eval", [0, 1024])
    with pytest.raises(ValueError, match="split is 'test'"):
        await plane.prompts("test", [0])
    for index, ids in ((2000, [5]), (0, [-1]), (0, [2**40])):
        (graded,) = await plane.grade("eval", index, [ids])
        assert (graded.outcome, graded.reward) == ("failed", None)
        assert graded.detail
    assert plane.restarts == 0
    await plane.close()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"type": "maths"}, "environment.type is 'maths'"),
        ({"type": "math"}, "environment.train is absent"),
        (DIGITS | {"system_prompt": "x"}, "set environment.use_chat_template = true"),
    ],
)
async def test_a_plane_that_cannot_serve_does_not_start(
    tmp_path: Path, made: ModuleType, environment: dict[str, object], words: str
) -> None:
    """EnvironmentBroken with the child's words."""
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=environment)
    with pytest.raises(EnvironmentBroken, match=words):
        await plane.start()


async def test_reward_code_that_hangs_or_dies_at_import_does_not_start(tmp_path: Path, made: ModuleType) -> None:
    """Within the start limit."""
    settings = PoolSettings(processes=1, start_timeout_s=2)
    for code, words in [
        ("while True: pass\n", "not finished after 2 s|CPU"),
        ("import os; os._exit(7)\n", "exit code 7"),
        ("1/0", "ZeroDivisionError"),
    ]:
        plane = made.reward_plane(tmp_path, code, settings=settings)
        with pytest.raises(EnvironmentBroken, match=words):
            await plane.start()


async def test_author_metrics_and_unscored_completions_arrive(tmp_path: Path, made: ModuleType) -> None:
    """Messages in, message lists to the function, None back."""
    code = """
def reward(prompts, completions, answer, log_extra, log_metric):
    assert prompts[0][0]["role"] == "user"
    log_metric("asked", len(completions))
    log_extra("note", ["a\\ud800", "b\\x00"])
    return [None if message[0]["content"] == answer[0] else 0.5 for message in completions]
"""
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "yes"}]
    plane = made.reward_plane(tmp_path, code, rows=rows)
    await plane.start()
    (prompt,) = await plane.prompts("train", [0])
    assert prompt.text == "<bos><|user|>\nhi<eos>\n<|assistant|>\n"
    graded = await plane.grade("train", 0, [made.ids_of("yes"), made.ids_of("no")])
    assert graded == [Graded("unscored", None, "yes", "note=a?"), Graded("scored", 0.5, "no", "note=b�")]
    assert plane.reward_metrics() == {"asked": 2.0}
    assert plane.outcome_shares() == {"scored": 0.5, "unscored": 0.5, "failed": 0.0, "timeout": 0.0}
    await plane.close()


async def test_one_hung_grading_does_not_stop_the_others(tmp_path: Path, made: ModuleType) -> None:
    """Two children: while one hangs the other serves."""
    settings = PoolSettings(processes=2)
    plane = made.reward_plane(tmp_path, BY_NAME, settings=settings, environment={"grade_timeout_s": 3})
    await plane.start()
    hung = asyncio.create_task(plane.grade("train", 0, [made.ids_of("hang"), made.ids_of("fine")]))
    await asyncio.sleep(0)
    for _ in range(20):
        (graded,) = await plane.grade("train", 0, [made.ids_of("fine")])
        assert graded.outcome == "scored"
    assert not hung.done()
    assert [(one.outcome, one.reward, one.text) for one in await hung] == [("timeout", None, "hang"), ("timeout", None, "fine")]
    await plane.close()


async def test_children_are_replaced_after_their_share_of_requests(tmp_path: Path, made: ModuleType) -> None:
    """Each serves three; nothing is lost on the way."""
    plane = made.reward_plane(tmp_path, BY_NAME, settings=PoolSettings(processes=1, requests_per_child=4))  # its start is one
    await plane.start()
    pids = [(await plane.grade("train", 0, [made.ids_of("fine")]))[0].reward for _ in range(7)]
    await plane.close()
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


async def test_a_child_that_cannot_be_restarted_gives_words_not_a_wait(tmp_path: Path, made: ModuleType) -> None:
    """And grading works again once the cause is gone."""
    plane = made.reward_plane(tmp_path, BY_NAME, environment={"grade_timeout_s": 0.5})
    await plane.start()
    rows = tmp_path / "train.jsonl"
    good = rows.read_bytes()
    rows.unlink()  # a new file: the running child keeps the old one
    rows.write_text("no json")
    assert (await plane.grade("train", 0, [made.ids_of("hang")]))[0].outcome == "timeout"
    (graded,) = await plane.grade("train", 0, [made.ids_of("fine")])
    assert graded.outcome == "failed"
    assert "train.jsonl line 1 is not JSON" in graded.detail
    with pytest.raises(EnvironmentBroken, match=r"train\.jsonl line 1"):
        await plane.prompts("train", [0])
    rows.unlink()
    rows.write_bytes(good)
    assert (await plane.grade("train", 0, [made.ids_of("fine")]))[0].outcome == "scored"
    await plane.close()


async def test_the_queue_is_bounded(tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In requests and in bytes; who waits when the plane closes is told."""
    plane = made.reward_plane(tmp_path, BY_NAME, environment={"grade_timeout_s": 30})
    await plane.start()
    monkeypatch.setattr(pool_module, "QUEUE_REQUESTS", 2)
    held = [asyncio.create_task(plane.grade("train", 0, [made.ids_of("hang")])) for _ in range(3)]
    await asyncio.sleep(0.05)
    with pytest.raises(PoolFull, match="send again later"):
        await plane.grade("train", 0, [made.ids_of("fine")])
    monkeypatch.setattr(pool_module, "QUEUE_REQUESTS", 100)
    monkeypatch.setattr(pool_module, "QUEUE_BYTES", 100)
    with pytest.raises(PoolFull, match="limits 100 and 100"):
        await plane.grade("train", 0, [[5] * 20])
    await plane.close()
    assert [graded.outcome for (graded,) in await asyncio.gather(*held)] == ["failed"] * 3


async def test_the_alarm_rings_when_too_many_cannot_be_graded(tmp_path: Path, made: ModuleType) -> None:
    """Silent at first and at a small share; then with the share and the last words."""
    plane = made.reward_plane(tmp_path, BY_NAME)
    await plane.start()
    good, bad = [made.ids_of("fine")] * 10, [made.ids_of("bad")]
    await plane.grade("train", 0, bad)
    assert plane.alarm() is None
    for _ in range(4):
        await plane.grade("train", 0, good)
    assert plane.alarm() is None
    for _ in range(2):
        await plane.grade("train", 0, bad)
    alarm = plane.alarm()
    assert alarm is not None
    assert alarm.startswith("7% of the last 43 completions could not be graded")
    assert "ValueError: bad (rewards.py line 5)" in alarm
    await plane.close()


async def test_throughput_of_the_demo_task(tmp_path: Path, made: ModuleType) -> None:
    """Two children, submissions of 16: well above 1,000 completions a second."""
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=DIGITS, settings=PoolSettings(processes=2))
    await plane.start()
    completions = [made.ids_of("12345678")] * 16
    began = time.perf_counter()

    async def submit() -> None:
        for index in range(50):
            await plane.grade("train", index, completions)

    await asyncio.gather(*(submit() for _ in range(8)))
    rate = 8 * 50 * 16 / (time.perf_counter() - began)
    await plane.close()
    print(f"grading throughput: {rate:,.0f} completions/s (2 processes, submissions of 16)")
    assert rate > 1000


async def test_author_metrics_are_bounded_and_finite(tmp_path: Path, made: ModuleType) -> None:
    """New names at every call do not grow the coordinator, and what is no number is no metric."""
    plane = made.reward_plane(
        tmp_path,
        """
import itertools
numbers = itertools.count()
def reward(completions, log_metric, **_):
    for _ in range(64): log_metric(f"m{next(numbers)}", 1.0)
    return [1.0 for _ in completions]
def broken(completions, log_metric, **_):
    log_metric("bad", float("nan"))
    log_metric("worse", float("inf"))
    return [1.0 for _ in completions]
""",
    )
    await plane.start()
    try:
        for _ in range(8):
            assert (await plane.grade("train", 0, [[2]]))[0].outcome == "scored"
        assert len(plane.reward_metrics()) == 256
    finally:
        await plane.close()
    (huge,) = _read({"graded": [["scored", 1.0, "", ""]], "metrics": {"m0": 10**400}}, [1]).graded  # what no float holds
    assert (huge.outcome, huge.reward) == ("failed", None)
    plane._told("train", _Settled([], {"m0": float("nan"), "m1": 7.0}))
    assert (plane.reward_metrics()["m0"], plane.reward_metrics()["m1"]) == (1.0, 7.0)


FORGE = """
import json, socket, struct, sys
def reward(completions, **_):
    return [1.0 for _ in completions]
frame = sys._getframe()
while frame is not None and "link" not in frame.f_locals:
    frame = frame.f_back
class Forger:
    def __init__(self, link): self.link, self.send = link, link.send
    def __call__(self, message):
        self.send({**message, **ANSWER} if KIND in message else message)
frame.f_locals["link"].send = Forger(frame.f_locals["link"])
"""


@pytest.mark.parametrize(
    ("kind", "answer", "words"),
    [
        (
            "info",
            {"info": {"train_prompts": "many", "eval_prompts": 0, "vocab_size": 50, "stop_token_ids": [2]}},
            "bad description",
        ),
        ("info", {"info": {"train_prompts": 1, "eval_prompts": 0, "vocab_size": 50, "stop_token_ids": [99]}}, "bad description"),
        ("info", {"info": {}}, "bad description"),
        (
            "info",
            {"info": {"train_prompts": 10**10, "eval_prompts": 0, "vocab_size": 50, "stop_token_ids": [2]}},
            "at most 2000000 prompts",
        ),
        (
            "info",
            {"info": {"train_prompts": 1, "eval_prompts": 0, "vocab_size": 10**9, "stop_token_ids": list(range(257))}},
            "at most 256 below it",
        ),
        ("jail", {"jail": 3}, "a bad answer to its start"),
        ("jail", {"jail": {}, "broken": 3}, "a bad answer to its start"),
        ("prompts", {"prompts": [[0, [99999], "x"]]}, "outside the vocabulary"),
        ("prompts", {"prompts": [[0, ["5"], "x"]]}, "outside the vocabulary"),
        ("prompts", {"prompts": [[1, [5], "x"]]}, "others than were asked for"),
        ("prompts", {"prompts": []}, "0 prompts came"),
        ("prompts", {"prompts": 5}, "something else"),
        ("prompts", {"error": 5}, "could not be made: 5"),
    ],
)
async def test_what_author_code_forges_is_refused_in_words(
    tmp_path: Path, made: ModuleType, kind: str, answer: dict[str, object], words: str
) -> None:
    """The child may be the author's in every word it says: nothing it sends is stored or leased unchecked."""
    code = f"KIND, ANSWER = {kind!r}, {answer!r}\n{FORGE}"
    plane = made.reward_plane(tmp_path, code)
    try:
        with pytest.raises(EnvironmentBroken, match=words):
            await _first_prompt(plane)
    finally:
        await plane.close()


async def test_an_environment_that_cannot_start_says_so_in_words_that_can_be_stored(tmp_path: Path, made: ModuleType) -> None:
    """They become the job's reason."""
    plane = made.reward_plane(tmp_path, r"raise ValueError('half \ud800 and \x00')")
    with pytest.raises(EnvironmentBroken, match=r"half [?] and �"):
        await plane.start()


async def _first_prompt(plane: DataPlane) -> object:
    await plane.start()
    return await plane.prompts("train", [0])


async def test_a_child_that_cannot_be_made_leaves_no_socket_behind(
    tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No processes left, say: the loop must not go on watching a descriptor that is closed and soon another's."""

    async def none_left(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none_left)
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=DIGITS)
    with pytest.raises(OSError, match="temporarily"):
        await plane.start()
    await plane.close()
    gc.collect()  # a transport that nobody closed would warn now


async def test_a_forged_error_is_a_failure_in_words(tmp_path: Path, made: ModuleType) -> None:
    """Whatever stands there instead of words."""
    plane = made.reward_plane(tmp_path, f"KIND, ANSWER = 'graded', {{'error': ['odd']}}\n{FORGE}")
    try:
        await plane.start()
        (graded,) = await plane.grade("train", 0, [[2]])
        assert (graded.outcome, graded.detail) == ("failed", "['odd']")
    finally:
        await plane.close()
