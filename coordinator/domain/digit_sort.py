"""The demo task: sort the digits. A problem is a function of (seed, split, index); the reward is 1 for the exact answer."""

from __future__ import annotations

from random import Random

from coordinator.domain.seeds import derive

SHORTEST = 4
LONGEST = 8


def problem(seed: int, split: str, index: int) -> tuple[str, str]:
    """Prompt and answer: ``("82914=", "12489")``. 4 to 8 digits, repeats allowed."""
    draw = Random(derive(seed, "digit_sort", split, index))  # noqa: S311 (seeded on purpose)
    digits = [draw.choice("0123456789") for _ in range(draw.randint(SHORTEST, LONGEST))]
    return "".join(digits) + "=", "".join(sorted(digits))
