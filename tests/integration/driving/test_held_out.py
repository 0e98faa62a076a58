"""Held-out evaluation of environments that take several turns, with real environments in the jail and a learner whose words are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.domain.model import Event, Lease, Metric, Rollout
from coordinator.service.deps import Deps
from coordinator.service.evaluating import evaluate
from coordinator.service.job_ports import LearnerLost
from coordinator.wire import learner_link as link
from tests.factories_environments import CHARACTERS, EOS, SPECIALS, ids_of, make_plane, write_model, write_rows
from tests.integration.driving.scene import config, row, submit

NEW_TOKENS, TURN_TOKENS = 400, 12


class SpokenLearner:
    """Says what `speak` makes of a record's text, within its limit. `asked`: the requests."""

    def __init__(self, speak: Callable[[str], str], *, version: int = 0) -> None:
        self._speak = speak
        self._version = version
        self.asked: list[link.Evaluate] = []

    async def ask(self, request: link.Request, *, deadline_s: float) -> link.Answer:
        assert isinstance(request, link.Evaluate)
        self.asked.append(request)
        said = [
            tuple(ids_of(self._speak(text_of(prompt)))[:most])
            for prompt, most in zip(request.prompts, request.max_new_tokens, strict=True)
        ]
        return link.Evaluated(fence=request.fence, version=self._version, completions=tuple(said))

    async def close(self) -> None:
        """Nothing runs."""


def text_of(ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[token - len(SPECIALS)] for token in ids if token >= len(SPECIALS))


def halving(record: str) -> str:
    """The middle of what the answers leave of 1 to 99, two digits."""
    low, high = 1, 99
    for place, line in enumerate(lines := record.splitlines()):
        if line in ("higher", "lower"):
            guess = int(lines[place - 2].strip())
            low, high = (guess + 1, high) if line == "higher" else (low, guess - 1)
    return f"{(low + high) // 2:02d}"


async def evaluated(
    deps: Deps, tmp_path: Path, environment: dict[str, Any], learner: SpokenLearner, *, count: int, **files: Path
) -> dict[str, float]:
    """The figures of one evaluation, from the rows."""
    job = await row(deps, await submit(deps, config(environment=environment, sampling={"max_new_tokens": NEW_TOKENS})))
    job = replace(job, vocab_size=len(SPECIALS) + len(CHARACTERS), stop_token_ids=(EOS,))
    plane = make_plane(write_model(tmp_path / "model"), environment=environment, new_tokens=NEW_TOKENS, **files)  # type: ignore[arg-type]
    await plane.start()
    try:
        await evaluate(deps, learner, plane, job, count=count, deadline_s=10.0)  # type: ignore[arg-type]
    finally:
        await plane.close()
    metrics = await deps.store.read(lambda r: r.select(Metric, job_id=job.id))
    assert {metric.step for metric in metrics} <= {job.committed_steps}
    for kind in (Rollout, Lease):
        assert await deps.store.read(lambda r, kind=kind: r.count(kind)) == 0, "nothing of it is leased, paid or trained"
    return {metric.name.removeprefix("eval/all/"): metric.value for metric in metrics}


async def test_a_policy_of_known_skill_gets_its_own_mean(deps: Deps, tmp_path: Path) -> None:
    """Halving finds 1, 2, 4, 8, 16, 32 of the 99 numbers with guess 1 to 6, and the other 36 with the seventh; the k-th guess is worth 1/k."""
    learner = SpokenLearner(halving)
    environment = {"type": "guess_number", "max_turns": 7, "turn_tokens": TURN_TOKENS}
    figures = await evaluated(deps, tmp_path, environment, learner, count=99)
    assert figures["mean"] == pytest.approx((1 + 2 / 2 + 4 / 3 + 8 / 4 + 16 / 5 + 32 / 6 + 36 / 7) / 99)
    turns = (1 + 2 * 2 + 3 * 4 + 4 * 8 + 5 * 16 + 6 * 32 + 7 * 36) / 99
    assert figures["mean_turns"] == pytest.approx(turns)
    assert figures["mean_length"] == pytest.approx(3 * turns)  # two digits and the end token; the environment's words do not count
    assert (figures["count"], figures["failed"]) == (99.0, 0.0)
    assert [len(request.prompts) for request in learner.asked] == [99, 98, 96, 92, 84, 68, 36]
    (event,) = await deps.store.read(lambda r: r.select(Event, kind="evaluated"))
    assert event.data["version"] == 0
    assert event.data["eval/all/mean"] == figures["mean"]


ROLLOUT = """
async def rollout(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = await client.chat.completions.create(messages=messages)
        said = reply.choices[0].message.content
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        if said == "crash":
            raise ValueError("a bad word")
        if said == "none":
            return None
        if said != "more":
            return {"score": float(said), "logged": 1.0}
"""


async def test_what_has_no_score_is_counted_and_never_averaged(deps: Deps, tmp_path: Path) -> None:
    """A half, a quarter after a second turn, an error, one that does not apply, and one that never ends."""
    code = tmp_path / "play.py"
    code.write_text(ROLLOUT)
    said = {"half": "0.5", "twice": "more", "crash": "crash", "none": "none", "endless": "more"}

    def speak(record: str) -> str:
        return "0.25" if "twice" in record and "go on" in record else said[next(word for word in said if word in record)]

    learner = SpokenLearner(speak)
    rows = write_rows(tmp_path / "eval.jsonl", [{"prompt": word} for word in said])
    train = write_rows(tmp_path / "train.jsonl", [{"prompt": "half"}])
    environment = {"type": "python:play.py:rollout", "train": "train.jsonl", "eval": "eval.jsonl", "max_turns": 3}
    figures = await evaluated(deps, tmp_path, environment, learner, count=5, train=train, eval=rows, code=code)
    assert (figures["count"], figures["failed"], figures["mean"]) == (2.0, 3.0, 0.375)
    assert figures["mean_turns"] == (1 + 2 + 1 + 1 + 3) / 5
    (event,) = await deps.store.read(lambda r: r.select(Event, kind="evaluated"))
    assert event.data["first_failure"].startswith("ValueError: a bad word")
    first, second, third = (request.max_new_tokens for request in learner.asked)
    assert first == (NEW_TOKENS,) * 5
    assert len(second) == 2
    assert len(third) == 1
    placed = len("<eos>\n<|user|>\ngo on<eos>\n<|assistant|>\n") - 2 * (len("<eos>") - 1)
    assert third[0] == NEW_TOKENS - 2 * (len("more") + placed)


async def test_an_answer_of_another_version_is_none(deps: Deps, tmp_path: Path) -> None:
    with pytest.raises(LearnerLost, match="to evaluate 2 prompts at version 0"):
        await evaluated(deps, tmp_path, {"type": "guess_number", "max_turns": 2}, SpokenLearner(halving, version=1), count=2)
