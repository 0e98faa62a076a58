"""The figures' arithmetic by hand; the committed page is what the command writes (long)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.figures import assumptions as given
from simulator.figures import cards, cost, spread
from simulator.figures.jobs import DELTAS, PAPER, Ran, job

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "docs" / "figures"


def test_a_step_by_hand() -> None:
    """8 FLOP x 8.2e9 x 2048 x 1700 tokens on 8 cards of 989 TFLOP/s at 40 %: 72.2 s."""
    assert given.LARGE.train_s() == pytest.approx(8 * 8.2e9 * 2048 * 1700 / (8 * 989e12 * 0.4))
    assert given.LARGE.train_s() == pytest.approx(72.2, abs=0.1)


@pytest.mark.parametrize(("users", "tokens"), given.H100.curve)
def test_the_curve_goes_through_its_points(users: int, tokens: float) -> None:
    """Scaled to the bf16 rate, and flat beyond the last."""
    assert cards.tokens_per_s(given.H100, given.LARGE, users) == pytest.approx(tokens * 13_322 / 15_264)
    assert cards.tokens_per_s(given.H100, given.LARGE, 4000) == pytest.approx(13_322)


def test_the_curve_between_its_points() -> None:
    """Half way from 64 to 128 users; a 4090 with the 8B model goes through its own point, and is flat beyond it."""
    assert cards.tokens_per_s(given.H100, given.LARGE, 96) == pytest.approx((8621 + 12176) / 2 * 13_322 / 15_264)
    at_48 = 1150 + (48 - 16) / (64 - 16) * (2954 - 1150)
    assert cards.tokens_per_s(given.RTX4090, given.LARGE, 16) == pytest.approx(1150 / at_48 * 2380)
    assert [cards.tokens_per_s(given.RTX4090, given.LARGE, users) for users in (48, 64)] == pytest.approx([2380, 2380])


def test_what_fits_into_a_card() -> None:
    """8B on 24,564 MiB: 6.78e9 bytes beside the weights; a completion of 1,500 tokens is seen at 200 + 1,500 (1 + cv²) / 2."""
    seen = 200 + 1500 * (1 + cards.lengths().cv_squared) / 2
    assert seen == pytest.approx(200 + 1500 * 1.49 / 2, rel=0.01)
    assert cards.users_that_fit(given.RTX4090, given.LARGE, 1500.0) == int((0.9 * 24_564 * 2**20 - 16.4e9) / (147_456 * seen)) == 35
    assert cards.fit(given.RTX4090, given.LARGE, 750.0).users == 48  # more would fit, and nobody measured it
    assert cards.fit(given.RTX4090, given.LARGE, 1500.0).tokens_per_s == pytest.approx(
        2380 * (1150 + 19 / 48 * 1804) / (1150 + 32 / 48 * 1804)
    )
    assert cards.fit(given.H100, given.LARGE, 1500.0).tokens_per_s == pytest.approx(13_322)


def test_draining_takes_longer_than_the_full_rate_would() -> None:
    """And longer than in proportion for long completions: fewer of them fit."""
    tokens = given.GROUP_SIZE * given.GROUPS * given.MEAN_TOKENS
    full_s = tokens / given.LARGE.learner_cards / 13_322
    assert cost.drain_s(given.LARGE, given.MEAN_TOKENS) > full_s
    assert cost.drain_s(given.LARGE, 3000.0) > 2 * cost.drain_s(given.LARGE, 1500.0)
    assert cost.drain_s(given.LARGE, 3.0) == pytest.approx(2 * cost.drain_s(given.LARGE, 1.5), rel=1e-9)  # all fit


def test_together_by_hand() -> None:
    """All cards for the whole step, at the learner's price."""
    point = cost.together(given.SMALL, given.MEAN_TOKENS)
    assert point.usd["community"] == pytest.approx(4 * 2.69 * point.step_s / 3600)
    assert point.utilisation == pytest.approx(given.SMALL.train_s() / point.step_s)


def test_a_saving_by_hand() -> None:
    """Three quarters of the cost: a quarter saved."""
    base = cost.together(given.SMALL, given.MEAN_TOKENS)
    cheap = replace(base, way=cost.ECHO_DELTA, usd={name: 0.75 * usd for name, usd in base.usd.items()})
    assert cost.saving([base, cheap], given.SMALL, given.MEAN_TOKENS, "secure", cost.TOGETHER) == pytest.approx(0.25)


def test_a_job_priced_by_hand() -> None:
    """Four cards at 2 USD and ten workers at 0.5, a step of six minutes."""
    ran = Ran(1.0, 0.0, 360.0, 10.0, 1, 1.0, False)
    assert ran.usd_per_step(4, 2.0, 0.5) == pytest.approx(1.3)


def test_the_ways_differ_where_they_say() -> None:
    """The paper's: kappa = S - 1, whole snapshots, standing still."""
    paper = job(given.LARGE, PAPER, 6, hours=1.0, links=given.WIDE_AREA)
    ours = job(given.LARGE, DELTAS, 6, hours=1.0, links=given.WIDE_AREA)
    assert (paper.job.publish_every, paper.job.on_update, paper.snapshot.delta_bytes) == (5, "idle", None)
    assert (ours.job.publish_every, ours.job.on_update, ours.snapshot.delta_bytes) == ("auto", "keep", 61e6)
    assert paper.snapshot.keyframe_bytes == 16.4e9


@pytest.mark.parametrize("workers", spread.WORKERS)
def test_a_crowd_has_all_its_workers(workers: int) -> None:
    """Whatever the shares."""
    assert all(spread.crowd_of(parts, workers).workers == workers for parts in spread.CROWDS.values())


def test_the_committed_pictures_are_small() -> None:
    """Each under 150 kB, and shown by one page."""
    pictures = sorted(FIGURES.glob("*.png"))
    assert {"cost", "dissemination", "staleness"} < {path.stem for path in pictures}
    assert all(path.stat().st_size < 150_000 for path in pictures)
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    assert [sum(f"(figures/{path.name})" in page for page in pages) for path in pictures] == [1] * len(pictures)


@pytest.mark.long
def test_the_committed_page_is_what_the_command_writes(tmp_path: Path) -> None:
    """Same seeds, same numbers. A minute or three."""
    subprocess.run([sys.executable, "-m", "simulator.figures", "--out", str(tmp_path / "figures")], cwd=ROOT, check=True)
    assert (tmp_path / "figures.md").read_text() == (ROOT / "docs" / "figures.md").read_text()
