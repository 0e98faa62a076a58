"""How much is sent at once: about 10 ms of what can leave, within bounds."""

from __future__ import annotations

import pytest

from p2p.adapters.bulk.outbox import part_bytes, turn_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("rate", "part", "turn"),
    [
        (0.0, 16 * KIB, 16 * KIB),
        (625_000.0, 16 * KIB, 16 * KIB),  # 5 Mbit/s: 10 ms are 6 KB
        (6_250_000.0, 64 * KIB, 62_500),  # 50 Mbit/s
        (20e6, 192 * KIB, 200_000),
        (60e6, 256 * KIB, 600_000),
        (1.25e9, 256 * KIB, MIB),  # 10 Gbit/s: 10 ms are 12.5 MB
    ],
)
def test_a_part_and_a_turn_take_ten_milliseconds_within_bounds(rate: float, part: int, turn: int) -> None:
    assert (part_bytes(rate), turn_bytes(rate)) == (part, turn)
