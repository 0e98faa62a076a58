"""Countdown: reach a target with three numbers, each used once, in any order, by + - * and parentheses.

Nothing here runs what a model wrote: an answer is read by a small parser of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from random import Random

from coordinator.domain.seeds import derive

NUMBERS = 3
LARGEST_NUMBER = 9
LARGEST_TARGET = 99
OPERATORS = "+-*"
MOST_CHARACTERS = 64  # of an answer; the shortest right one has five, so a longer one only costs time
HELD_OUT = 16  # one problem in so many is for evaluation only, whatever the job's seed


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        """As the model reads it: ``"3,7,2=19:"``."""
        return f"{','.join(map(str, self.numbers))}={self.target}:"


@dataclass(frozen=True, slots=True)
class Expression:
    """What a text comes to, and the numbers in it, in order of size."""

    value: int
    numbers: tuple[int, ...]


def problem(seed: int, split: str, index: int) -> Problem:
    """The problem at a place: a function of (seed, split, index). It has a solution; "eval" has no problem in common with other splits."""
    draw = Random(derive(seed, "countdown", split, index))  # noqa: S311 (seeded on purpose)
    while True:
        numbers = tuple(draw.randint(1, LARGEST_NUMBER) for _ in range(NUMBERS))
        drawn = Problem(numbers, draw.choice(sorted(solutions(numbers))))
        if is_held_out(drawn) == (split == "eval"):
            return drawn


def is_held_out(asked: Problem) -> bool:
    """Whether a problem belongs to the held-out split."""
    return derive(0, "countdown", "held out", asked.prompt) % HELD_OUT == 0


def is_right(asked: Problem, text: str) -> bool:
    """Whether the text is an expression of exactly the problem's numbers that comes to its target."""
    found = evaluate(text)
    return found is not None and found == Expression(asked.target, tuple(sorted(asked.numbers)))


def evaluate(text: str) -> Expression | None:
    """Integers of at most two digits, + - * and parentheses, with the usual precedence; None for any other text. Exact."""
    if len(text) > MOST_CHARACTERS:
        return None
    reader = _Reader(text)
    value = reader.sum()
    return None if value is None or not reader.is_at_end else Expression(value, tuple(sorted(reader.numbers)))


class _Reader:
    """A recursive-descent parser: sum = product {(+|-) product}, product = factor {* factor}, factor = number | "(" sum ")".

    Depth is bounded by the text's length. Every method returns None where the text is no such thing.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self.numbers: list[int] = []

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._text)

    def sum(self) -> int | None:
        total = self._product()
        while total is not None and (sign := self._taken("+-")):
            term = self._product()
            if term is None:
                return None
            total += term if sign == "+" else -term
        return total

    def _product(self) -> int | None:
        total = self._factor()
        while total is not None and self._taken("*"):
            factor = self._factor()
            total = None if factor is None else total * factor
        return total

    def _factor(self) -> int | None:
        if self._taken("("):
            inner = self.sum()
            return inner if self._taken(")") else None
        digits = self._taken("0123456789") + self._taken("0123456789")
        if not digits:
            return None
        self.numbers.append(int(digits))
        return self.numbers[-1]

    def _taken(self, characters: str) -> str:
        """The next character, if it is one of these; it is read then."""
        following = self._text[self._place : self._place + 1]
        if not following or following not in characters:
            return ""
        self._place += 1
        return following


@lru_cache(maxsize=1024)  # there are 729 of them
def solutions(numbers: tuple[int, ...]) -> Mapping[int, str]:
    """Targets from 1 to 99 that the numbers reach in the order they have, with the first expression for each; never empty."""
    found: dict[int, str] = {}
    for text in _expressions(numbers):
        expression = evaluate(text)
        if expression is not None and 1 <= expression.value <= LARGEST_TARGET:
            found.setdefault(expression.value, text)
    return found


def _expressions(numbers: tuple[int, ...]) -> Iterator[str]:
    """With the numbers as they stand; parentheses only around a sum that is multiplied."""
    a, b, c = numbers
    for one, two in product(OPERATORS, OPERATORS):
        yield f"{a}{one}{b}{two}{c}"
    for sign in "+-":
        yield f"({a}{sign}{b})*{c}"
        yield f"{a}*({b}{sign}{c})"
