"""The fluid bound against values worked out by hand."""

import pytest

from p2p.domain.fluid import fluid_bound

MBIT = 1e6 / 8


@pytest.mark.parametrize(
    ("ups", "downs", "seconds"),
    [
        ((50, 50, 50, 50), (), 8.0),  # the seeder: 400 Mbit at 50
        ((50, 5, 5, 50), (), 3 * 400 / 110),  # all uplinks together
        ((50, 50, 50, 50, 50), (20, 100, 100, 100), 20.0),  # the slowest downlink
        ((80, 20, 20, 20, 20, 20), (), 2000 / 180),
        ((50, 50), (), 8.0),
    ],
)
def test_bound_is_the_tightest_of_seeder_downlink_and_sum(ups: tuple[float, ...], downs: tuple[float, ...], seconds: float) -> None:
    rates = [up * MBIT for up in ups]
    assert fluid_bound(50e6, rates[0], rates[1:], [down * MBIT for down in downs]) == pytest.approx(seconds)
