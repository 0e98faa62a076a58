"""Each benchmark still runs: its smallest form, as a process, prints the figures that it is there for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


def bench(*arguments: str, timeout: float = 120) -> Any:
    """The JSON that a benchmark prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments, "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_load() -> None:
    figures = bench("load", "--seconds", "2", "--workers", "5", "--database", "sqlite")["sqlite"]
    assert figures["accepted_per_s"] > 0
    assert figures["failures"] == {}


def test_store() -> None:
    figures = bench("store", "--seconds", "0.2")["store"]
    assert all(value > 0 for of_database in figures.values() for value in of_database.values())


def test_weights() -> None:
    figures = bench("weights", "--elements", str(1 << 18))
    assert 1.3 < figures["bytes_per_param"] < 1.4
    assert figures["encode_gb_s"] > 0


@pytest.mark.long
def test_lowrank() -> None:
    """Deltas grow with the learning rate, low-rank edges do not, and take less than their factors in bf16."""
    slow, middle, fast = bench("lowrank", "--steps", "2", timeout=300)
    assert slow["single"] < middle["single"] < fast["single"]
    assert all(0.5 * one["factors"] < one["lowrank"] < one["factors"] for one in (slow, middle, fast))
    assert fast["lowrank"] < 1.02 * slow["lowrank"]


def test_codec(tmp_path: Path) -> None:
    """On two versions in which every fiftieth element grows by one unit in the last place."""
    pytest.importorskip("zipnn", reason="the bench extra is not installed")
    words = (np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype("<f4").view("<u4") >> 16).astype("<u2")
    words.tofile(tmp_path / "toy_v01.u16")
    words[::50] += 1
    words.tofile(tmp_path / "toy_v02.u16")
    (figures,) = bench("codec", "--slices", str(tmp_path), "--repeats", "1")["deltas"].values()
    assert figures["elements"] == 1 << 16
    assert figures["changed"] == pytest.approx(0.02, rel=0.01)
    assert figures["single"] == 1.0
    by_form = {name: form["bytes_per_param"] for name, form in figures["forms"].items()}
    assert by_form["TRL form"] == pytest.approx(6 * figures["changed"], rel=0.01)
    assert min(by_form, key=lambda name: by_form[name]).startswith("ours")
