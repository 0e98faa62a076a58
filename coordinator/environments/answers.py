r"""What a text gives as its answer: a number that is read exactly, or an expression that is left to a computer algebra system.

The answer is marked by GSM8K's ``#### 42`` or MATH's ``\boxed{}``, whichever stands later. A marked answer is a number only if it is one
number and words around it (``\boxed{x = \$1,234.50 \text{ per week}}``): half of an expression compared with a reference would be a reward
for a wrong answer. Text without a mark is read as prose (its last number), or as an expression where it looks like one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.environments.number_text import BOXED, HASHES, Number, after_hashes, in_box, last_number, sole_number

_FUNCTIONS = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "arcsin",
        "arccos",
        "arctan",
        "log",
        "ln",
        "lg",
        "exp",
        "sqrt",
        "pi",
        "mod",
        "max",
        "min",
        "gcd",
        "lcm",
        "det",
        "choose",
        "infinity",
    )
)
_GLUED_UNITS = frozenset(
    (
        "cm",
        "mm",
        "km",
        "nm",
        "kg",
        "mg",
        "ml",
        "mL",
        "lb",
        "oz",
        "ft",
        "in",
        "yd",
        "mi",
        "hr",
        "am",
        "pm",
        "th",
        "st",
        "nd",
        "rd",
        "kB",
        "MB",
        "GB",
        "TB",
        "kW",
        "Hz",
    )
)
_NOISE = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox)\s?\{[^{}\\]*\}(?:\s?\^\s?\{?[23]\}?)?"  # words and units in LaTeX
    r"|\\(?:[,;:!$% ]|quad|qquad|left|right|\(|\)|\[|\])"
    r"|[\s.,;:!?'\"~$€£%*_`]"
    r"|(?P<word>[A-Za-z]{2,}(?:/[A-Za-z]+)?)(?:\s?\^\s?\{?[23]\}?)?"
    r"|(?<=\s)[mgshLlWJNVAKCF](?:/[A-Za-z]+)?(?:\s?\^\s?\{?[23]\}?)?(?![A-Za-z])"  # a unit of one letter stands apart
)
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|°")
_NAMES_RIGHT = re.compile(  # what may stand before "=": a name, or sums in figures (a comma in them may part two answers)
    r"(?:[^\d,;<>\\]|\\(?:text|mathrm)\{[^{}]*\})*|(?:[\d\s.+*/()=-]|\\(?:times|cdot|div))*"
)
_GLUED = re.compile(r"[A-Za-z]{1,2}(?![A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z\d])[A-Za-z]{2,}")
_FORMULA = re.compile(r"[\\^_=+*/(){}\[\]|<>]")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as written, without its mark; `number` is set where it is read as a number."""

    text: str
    number: Number | None
    is_marked: bool


def answer_of(text: str) -> Answer:
    """The answer of a completion: the marked one, else the whole text, of which the last number counts."""
    return _marked(text) or Answer(text, last_number(text), False)


def reference_of(text: str) -> Answer | None:
    """The answer of a data set's row; None when there is none. Without a mark, short text may be a bare expression."""
    found = _marked(text)
    if found is not None:
        return found
    text = text.strip()
    number = plain_number(text) or (last_number(text) if _words(text) >= 1 else None)
    if number is None and (not text or _words(text) >= 2):
        return None
    return Answer(text, number, False)


def plain_number(text: str) -> Number | None:
    """The number that a text is, units and words aside; None for an expression, several numbers, or none."""
    left, equals, right = text.rpartition("=")
    if equals and right.strip() and _NAMES_RIGHT.fullmatch(left):
        text = right
    found = sole_number(_DEGREES.sub("", text))
    if found is None:
        return None
    number, before, after = found
    glued = _GLUED.match(after)
    if glued is not None and glued[0] not in _GLUED_UNITS:
        return None
    return number if _is_noise(before) and _is_noise(after) else None


def _is_noise(text: str) -> bool:
    """Whether a text says nothing about the value beside it."""
    place = 0
    while place < len(text):
        found = _NOISE.match(text, place)
        if found is None or (found["word"] or "").lower() in _FUNCTIONS:
            return False
        place = found.end()
    return True


def _marked(text: str) -> Answer | None:
    """What the later of the two marks holds; a mark before nothing does not count."""
    places = sorted([(text.rfind(HASHES), HASHES), (text.rfind(BOXED), BOXED)], reverse=True)
    for place, mark in places:
        given = (in_box(text) if mark == BOXED else after_hashes(text)).strip() if place >= 0 else ""
        if given:
            return Answer(given, _number(given, mark), True)
    return None


def _number(given: str, mark: str) -> Number | None:
    number = plain_number(given)
    if number is None and mark == HASHES and _words(given) >= 1:
        return last_number(given)  # "#### 18 of 20": a sentence after the hashes
    return number


def _words(text: str) -> int:
    """How many words of prose a text has; 0 where a sign of a formula stands among them."""
    if _FORMULA.search(text):
        return 0
    return sum(word.lower() not in _FUNCTIONS for word in _WORD.findall(text))
