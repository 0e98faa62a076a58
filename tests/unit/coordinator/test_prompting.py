"""Prompts that no worker could finish are passed over before they are issued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.domain.model import Job, JobState
from coordinator.service.ports import EnvironmentBroken, Prompt
from coordinator.service.prompting import context_tokens, fits, fitting_prompts
from coordinator.wire.job import JobConfig


class Lengths:
    """A data plane whose prompt i has `lengths[i]` tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    async def prompts(self, split: str, indices: Sequence[int]) -> list[Prompt]:
        assert split == "train"
        return [Prompt(index, tuple(range(self._lengths[index])), "") for index in indices]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A model with a context of 20, completions of up to 10."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 20}))
    sections = {"environment": {"type": "digit_sort"}, "sampling": {"max_new_tokens": 10}, "budget": {"steps": 1}}
    config = JobConfig.model_validate({"name": "j", "model": "m", **sections})
    return Job("j", "j", "t", config, JobState.RUNNING, "", 0, 0, str(tmp_path))


def test_context_of_a_model(tmp_path: Path) -> None:
    """From config.json; unknown where it does not tell."""
    assert context_tokens(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    assert context_tokens(tmp_path) == 256
    (tmp_path / "config.json").write_text("[]")
    assert context_tokens(tmp_path) is None


def test_exactly_the_context_fits() -> None:
    """One token more does not."""
    prompt = Prompt(17, tuple(range(200)), "...")
    assert fits(prompt, new_tokens=56, context=256)
    assert not fits(prompt, new_tokens=57, context=256)
    assert fits(prompt, new_tokens=10**6, context=None)


async def test_the_next_that_fits_takes_the_place(job: Job) -> None:
    """Prompts 1, 2 and the last are too long; the search goes round the end of the data set."""
    plane = Lengths([10, 11, 30, 9, 11])
    found, passed_over = await fitting_prompts(plane, job, {7: 0, 8: 1, 9: 4}, 5)
    assert {number: prompt.index for number, prompt in found.items()} == {7: 0, 8: 3, 9: 0}
    assert sorted(passed_over) == [1, 2, 4]


async def test_a_data_set_of_long_prompts_is_broken(job: Job) -> None:
    """The words name the setting and the fix."""
    with pytest.raises(EnvironmentBroken, match=r"max_new_tokens 10 .*context of 20; shorten the prompts, or lower"):
        await fitting_prompts(Lengths([11] * 3), job, {0: 0}, 3)
