"""The price file, and the throttle's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_node.adapters import price_file
from worker_node.config import EngineSettings, engine_settings
from worker_node.errors import ConfigError


def test_a_price_is_asked_read_and_forgotten(tmp_path: Path) -> None:
    assert price_file.asked(tmp_path) is None
    price_file.ask(tmp_path, 350_000)
    assert price_file.asked(tmp_path) == 350_000
    price_file.ask(tmp_path, 0)
    assert price_file.asked(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == [price_file.PRICE_FILE]
    price_file.forget(tmp_path)
    price_file.forget(tmp_path)
    assert price_file.asked(tmp_path) is None


@pytest.mark.parametrize("text", [b"", b"abc", b"-5", b"1.5", b"\xff\xfe", b"9" * 10_000])
def test_what_is_no_price_is_none(tmp_path: Path, text: bytes) -> None:
    """Whatever lies there, no beat carries nonsense."""
    (tmp_path / price_file.PRICE_FILE).write_bytes(text)
    assert price_file.asked(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state-dir"):
        price_file.ask(tmp_path / "none", 1)


def test_the_throttle_is_a_time_for_a_step() -> None:
    """Eight slots at 80 tokens a second: a step, eight tokens when full, takes a tenth of a second."""
    assert engine_settings("torch", slots=8, throttle=80.0).least_step_s == pytest.approx(0.1)
    assert EngineSettings().least_step_s == 0.0
    with pytest.raises(ConfigError, match="--throttle"):
        engine_settings("torch", slots=32, throttle=1.0)
