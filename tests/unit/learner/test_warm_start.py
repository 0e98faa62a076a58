"""The demo model: its shape, its tokenizer, its lazy teacher, and that the same seed gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from coordinator.domain import countdown, digit_sort
from coordinator.learner import model, warm_start
from coordinator.learner.warm_start_lessons import RECIPES, Recipe, lazy_reckoner, lazy_sorter, noisy_sorter


@pytest.fixture(scope="module")
def made_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("warm")
    for name in ("a", "b"):
        warm_start.make(folder / name, seed=3, progress=lambda *_: None, recipe=Recipe(lazy_sorter, 2))
    return folder / "a", folder / "b"


def test_the_shape_is_the_measured_one() -> None:
    built = Qwen3ForCausalLM(warm_start.configuration())
    assert sum(parameter.numel() for parameter in built.parameters()) == 312_816
    assert len(warm_start.TOKENS) == len(set(warm_start.TOKENS)) == 82


def test_the_same_seed_gives_the_same_bytes(made_twice: tuple[Path, Path]) -> None:
    one, other = made_twice
    names = sorted(path.name for path in one.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
    assert sorted(path.name for path in one.parent.iterdir()) == ["a", "b"]


def test_the_learner_takes_it_and_knows_where_to_stop(made_twice: tuple[Path, Path]) -> None:
    policy = model.load(made_twice[0])
    assert policy.vocab_size == 82
    assert policy.stop_token_ids == (warm_start.EOS_TOKEN_ID,)


def test_the_tokenizer_is_one_token_a_character_both_ways(made_twice: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made_twice[0])
    text = "82914=12489\nAn Example: (a+b)*c/2?"
    ids = tokenizer(text)["input_ids"]
    assert ids == warm_start.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_the_lazy_sorter_mostly_copies() -> None:
    lessons = [lazy_sorter(0, index) for index in range(2000)]
    copied = sum(prompt[:-1] == answer for prompt, answer in lessons) / len(lessons)
    right = sum("".join(sorted(prompt[:-1])) == answer for prompt, answer in lessons) / len(lessons)
    assert copied == pytest.approx(0.65, abs=0.04)
    assert 0.2 < right < 0.35
    assert lessons[5][0] == digit_sort.problem(0, "warm", 5)[0]


def test_the_noisy_sorter_swaps_neighbours() -> None:
    """The digits stay; four different ones have three places to swap, each of them kept with a chance of 0.75."""
    lessons = [noisy_sorter(0, index) for index in range(4000)]
    assert all(sorted(prompt[:-1]) == sorted(answer) for prompt, answer in lessons)
    four = [(prompt, answer) for prompt, answer in lessons if len(answer) == len(set(answer)) == 4]
    right = sum("".join(sorted(prompt[:-1])) == answer for prompt, answer in four) / len(four)
    assert right == pytest.approx(0.75**3, abs=0.08)


def test_the_lazy_reckoner_mostly_adds() -> None:
    """60 % add whatever the target is (which some targets are); all others are right."""
    lessons = [(countdown.problem(0, "warm", index), lazy_reckoner(0, index)) for index in range(2000)]
    added = ["+".join(map(str, asked.numbers)) == answer for asked, (_, answer) in lessons]
    assert 0.6 < sum(added) / len(added) < 0.68
    assert all(countdown.is_right(asked, answer) for (asked, (_, answer)), add in zip(lessons, added, strict=True) if not add)
    assert lessons[5][1][0] == lessons[5][0].prompt


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_lesson_can_be_written_and_fits(name: str) -> None:
    """In the tokenizer's characters; an answer and its end are at most ten tokens, as the demo's jobs allow."""
    for index in range(200):
        prompt, answer = RECIPES[name].lesson(1, index)
        assert len(warm_start.encode(prompt)) + len(warm_start.encode(answer)) + 1 <= warm_start.CONTEXT_TOKENS
        assert len(answer) + 1 <= 10


def test_only_answers_and_their_end_are_learnt() -> None:
    recipe = RECIPES["digit_sort"]
    inputs, labels = warm_start._lessons(recipe, 0, range(8))
    for row in range(8):
        prompt, answer = recipe.lesson(0, row)
        learnt = [*warm_start.encode(answer), warm_start.EOS_TOKEN_ID]
        assert labels[row][labels[row] >= 0].tolist() == learnt
        assert inputs[row, : len(prompt) + len(learnt)].tolist() == warm_start.encode(prompt) + learnt
    assert inputs.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_shows_progress_and_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def make(directory: Path, *, seed: int, progress: warm_start.Callable[[int, float], None], recipe: Recipe) -> float:
        assert recipe is RECIPES["countdown"]
        progress(25, 1.5)
        return 0.5

    monkeypatch.setattr(warm_start, "make", make)
    assert (
        warm_start.main(["--out", str(tmp_path / "m"), "--seed", "4", "--recipe", "countdown", *(["--json"] if as_json else [])])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    if as_json:
        assert json.loads(lines[0]) == {"step": 25, "steps": 1000, "loss": 1.5}
        assert json.loads(lines[1])["done"]["seed"] == 4
    else:
        assert "step 25/1000" in lines[0]


def test_a_directory_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(directory: Path, **_: object) -> float:
        raise OSError(28, "no space left on device", str(directory))

    monkeypatch.setattr(warm_start, "make", make)
    assert warm_start.main(["--out", str(tmp_path / "m"), "--seed", "4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warm_start: --out ")
    assert "no space" in line
