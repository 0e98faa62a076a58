"""The math environment on GSM8K: every reference answer is right, every perturbed one wrong."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from coordinator.environments.base import Completion, Environment, EnvironmentSpec
from coordinator.environments.build import build_environment

DATA = Path(__file__).parents[2] / "data" / "gsm8k"


@pytest.fixture(scope="module")
def environment() -> Environment:
    spec = EnvironmentSpec("math", 0, "", train=str(DATA / "train.jsonl"), eval=str(DATA / "test.jsonl"))
    return build_environment(spec)


@pytest.fixture(scope="module")
def answers() -> list[str]:
    return [json.loads(line)["answer"] for line in (DATA / "test.jsonl").read_text().splitlines()]


def rewards(environment: Environment, texts: list[str]) -> list[float | None]:
    return [environment.score("eval", index, [Completion([1], text)]).outcomes[0].reward for index, text in enumerate(texts)]


def test_the_whole_test_split_is_there(environment: Environment) -> None:
    """1,319 rows; the training split is cut to 500."""
    assert environment.size("eval") == 1319
    assert environment.size("train") == 500
    assert str(environment.prompt("eval", 0)).startswith("Janet")


def test_all_reference_solutions_score_one(environment: Environment, answers: list[str]) -> None:
    """The worked solution as the completion."""
    assert rewards(environment, answers) == [1.0] * 1319


@pytest.mark.parametrize(
    "dress",
    ["The answer is {}.", r"so \boxed{{{}}}", "#### {}", "#### ${}.00", "Hence 7 and then, in all, {} dollars", "{}.0 apples"],
)
def test_the_number_alone_scores_one_in_any_dress(environment: Environment, answers: list[str], dress: str) -> None:
    """Prose, box, hashes, currency and trailing zeros."""
    finals = [answer.rsplit("####", 1)[1].strip() for answer in answers]
    assert rewards(environment, [dress.format(final) for final in finals]) == [1.0] * 1319


def _perturbed(answer: str, change: int) -> str:
    head, _, final = answer.rpartition("####")
    return f"{head}#### {int(re.sub(r'[,$]', '', final)) + change}"


@pytest.mark.parametrize("change", [1, -1, 10, 1000003])
def test_perturbed_answers_score_zero(environment: Environment, answers: list[str], change: int) -> None:
    """The same solution with another last number."""
    assert rewards(environment, [_perturbed(answer, change) for answer in answers]) == [0.0] * 1319


def test_the_negated_and_the_scaled_answer_score_zero(environment: Environment, answers: list[str]) -> None:
    """Sign and scale count (zero answers aside, which negate to themselves)."""
    finals = [int(re.sub(r"[,$]", "", answer.rsplit("####", 1)[1])) for answer in answers]
    assert [r for r, f in zip(rewards(environment, [str(-f) for f in finals]), finals, strict=True) if f] == [0.0] * sum(
        map(bool, finals)
    )
    assert [r for r, f in zip(rewards(environment, [f"{f}.5" for f in finals]), finals, strict=True)] == [0.0] * 1319


def _changed(rng: Random, value: int, kind: str) -> Fraction:
    """Another value: a digit replaced, digits swapped, one dropped or doubled, the point moved, off by a little, the sign, a half."""
    digits = str(abs(value))
    place = rng.randrange(len(digits))
    texts = {
        "digit": digits[:place] + str((int(digits[place]) + rng.randint(1, 9)) % 10) + digits[place + 1 :],
        "swapped": digits[:-2] + digits[-1] + digits[-2:-1],
        "dropped": digits[:place] + digits[place + 1 :] or "0",
        "doubled": digits[:place] + digits[place] + digits[place:],
        "point": digits[:-1] + "." + digits[-1],
    }
    if kind in texts:
        return Fraction(texts[kind]) * (-1 if value < 0 else 1)
    return {"near": value + Fraction(rng.choice([-2, -1, 1, 2])), "sign": Fraction(-value), "half": value + Fraction(1, 2)}[kind]


def _written(rng: Random, value: Fraction) -> str:
    """The value as a completion might end in it."""
    sign, size = "-" if value < 0 else "", abs(value)
    plain = f"{sign}{size.numerator:,}" if size.denominator == 1 else f"{sign}{float(size)}"
    latex = rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}" if size.denominator > 1 else plain
    return rng.choice(
        [
            "#### {0}",
            r"\boxed{{{1}}}",
            "The answer is {0}.",
            r"\boxed{{{0}\text{{ dollars}}}}",
            "#### ${0}",
            r"so \boxed{{x = {1}}}",
        ]
    ).format(plain, latex)


def test_five_thousand_perturbed_answers_score_zero(environment: Environment, answers: list[str]) -> None:
    """Eight kinds of change that really change the value, in six dresses; the same dresses of the true value score one."""
    rng = Random(2026)
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    while sum(kinds.values()) < 5000:
        index = rng.randrange(len(answers))
        value = int(re.sub(r"[,$]", "", answers[index].rsplit("####", 1)[1]))
        kind = rng.choice(["digit", "swapped", "dropped", "doubled", "point", "near", "sign", "half"])
        changed = _changed(rng, value, kind)
        if changed == value:
            continue
        kinds[kind] += 1
        texts = [_written(rng, changed), _written(rng, Fraction(value))]
        got = [one.reward for one in environment.score("eval", index, [Completion([1], text) for text in texts]).outcomes]
        if got != [0.0, 1.0]:
            wrong.append(f"{index}: {texts} for {value} scored {got}")
    print(f"\nGSM8K: {sum(kinds.values())} perturbed answers, {len(wrong)} scored wrongly ({dict(sorted(kinds.items()))})")
    assert not wrong, wrong[:5]


def _as_sum(rng: Random, value: int) -> str:
    """An expression of that value, which no reading of plain numbers reads: it goes through computer algebra."""
    part = rng.randint(2, 99)
    return rng.choice(
        [f"{value - part} + {part}", rf"\frac{{{value * part}}}{{{part - 1} + 1}}", rf"{value + part} - \sqrt{{{part * part}}}"]
    )


def test_expressions_of_the_answers_score_one_and_of_perturbed_ones_zero(
    environment: Environment, answers: list[str], pytestconfig: pytest.Config
) -> None:
    """A sample of 40; all 1,319 with --long. By math-verify."""
    rng = Random(7)
    indices = range(len(answers)) if pytestconfig.getoption("--long") else rng.sample(range(len(answers)), 40)
    right, wrong = 0, 0
    for index in indices:
        value = int(re.sub(r"[,$]", "", answers[index].rsplit("####", 1)[1]))
        texts = [rf"\boxed{{{_as_sum(rng, number)}}}" for number in (value, value + rng.choice([-3, -1, 1, 10]))]
        got = [one.reward for one in environment.score("eval", index, [Completion([1], text) for text in texts]).outcomes]
        assert got == [1.0, 0.0], (texts, value)
        right, wrong = right + 1, wrong + 1
    print(f"\nGSM8K as expressions: {right} equal scored 1, {wrong} unequal scored 0")
