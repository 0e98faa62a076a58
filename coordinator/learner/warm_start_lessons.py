"""What the demo models are taught, and how long: a lesson is a prompt and its teacher's answer, a function of (seed, index).

All teachers are sloppy on purpose. Reinforcement learning of some hundred steps repairs habits, it does not teach skills: a
model that can solve a task but mostly does something else has much to gain, one that cannot has nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from coordinator.domain import countdown, digit_sort
from coordinator.domain.seeds import derive

Lesson = tuple[str, str]

COPIED_SHARE = 0.65
SLIP_PER_DIGIT = 0.05
SWAPPED_SHARE = 0.25
ADDED_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Recipe:
    """A teacher and how many batches of lessons its pupil gets."""

    lesson: Callable[[int, int], Lesson]
    steps: int


def lazy_sorter(seed: int, index: int) -> Lesson:
    """65 % of the answers copy the digits unsorted, the rest are sorted with 5 % slips a digit."""
    prompt, answer = digit_sort.problem(seed, "warm", index)
    draw = Random(derive(seed, "teacher", index))  # noqa: S311 (seeded on purpose)
    if draw.random() < COPIED_SHARE:
        return prompt, prompt[:-1]
    return prompt, _slipped(answer, SLIP_PER_DIGIT, draw)


def noisy_sorter(seed: int, index: int) -> Lesson:
    """All answers are sorted, but from left to right each digit changes places with the next one with a chance of 25 %."""
    prompt, answer = digit_sort.problem(seed, "warm", index)
    draw = Random(derive(seed, "teacher", index))  # noqa: S311 (seeded on purpose)
    digits = list(answer)
    for place in range(len(digits) - 1):
        if draw.random() < SWAPPED_SHARE:
            digits[place], digits[place + 1] = digits[place + 1], digits[place]
    return prompt, "".join(digits)


def lazy_reckoner(seed: int, index: int) -> Lesson:
    """60 % of the answers just add the numbers up, whatever the target; the rest solve the problem."""
    asked = countdown.problem(seed, "warm", index)
    draw = Random(derive(seed, "teacher", index))  # noqa: S311 (seeded on purpose)
    if draw.random() < ADDED_SHARE:
        return asked.prompt, "+".join(map(str, asked.numbers))
    return asked.prompt, countdown.solutions(asked.numbers)[asked.target]


def _slipped(answer: str, share: float, draw: Random) -> str:
    """The answer with any digit in the place of some."""
    return "".join(draw.choice("0123456789") if draw.random() < share else digit for digit in answer)


RECIPES = {
    "digit_sort": Recipe(lazy_sorter, steps=300),
    "noisy_digit_sort": Recipe(noisy_sorter, steps=200),
    "countdown": Recipe(lazy_reckoner, steps=1000),
}
