"""Countdown: the parser against arithmetic done otherwise, the rules, and that every problem has a solution."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.countdown import (
    LARGEST_TARGET,
    MOST_CHARACTERS,
    Expression,
    Problem,
    evaluate,
    is_held_out,
    is_right,
    problem,
    solutions,
)


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("3*7-2", 19, (2, 3, 7)),
        ("2+3*7", 23, (2, 3, 7)),
        ("(2+3)*7", 35, (2, 3, 7)),
        ("2-3-7", -8, (2, 3, 7)),
        ("2-(3-7)", 6, (2, 3, 7)),
        ("((9))", 9, (9,)),
        ("10*10", 100, (10, 10)),
        ("9*9*9*9*9*9*9*9*9*9*9*9*9*9*9*9*9*9*9*9", 9**20, (9,) * 20),
    ],
)
def test_what_an_expression_comes_to(text: str, value: int, numbers: tuple[int, ...]) -> None:
    assert evaluate(text) == Expression(value, numbers)


@pytest.mark.parametrize(
    "text",
    ["", " ", "3+", "+3", "3 + 7", "(3", "3)", "()", "3**7", "3/7", "-3", "3+-7", "100", "3x7", "٣+1", "3+7=10", "1_0", "0x1", "abs(3)", "(3+7", "3*", "3-(", "(" * 70],
)  # fmt: skip
def test_other_texts_are_none(text: str) -> None:
    assert evaluate(text) is None


def test_a_long_text_is_not_read() -> None:
    longest = "1" + "+1" * ((MOST_CHARACTERS - 1) // 2)
    assert evaluate(longest) is not None
    assert evaluate(longest + "+1") is None


def trees(depth: int = 3) -> st.SearchStrategy[tuple[str, Fraction]]:
    """(text, value) of nested operations, written with parentheses around every one of them."""
    leaf = st.integers(0, 99).map(lambda number: (str(number), Fraction(number)))

    def join(parts: tuple[tuple[str, Fraction], str, tuple[str, Fraction]]) -> tuple[str, Fraction]:
        (left, a), sign, (right, b) = parts
        return f"({left}{sign}{right})", {"+": a + b, "-": a - b, "*": a * b}[sign]

    return st.recursive(leaf, lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(join), max_leaves=2**depth)


@given(trees())
def test_nested_operations(tree: tuple[str, Fraction]) -> None:
    text, value = tree
    found = evaluate(text)
    assert (found is None) == (len(text) > MOST_CHARACTERS)
    assert found is None or found.value == value


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_precedence_without_parentheses(numbers: list[int], data: st.DataObject) -> None:
    """A sum of products, added up term by term."""
    signs = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(numbers) - 1, max_size=len(numbers) - 1))
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:], strict=True))
    assert evaluate(text) == Expression(sum(terms), tuple(sorted(numbers)))


@given(st.text(alphabet="0123456789+-*() /e", max_size=80))
def test_any_text_is_an_answer_or_none(text: str) -> None:
    found = evaluate(text)
    assert found is None or all(0 <= number <= 99 for number in found.numbers)


def test_right_is_the_target_by_exactly_the_numbers() -> None:
    """In any order, each once."""
    asked = Problem((3, 7, 2), 19)
    assert asked.prompt == "3,7,2=19:"
    assert [is_right(asked, text) for text in ("3*7-2", "7*3-2", "(7*3)-2")] == [True] * 3
    assert [is_right(asked, text) for text in ("19", "3*7", "3*7-2+0", "3*7+2", "21-2", "3*7-1-1", "")] == [False] * 7


@given(st.integers(0, 2**32), st.sampled_from(["train", "eval", "warm"]), st.integers(0, 10**9))
def test_every_problem_is_the_same_again_has_a_solution_and_keeps_the_splits_apart(seed: int, split: str, index: int) -> None:
    asked = problem(seed, split, index)
    assert asked == problem(seed, split, index)
    assert 1 <= asked.target <= LARGEST_TARGET
    assert is_right(asked, solutions(asked.numbers)[asked.target])
    assert is_held_out(asked) == (split == "eval")


def test_solutions_name_every_target_once() -> None:
    """Of 1, 2, 3 as they stand: counted by hand."""
    assert solutions((1, 2, 3)) == {
        6: "1+2+3", 7: "1+2*3", 2: "1-2+3", 5: "1*2+3", 9: "(1+2)*3",
    }  # fmt: skip
