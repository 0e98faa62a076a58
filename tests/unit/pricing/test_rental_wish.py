"""How many machines a job is given, and which offers first."""

from __future__ import annotations

import pytest

from pricing.feeds.contract import RentalOffer
from pricing.rental_wish import MOST_AT_ONCE, Standing, ranked, wish, within_hour


@pytest.mark.parametrize(
    ("standing", "short", "count"),
    [
        (Standing(0, 0, 0, {}), 5.0, 1),  # nothing was measured: one is tried
        (Standing(1, 1, 0, {}), 5.0, 1),  # and waited for
        (Standing(1, 0, 0, {"a": (2.0,)}), 5.0, 4),  # 5 / 2 is 2.5: three more
        (Standing(2, 0, 0, {"a": (2.0,), "b": (3.0,)}), 5.0, 4),  # 5 / 2.5
        (Standing(2, 0, 0, {"a": (0.0,)}), 5.0, 3),  # a rate of nothing says nothing
        (Standing(1, 0, 0, {"a": (0.01,)}), 5.0, 1 + MOST_AT_ONCE),
        (Standing(3, 0, 0, {"a": (2.0,)}), 0.0, 3),
        (Standing(3, 0, 2, {"a": (2.0,)}), -1.0, 1),
        (Standing(3, 0, 2, {"a": (2.0,)}), 1.0, 4),  # what is idle is not given back while rate is missing
    ],
)
def test_a_wish_follows_what_was_measured(standing: Standing, short: float, count: int) -> None:
    number, reason = wish(standing, short=short)
    assert number == count
    assert reason


@pytest.mark.parametrize(
    ("count", "prices", "candidate", "others", "most"),
    [
        (3, (), 30, 0, 3),  # 90 of 100
        (4, (), 30, 0, 3),
        (4, (), 30, 15, 2),  # 85 are left beside the workers: two of 30
        (4, (40, 40), 30, 0, 2),  # 20 are left: none
        (3, (40, 30), 30, 0, 3),  # 30 are left: one, to the last micro-dollar
        (2, (40, 40), 30, 90, 2),  # what runs is kept: workers are let go for it
        (2, (40, 70), 30, 0, 1),  # a price rose: the dearest goes
        (2, (140, 170), 30, 0, 0),
        (1, (40, 40), 30, 0, 1),  # fewer are wanted anyway
        (2, (40,), None, 0, 2),  # nothing is to be had now, so nothing is dear
        (2, (40,), 30, 70, 1),  # workers ask for more than is left: a change of the budget
    ],
)
def test_an_hours_budget_bounds_the_machines(
    count: int, prices: tuple[int, ...], candidate: int | None, others: int, most: int
) -> None:
    """100 an hour in all."""
    found, why = within_hour(count, prices, candidate, allowed=100, others=others)
    assert found == most
    assert bool(why) == (most < count)
    assert "budget.usd_per_hour allows 100 uUSD/h" in (why or "budget.usd_per_hour allows 100 uUSD/h")


def test_the_least_money_per_completion_comes_first() -> None:
    """B is dearer and three times as fast; C was never measured and counts as the slowest."""
    a, b, c = (RentalOffer("p", name, name, price) for name, price in (("A", 100), ("B", 200), ("C", 90)))
    assert ranked([a, b, c], {"A": (1.0,), "B": (3.0,), "D": ()}) == (b, c, a)
    assert ranked([b, a, c], {}) == (c, a, b)
