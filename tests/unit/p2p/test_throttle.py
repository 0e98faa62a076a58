"""The monthly count survives restarts, and a damaged counter never opens the month anew where a cap depends on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p.adapters.bulk.throttle import Throttle
from p2p.errors import CounterUnreadable

NOVEMBER = 1_796_000_000.0  # 2026-11-30


def throttle(counter: Path, cap: int | None) -> Throttle:
    return Throttle(up=None, down=None, cap_bytes=cap, counter=counter, unix=lambda: NOVEMBER)


def test_the_count_is_kept_and_read_again(tmp_path: Path) -> None:
    counter = tmp_path / "uploaded.json"
    first = throttle(counter, 1000)
    first.sent(999, 0.0)
    first.keep()
    assert json.loads(counter.read_text()) == {"month": "2026-11", "used": 999}
    again = throttle(counter, 1000)
    assert not again.is_spent()
    again.sent(1, 0.0)
    assert again.is_spent()


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "\0" * 40,
        "[" * 100_000,
        '{"month": "2026-11"}',
        '{"month": "2026-11", "used": null}',
        '{"month": "2026-11", "used": -1}',
        '{"month": "2026-11", "used": Infinity}',
        '{"month": "2026-11", "used": true}',
        '{"month": "November", "used": 1}',
        '{"month": 202611, "used": 1}',
    ],
)
def test_a_damaged_counter_stops_who_pays_for_bytes(tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    counter = tmp_path / "uploaded.json"
    counter.write_text(damaged)
    with pytest.raises(CounterUnreadable, match=r"uploaded.json .* repair it, or remove it to count from 0"):
        throttle(counter, 1000)
    unbounded = throttle(counter, None)
    assert (unbounded.used_this_month, unbounded.is_spent()) == (0, False)
    assert "counted from 0" in caplog.text


def test_a_counter_of_a_month_in_which_nothing_was_sent_is_none(tmp_path: Path) -> None:
    counter = tmp_path / "uploaded.json"
    counter.write_text('{"month": "", "used": 0}')
    assert throttle(counter, 1000).used_this_month == 0
