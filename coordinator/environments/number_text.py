r"""Numbers in prose, compared exactly: a small parser of its own, so that nothing a model writes is ever evaluated.

Grammar, spaces ignored where a person would: an optional sign, an optional currency sign, then digits with or without
thousands separators (``1,234`` or LaTeX ``1{,}234``), an optional decimal part, an optional exponent of at most three digits;
``a/b``, ``\frac{a}{b}``, ``\frac12`` and the mixed ``2 1/2``; an optional ``%`` (also ``\%``). A minus after a digit, a letter or
a closing bracket is a hyphen or a subtraction, not a sign. Values are fractions: ``0.50`` equals ``1/2``, ``1,000`` equals ``1000.0``.

Digits inside what this grammar does not read (powers, roots, other fractions) are no number of the text: ``3\sqrt{2}`` is neither 3
nor 2. The exponent of a unit (``12 cm^2``) and a subscript (``x_1``) are passed over.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

DIGITS_LIMIT = 400

_PLAIN = (
    r"(?:\d{1,3}(?:,\d{3}){1,40}(?![\d])|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\d]))?|(?<![\d.])\.\d+(?:[eE][+-]?\d{1,3}(?![\d]))?"
)
_SIGN = r"(?:(?<![\w)\]}])[-+−])?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:\\?[$€£]\s?(?P<money_sign>[-−]?))?"
    rf"(?:\\[dt]?frac\{{\s*(?P<top_sign>[-−]?)(?P<top>{_PLAIN})\s*\}}\{{\s*(?P<bottom>{_PLAIN})\s*\}}"
    rf"|(?P<whole>\d{{1,40}}) (?P<part>\d{{1,40}})/(?P<of>\d{{1,40}})(?![\d/])"
    rf"|(?P<plain>{_PLAIN})(?:\s?/\s?(?P<over>{_PLAIN}))?)"
    r"(?P<percent>\s?\\?%)?",
    re.ASCII,
)
_SEPARATOR = re.compile(r"(?<=\d)(?:,\\!|\\[,!;: ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))|\{,\}", re.ASCII)  # of thousands
_BARE_TOP = re.compile(r"(\\[dt]?frac)\s?(\d)(?=\s?[\d{])", re.ASCII)
_BARE_BOTTOM = re.compile(r"(\\[dt]?frac\{[^{}]{1,60}\})\s?(\d)", re.ASCII)
_LOOK_BACK = 80
_PASSED_OVER = re.compile(r"(?:[^\W\d]|\})\s?[\^_]\s?\{?\s?[-+−]?$")  # before a unit's exponent, or a subscript
_INSIDE = re.compile(r"(?:\\sqrt(?:\[\d{1,3}\])?|√|[\^_]|\\[dt]?frac(?:\s?\{[^{}]*\})?)\s?\{?\s?[-+−]?$")  # before what is not read
_GOES_ON = re.compile(r"\s?(?:\^|\\sqrt|√|\\pi|π)")  # after what is not read
BOXED = "\\boxed{"
HASHES = "####"


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; `is_percent` when a percent sign followed (the value is the figure before it)."""

    value: Fraction
    is_percent: bool = False


def matches(answer: Number, reference: Number) -> bool:
    """Exactly equal. When one side alone bears a percent sign it may be a mere unit (60 % for 60) or a scale (60 % for 0.6)."""
    if answer.value == reference.value:
        return True
    if answer.is_percent == reference.is_percent:
        return False
    percent, plain = (answer, reference) if answer.is_percent else (reference, answer)
    return percent.value == plain.value * 100


def last_number(text: str) -> Number | None:
    """The last number of a text, or None; also None when the text ends in figures that are not read."""
    last = deque(_readings(text), maxlen=1)
    return last[0] if last else None


def sole_number(text: str) -> tuple[Number, str, str] | None:
    """The number of a text that holds exactly one, what stands before it, and what after; None for none, several, or one not read."""
    text = _spelled(text)
    found = list(islice(_spans(text), 2))
    if len(found) != 1:
        return None
    number, start, end = found[0]
    return None if number is None else (number, text[:start], text[end:])


def _readings(text: str) -> Iterator[Number | None]:
    """What the figures of a text say, in order; None for those inside an expression that is not read."""
    return (number for number, _, _ in _spans(_spelled(text)))


def _spelled(text: str) -> str:
    """The text with LaTeX's shorthands written out."""
    return _BARE_BOTTOM.sub(r"\1{\2}", _BARE_TOP.sub(r"\1{\2}", _SEPARATOR.sub(",", text)))


def _spans(text: str) -> Iterator[tuple[Number | None, int, int]]:
    """The readings of a text that is written out, each with where it starts and ends."""
    for found in _NUMBER.finditer(text):
        before = text[max(0, found.start() - _LOOK_BACK) : found.start()]
        if _PASSED_OVER.search(before):
            continue
        value = None if _INSIDE.search(before) or _GOES_ON.match(text, found.end()) else _value(found)
        number = None if value is None else Number(value, found["percent"] is not None)
        yield number, found.start(), found.end()


def after_hashes(text: str) -> str:
    """What follows the last ``####``, up to the end of the first line that holds anything."""
    _, mark, rest = text.rpartition(HASHES)
    return rest.lstrip().partition("\n")[0] if mark else ""


def in_box(text: str) -> str:
    r"""The contents of the last ``\boxed{...}``, braces balanced; an unclosed box reaches to the end."""
    _, mark, rest = text.rpartition(BOXED)
    if not mark:
        return ""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:place]
    return rest


def _value(found: re.Match[str]) -> Fraction | None:
    """The exact value of a match; None for a zero denominator or for more digits than anyone means."""
    if len(found[0]) > DIGITS_LIMIT:
        return None
    size = _size(found)
    if size is None:
        return None
    signs = [found["sign"], found["money_sign"], found["top_sign"]]
    return -size if sum(sign in ("-", "−") for sign in signs if sign) % 2 else size


def _size(found: re.Match[str]) -> Fraction | None:
    if found["top"] is not None:
        return _ratio(found["top"], found["bottom"])
    if found["whole"] is not None:
        part = _ratio(found["part"], found["of"])
        return None if part is None else _plain(found["whole"]) + part
    if found["over"] is not None:
        return _ratio(found["plain"], found["over"])
    return _plain(found["plain"])


def _ratio(top: str, bottom: str) -> Fraction | None:
    divisor = _plain(bottom)
    return None if divisor == 0 else _plain(top) / divisor


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
