r"""What counts as the answer of a text, and when it is a plain number."""

from __future__ import annotations

from fractions import Fraction

import pytest

from coordinator.environments.answers import answer_of, plain_number, reference_of
from coordinator.environments.number_text import Number


def value(number: Number | None) -> Fraction | None:
    return None if number is None else number.value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        (r"\$1,234.50", Fraction(2469, 2)),
        (r"18\text{ dollars}", 18),
        (r"x = 18", 18),
        ("3 * 6 = 18", 18),
        (r"3 \times 6 = 18", 18),
        ("12 cm^2", 12),
        ("12cm", 12),
        ("60 km/h", 60),
        ("5 m/s", 5),
        ("5 m", 5),
        (r"90^\circ", 90),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"50\%", 50),
        (r"\text{about } 7 \text{ apples}", 7),
        ("18 dollars per day.", 18),
    ],
)
def test_units_and_words_around_one_number_do_not_matter(text: str, number: object) -> None:
    assert value(plain_number(text)) == number


@pytest.mark.parametrize(
    "text",
    [
        "2x",
        "2 x",
        "2xy",
        "10-3",
        "10 - 3",
        "1, 2",
        "(1, 2)",
        "x=1, y=2",
        "2x = 4",
        r"3\sqrt{2}",
        r"\sin 5",
        "sin 5",
        "log 10",
        "x_1",
        "5 > 3",
        r"x \le 5",
        "[0, 1)",
        r"2\pi",
        "5y",
        "",
        "ten",
        "1 + 2i",
        r"\binom{5}{2}",
        "x^2 + 1",
        "-x + 3",
        "a = 3, b = 4",
    ],
)
def test_half_of_an_expression_is_no_number(text: str) -> None:
    """A reward for 2x where 2 is right would be a reward for a wrong answer."""
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("text", "answer", "number"),
    [
        ("thus #### 18", "18", 18),
        ("thus #### 18 of 20", "18 of 20", 20),
        (r"\boxed{3} then #### 4", "4", 4),
        (r"#### 4 then \boxed{x+1}", "x+1", None),
        (r"first \boxed{1}, at last \boxed{\frac{1}{2}}", r"\frac{1}{2}", Fraction(1, 2)),
        (r"#### 7 and an empty \boxed{}", r"7 and an empty \boxed{}", None),
        (r"#### x^2+1", "x^2+1", None),
    ],
)
def test_the_later_mark_holds_the_answer(text: str, answer: str, number: object) -> None:
    found = answer_of(text)
    assert (found.text, value(found.number), found.is_marked) == (answer, number, True)


def test_without_a_mark_the_last_number_counts() -> None:
    """The whole text is kept: where the reference is an expression, its last formula is looked for."""
    text = "We have $x^2 = 9$, so 3 works."
    assert answer_of(text).text == text
    assert value(answer_of(text).number) == 3
    assert not answer_of(text).is_marked


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", 5),
        ("5 apples", 5),
        ("The answer is 42.", 42),
        ("It was 5, then 7", 7),
        ("3+4=7", 7),
        (r"so \boxed{8}", 8),
        ("a\n#### 1,200", 1200),
    ],
)
def test_references_with_a_number(text: str, number: int) -> None:
    found = reference_of(text)
    assert found is not None
    assert value(found.number) == number


@pytest.mark.parametrize("text", [r"\frac{\sqrt{3}}{2}", "x^2+1", "(1, 2)", r"\text{Evelyn}", r"so \boxed{2\pi}", "2x", "Evelyn"])
def test_references_that_are_expressions(text: str) -> None:
    found = reference_of(text)
    assert found is not None
    assert found.number is None


@pytest.mark.parametrize("text", ["", "   ", "none at all", "nobody knows it"])
def test_prose_without_a_number_is_no_reference(text: str) -> None:
    assert reference_of(text) is None


@pytest.mark.parametrize("piece", ["x = ", "\\text{", "= 5 ", "{,}", "####", "\\boxed{", "sin ", "a/b ", "^2", "5 m "])
def test_a_long_hostile_text_is_read_in_linear_time(piece: str) -> None:
    """10,000 repetitions end; quadratic time would take a minute, exponential time would not end."""
    answer_of(piece * 10_000)
    reference_of(piece * 10_000)
    plain_number(piece * 10_000)
