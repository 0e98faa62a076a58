"""The swarm benchmark itself: its bound, its network, and that it leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.swarm import shaper
from tests.bench.swarm.bound import bound_s, star_s
from tests.bench.swarm.model import intermediate
from tests.bench.swarm.network import NETNS, PREFIX, Network, links_of, namespaces, sweep, why_not
from tests.bench.swarm.run import piece_bytes
from tests.bench.swarm.table import ROWS

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
ROOT = Path(__file__).resolve().parents[3]


def bench(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench.swarm", *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def measure(*options: str) -> dict[str, object]:
    process = bench(*options, "--runs", "1")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("uploads", "seconds"),
    [  # of 50 MB: the published bounds 8.0, 8.0 and 10.9 s, and a slow download, each with 4.6 % of headers
        ((50, 50, 50, 50), 8.0),
        ((50, 10, 50, 50), 8.0),
        ((50, 5, 5, 50), 3 * 400 / 110),
        ((20, 100, 100, 100, 100), 20.0),
    ],
)
def test_bound_is_the_fluid_bound_with_headers(uploads: tuple[float, ...], seconds: float) -> None:
    assert bound_s(50_000_000, uploads, (0,) * len(uploads)) == pytest.approx(seconds * 1.046)


def test_slow_download_bounds_too() -> None:
    assert bound_s(50_000_000, (50, 50, 50), (0, 10, 0)) == pytest.approx(40 * 1.046)


def test_star_sends_a_copy_to_each() -> None:
    assert star_s(50_000_000, (50, 50, 50, 50)) == pytest.approx(24 * 1.046)


def test_pieces_follow_the_published_rule() -> None:
    assert piece_bytes(50_000_000, 3) == 125_000
    assert piece_bytes(50_000_000, 16) == 65_536
    assert piece_bytes(10**9, 3) == 1 << 20


def test_table_asks_copies_only_where_the_seeder_is_the_limit() -> None:
    assert {row.name: row.seeder_is_limit for row in ROWS} == {
        "50;50,50,50": True,
        "50;10,50,50": True,
        "50;50,50,10": True,
        "50;5,5,50": False,
        "20;100,100,100,100": True,
        "30;8,60,60,25": True,
        "50;16x50": True,
        "20;20,20,20 rtt 100": True,
    }


@pytest.mark.parametrize(
    ("uploads", "downloads", "rtt_ms", "word"),
    [
        ((50.0,), (), 0, "uploads has 1 rates"),
        ((50.0, 50.0), (1.0,), 0, "downloads has 1 rates"),
        ((50.0, 0.0), (), 0, "outside"),
        ((50.0, 50.0), (), -1, "rtt-ms"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    uploads: tuple[float, ...], downloads: tuple[float, ...], rtt_ms: float, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        links_of(uploads, downloads, rtt_ms)


@needs_namespaces
def test_the_shaper_is_measured_both_ways() -> None:
    """A download below the upload limits what TCP gets from anybody; a wide one does not hide a narrow upload. Nothing gets more than its rate."""
    with Network(links_of((40, 10, 40), (0, 20, 80))) as network:
        found = shaper.measure(network)
    uploads, downloads = found["uploads"], found["downloads"]
    assert isinstance(uploads, list)
    assert isinstance(downloads, list)
    assert {(rate["host"], rate["mbit"]) for rate in uploads} == {(1, 10), (0, 40)}
    assert {(rate["host"], rate["mbit"]) for rate in downloads} == {(2, 40), (1, 20)}
    assert all(0.5 < rate["measured_mbit"] / rate["mbit"] < 1.03 for rate in (*uploads, *downloads)), (
        found
    )  # slower: a busy machine


@needs_namespaces
def test_control_takes_the_time_that_is_known_beforehand() -> None:
    found = measure("--uploads", "40,40,40", "--mb", "2", "--topology", "plain")
    star = 2 * 2 * 8 * 1.046 / 40
    assert found["star_bound_s"] == pytest.approx(star)
    assert 0.98 * star <= found["last_worker_s"] <= 1.5 * star  # type: ignore[operator]
    assert found["shaper"]["ok"]  # type: ignore[index]
    assert found["seeder_copies"] == pytest.approx(2.0, rel=0.02)


@needs_namespaces
@pytest.mark.parametrize("topology", ["swarm", "star", "chain", "tree"])
def test_every_topology_brings_the_bytes(topology: str) -> None:
    found = measure("--uploads", "40,40,40", "--mb", "2", "--topology", topology)
    assert found["ratio"] >= 0.98  # type: ignore[operator]
    assert [worker["host"] for worker in found["per_worker"]] == [1, 2]  # type: ignore[attr-defined]


@needs_namespaces
@pytest.mark.long
@pytest.mark.parametrize("version", ["0", "1"])
def test_real_processes_bring_a_version(version: str) -> None:
    """Coordinator, learner, seeder and two workers as users run them; the coordinator's own figures come along."""
    found = measure("--uploads", "40,40,40", "--mb", "8", "--processes", "real", "--version", version)
    payload = found["payload_bytes"]
    assert payload == pytest.approx(8e6, rel=0.02 if version == "0" else 0.2)
    assert found["ratio"] >= 0.98  # type: ignore[operator]
    product = found["product"]
    assert isinstance(product, dict)
    assert product["fetched_bytes"] == 2 * payload  # type: ignore[operator]
    assert product["split"]["transfer_s"] > 0
    assert all(0 < worker["last_piece_s"] <= worker["seconds"] for worker in found["per_worker"])  # type: ignore[attr-defined]


def test_a_model_has_the_payload_that_was_asked_for() -> None:
    """50 MB at 1.332 bytes a weight are 37.5 million weights: four layers of 0.66 million in attention and 3 times 512 a unit."""
    assert intermediate(50_000_000) == round((50_000_000 / 1.332 / 4 - 655_360) / 1536)
    with pytest.raises(ValueError, match=r"give 3\.7 or more"):
        intermediate(3_000_000)


@needs_namespaces
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind(ending: signal.Signals) -> None:
    process = bench("--uploads", "1,1,1", "--mb", "50", "--topology", "plain")
    mine = f"{PREFIX}{process.pid}-"
    deadline = time.monotonic() + 30
    while not any(name.startswith(mine + "2") for name in namespaces()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(ending)
    process.communicate(timeout=30)
    if ending == signal.SIGKILL:
        sweep()
    assert not any(name.startswith(mine) for name in namespaces())


@needs_namespaces
def test_network_of_a_live_run_is_not_swept() -> None:
    with Network(links_of((10, 10))) as network:
        assert sweep() == []
        assert (NETNS / network.hub).exists()
    assert not (NETNS / network.hub).exists()
