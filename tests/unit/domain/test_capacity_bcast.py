"""T_bcast before any was measured."""

from __future__ import annotations

import pytest

from coordinator.domain.capacity_bcast import forecast_broadcasts


def test_the_parts_add_up() -> None:
    """8 GB of tensors: 8 s to write, code and rebuild, 1.6 s to apply; 61 MB at 12.5 and 1.25 MB/s: 4.88 and 48.8 s."""
    told = forecast_broadcasts(delta_bytes=61e6, raw_bytes=8e9, down={"near": 12.5e6, "far": 1.25e6})
    assert told == {"near": pytest.approx(14.48), "far": pytest.approx(58.4)}


def test_without_links_there_is_no_forecast() -> None:
    assert forecast_broadcasts(delta_bytes=61e6, raw_bytes=8e9, down={}) == {}
