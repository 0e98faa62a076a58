"""docs/qwen3-4b.md: its job file is one, the plan accepts it and says what the page says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.wire.job import JobConfig

DOCS = Path(__file__).parents[3] / "docs"
JOB, MARKET = DOCS / "examples" / "qwen3-4b-gsm8k.toml", DOCS / "examples" / "qwen3-4b-market.json"
PAGE = (DOCS / "qwen3-4b.md").read_text()
ASSUMED = {"mean_tokens": 300, "prompt_tokens": 150, "tokens_per_s": 46, "learner_tflops": 800}


def test_the_job_file_is_a_job() -> None:
    config = JobConfig.model_validate(tomllib.loads(JOB.read_text()))
    assert config.rollouts_per_step == 1024
    assert config.staleness.max == 6
    assert (config.learner.ranks, config.learner.dtype, config.learner.gradient_checkpointing) == (2, "bfloat16", True)


def test_the_plan_is_the_pages() -> None:
    """The command of the page, and its figures."""
    given = [part for name, value in ASSUMED.items() for part in ("--assume", f"{name}={value}")]
    assert all(f"--assume {name}={value}" in PAGE for name, value in ASSUMED.items())
    result = CliRunner().invoke(app, ["plan", "--job", str(JOB), "--market", str(MARKET), *given, "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert f"required {plan['required_rate']:.2f} completions/s" in PAGE
    cheapest = plan["fleets"][0]
    assert f"| {cheapest['usd_per_hour']:.2f} | " in PAGE
    assert plan["kappa"] == 2


def test_the_pages_sums() -> None:
    """Weights from the model's shape; bytes of the cache, of masters and moments."""
    layer = 2560 * 128 * (32 + 2 * 8) + 32 * 128 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    weights = 151_936 * 2560 + 36 * layer + 2560
    assert weights == pytest.approx(4.02e9, rel=1e-3)
    assert f"{2 * weights / 1e9:.2f} GB = {2 * weights / 2**30:.2f} GiB" in PAGE
    assert f"{2 * 36 * 8 * 128 * 2:,} bytes a token" in PAGE
    for cards, gathered in ((1, 0.0), (2, 3.9), (4, 3.9)):
        together = 16 * weights / cards / 1e9 + gathered + 10.5
        assert re.search(rf"^\| \**{cards}\b.*\| \**{together:.0f}\**", PAGE, flags=re.MULTILINE)
