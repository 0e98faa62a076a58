"""Numbers in prose against exact fractions."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.environments.answers import answer_of
from coordinator.environments.number_text import Number, last_number, matches

ONCE = settings(max_examples=200, deadline=None)
WORDS = st.text(alphabet="abc xyz.,;:()!?\n'", max_size=20)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("-18", -18),
        ("+18", 18),
        ("−18", -18),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        ("$-5", -5),
        (r"\$5", 5),
        ("€ 7", 7),
        ("1,234,567", 1234567),
        ("1{,}234", 1234),
        ("0.500", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("18.", 18),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        ("5-3", 3),
        ("(4)-1", 1),
        ("10 - 3", 3),
        ("2020-21", 21),
        ("Rs50", 50),
        ("1, 2, 3", 3),
        ("12,34", 34),
        ("1234,567", 567),
        ("x = -7", -7),
    ],
)
def test_a_number_is_read_as_a_person_reads_it(text: str, value: object) -> None:
    """Signs, currency, separators, decimals, fractions."""
    found = last_number(text)
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize("text", ["", "none", "1/0", r"\frac{1}{0}", "3 1/0", "9" * 500, "."])
def test_what_is_no_number_is_none(text: str) -> None:
    """No number, division by zero, more digits than anyone means."""
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3=5\n#### 18", 18),
        ("#### 18 of 20 is 90", 90),
        ("####\n18\nand 3 more", 18),
        ("#### 4\n\nQuestion: 5 + 5\n#### 10", 10),
        (r"so \boxed{42} holds for 7", 42),
        (r"\boxed{\frac{1}{2}} 3", Fraction(1, 2)),
        (r"\boxed{12", 12),
        (r"first \boxed{1}, then \boxed{2}, 3", 2),
        (r"\boxed{3} #### 4", 4),
        ("it was 5 ####", 5),
        ("it costs 3, then 4 dollars.", 4),
    ],
)
def test_the_final_number_is_the_marked_one_or_the_last(text: str, value: object) -> None:
    """`####` before a box, a box before the last number; a mark before nothing does not count."""
    found = answer_of(text).number
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 12 cm^2", 12),
        (r"\boxed{12\text{ cm}^{2}}", 12),
        (r"5 m s^{-1}", 5),
        ("x_1 = 5", 5),
        (r"1\,234", 1234),
        (r"12,\!345", 12345),
        ("1\u202f000\u202f000", 1000000),
        (r"\frac12", Fraction(1, 2)),
        (r"-\dfrac1{2}", Fraction(-1, 2)),
        (r"\tfrac{1}2", Fraction(1, 2)),
        ("#### Step 2: add 5\nso \\boxed{72}", 72),
    ],
)
def test_units_subscripts_and_latex_spellings_do_not_change_the_number(text: str, value: object) -> None:
    """The digit of a unit's exponent, of a subscript or of a heading is not the answer."""
    found = answer_of(text).number
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{3\sqrt{2}}",
        r"\boxed{\sqrt[3]{2}}",
        "3√2",
        r"\boxed{2^{10}}",
        r"\boxed{3 \times 10^5}",
        "(1+1)^2",
        r"\boxed{2\pi}",
        r"\boxed{\frac{x}{2}}",
        r"\boxed{\frac{2}{x}}",
        "4, so 2^3",
    ],
)
def test_figures_inside_what_is_not_read_are_never_the_answer(text: str) -> None:
    """Half of an expression compared with a reference would be a reward for a wrong answer."""
    assert answer_of(text).number is None


def test_a_text_without_numbers_has_no_final_number() -> None:
    """Not even with both marks."""
    assert answer_of(r"#### none, \boxed{nothing}").number is None


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("60%", "60", True),
        ("60", "60%", True),
        ("0.6", r"60\%", True),
        ("60 %", "60%", True),
        ("0.6%", "60%", False),
        ("6", "60%", False),
        ("0.60", "0.6", True),
        ("1,000.0", "1000", True),
        ("0.333", "1/3", False),
        ("7", "-7", False),
    ],
)
def test_equality_is_exact_and_a_lone_percent_sign_is_a_unit_or_a_scale(answer: str, reference: str, equal: bool) -> None:
    """No tolerance; 60 % is 60 or 0.6, but not 6."""
    left, right = last_number(answer), last_number(reference)
    assert left is not None
    assert right is not None
    assert matches(left, right) is equal
    assert matches(right, left) is equal


@ONCE
@given(
    value=st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4),
    before=WORDS,
    after=WORDS,
)
def test_any_decimal_is_found_in_prose(value: Decimal, before: str, after: str) -> None:
    """Plain and with thousands separators, whatever surrounds it."""
    for written in (f"{value:f}", f"{value:,f}"):
        found = last_number(f"{before} = {written} {after}")
        assert found == Number(Fraction(value))


@ONCE
@given(top=st.integers(-(10**9), 10**9), bottom=st.integers(1, 10**9))
def test_any_fraction_is_exact(top: int, bottom: int) -> None:
    """As a/b, in LaTeX, and in a box."""
    for written in (f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}", rf"\boxed{{{top} / {bottom}}}"):
        found = answer_of(written).number
        assert found == Number(Fraction(top, bottom))


@ONCE
@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Whatever a model writes yields numbers or nothing."""
    for found in (last_number(text), answer_of(text).number):
        assert found is None or isinstance(found.value, Fraction)


@pytest.mark.parametrize(
    "piece",
    ["1,234,", "\\boxed{", "####", "1/", "\\frac{1}", "1e1", "{,}1", ".", "- ", "\\frac1", "\\frac{", "2^", "1\\,234", "\\sqrt["],
)
def test_a_long_hostile_text_is_read_in_linear_time(piece: str) -> None:
    """100,000 repetitions end (each takes well under a second; quadratic time would take minutes)."""
    answer_of(piece * 100_000)
