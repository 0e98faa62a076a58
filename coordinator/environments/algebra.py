r"""Whether two LaTeX expressions are equal, by math-verify (https://github.com/huggingface/Math-Verify, 0.9) and sympy.

Only its LaTeX grammar is used, never the one for plain expressions: that one evaluates Python text, and a model wrote it. Its own
time-outs are off, since they turn into "not equal"; the caller sets one that is an outcome (`alarm.time_limit`).
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any

from coordinator.environments.base import bounded

TEXT_LIMIT_CHARS = 2000
DIGITS_LIMIT = 10_000
_DECIMALS = 12  # to which inexact numbers are compared


class NotComparable(Exception):
    """The comparison cannot be made; the words say why. No statement about the answer."""


def load() -> None:
    """Import sympy and the grammar now (about a second), so that the first comparison is not charged for it."""
    import latex2sympy2_extended  # noqa: F401
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parsed("x")


def is_same(reference: str, answer: str, *, is_marked: bool) -> bool:
    """Whether `answer` (an expression, or a whole text whose last formula counts) equals `reference`.

    An answer that is no mathematics, or longer than TEXT_LIMIT_CHARS, is a wrong one. Raises NotComparable, and what sympy raises.
    """
    from math_verify import verify

    gold = list(parsed(reference))
    if not gold:
        raise NotComparable(f"the reference {bounded(reference, 80)!r} cannot be read as LaTeX")
    if is_marked and len(answer) > TEXT_LIMIT_CHARS:
        return False
    target = [value for value in (parsed(answer) if is_marked else _parse(answer[-TEXT_LIMIT_CHARS:])) if _may_equal(value, gold)]
    for value in target:
        if _digits(value) > DIGITS_LIMIT:
            raise NotComparable(f"the answer {bounded(answer, 80)!r} has more than {DIGITS_LIMIT} digits when written out")
    return bool(verify(gold, target, float_rounding=_DECIMALS, timeout_seconds=None, raise_on_error=True))


def _may_equal(value: Any, gold: list[Any]) -> bool:
    """An equation stands for its right side only if its left is a name or a number: `2x = 4` is not 4."""
    import sympy

    if not isinstance(value, sympy.Eq) or any(isinstance(one, sympy.Rel) for one in gold):
        return True
    return bool(value.lhs.is_Symbol or value.lhs.is_number)


@lru_cache(maxsize=4096)
def parsed(expression: str) -> tuple[Any, ...]:
    """The readings of one expression: sympy objects, and the text itself where it is none; empty when there is none."""
    return tuple(_parse(rf"\boxed{{{expression}}}"))


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0)]
    return list(parse(text, extraction_config=targets, parsing_timeout=None, raise_on_error=True))


def _digits(value: Any) -> float:
    """An upper bound of the decimal digits that evaluating an expression writes out; infinite when it cannot be told."""
    import sympy

    if not isinstance(value, sympy.Basic) or not value.is_number:
        return max((_digits(part) for part in getattr(value, "args", ())), default=0.0)
    if isinstance(value, sympy.Pow):
        base, exponent = value.args
        return max(_digits(base), _digits(exponent), _power_digits(base, exponent))
    if isinstance(value, sympy.factorial):
        (inner,) = value.args
        size = _size(inner)
        return max(_digits(inner), math.inf if size > 1e6 else math.lgamma(size + 1) / math.log(10))
    return max((_digits(part) for part in value.args), default=_own_digits(value))


def _own_digits(value: Any) -> float:
    if value.is_infinite:
        return 0.0  # a symbol: nothing is written out
    size = _size(value)
    return 0.0 if size <= 1 else math.log10(size) if math.isfinite(size) else math.inf


def _power_digits(base: Any, exponent: Any) -> float:
    """|exponent| * log10 |base|: of a fraction the larger of its halves counts, so small bases count as ten."""
    size = _size(exponent)
    return size * max(1.0, _own_digits(base)) if size > 1 else 0.0


def _size(value: Any) -> float:
    """A rough magnitude of a numeric expression; infinite when it is too large for a float, or cannot be told."""
    if _is_tower(value):
        return math.inf
    try:
        return abs(float(value))
    except (OverflowError, TypeError, ValueError):
        return math.inf


def _is_tower(value: Any) -> bool:
    """Whether to write out the exponent of a power in it would be work by itself."""
    import sympy

    return any(not power.exp.is_Number or abs(power.exp) > DIGITS_LIMIT for power in value.atoms(sympy.Pow) if power.is_number)
