"""Which groups' token arrays stay."""

from __future__ import annotations

import pytest

from coordinator.domain.retention import first_kept


@pytest.mark.parametrize(
    ("newest", "keep", "lowest_unsettled", "expected"),
    [
        ([], 2, None, 0),
        ([(2, 3), (0, 1)], 2, None, 0),  # nothing is old enough
        ([(4, 6), (3, 5), (0, 1)], 2, None, 3),
        ([(4, 6), (3, 5), (0, 1)], 2, 2, 2),  # a straggler is still open
        ([(4, 6)], 0, 7, 7),
        ([(4, 6)], 0, None, 10),
    ],
)
def test_the_newest_steps_and_what_is_open_stay(newest, keep, lowest_unsettled, expected) -> None:
    assert first_kept(newest, keep=keep, lowest_unsettled=lowest_unsettled, highest=9) == expected
