"""The fluid model of dissemination against the piece-level one, which runs the product's policy, and against arithmetic."""

from __future__ import annotations

from math import inf
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.domain.fluid import fluid_bound
from simulator.fleet.spread import MBIT, Class, Swarm, Topology, arrivals, fluid, last_s, p95_s, piece_bytes, piecewise

MOST_APART = 0.10
CROWDS = {
    "equal": (1.0, 0.0, 0.0),
    "mixed": (0.5, 0.25, 0.25),
    "slow": (0.25, 0.0, 0.75),
}


def crowd(shares: tuple[float, ...], workers: int, topology: Topology = "swarm", rtt_s: float = 0.05) -> Swarm:
    classes = tuple(Class(int(share * workers), up) for share, up in zip(shares, (100.0, 400.0, 40.0), strict=True))
    return Swarm(classes, 500.0, rtt_s, topology)


@pytest.mark.parametrize("size", [61e6, 1e9], ids=["delta", "keyframe"])
@pytest.mark.parametrize("shares", CROWDS.values(), ids=CROWDS)
def test_the_fluid_model_agrees_at_16(shares: tuple[float, ...], size: float) -> None:
    """Within 10 % of the last worker's time."""
    swarm = crowd(shares, 16)
    assert last_s(fluid(swarm, size)) == pytest.approx(last_s(piecewise(swarm, size)), rel=MOST_APART)


@pytest.mark.long
@pytest.mark.parametrize("size", [61e6, 1e9], ids=["delta", "keyframe"])
@pytest.mark.parametrize("shares", CROWDS.values(), ids=CROWDS)
def test_the_fluid_model_agrees_at_64(shares: tuple[float, ...], size: float) -> None:
    """Where one model takes over from the other."""
    swarm = crowd(shares, 64)
    assert last_s(fluid(swarm, size)) == pytest.approx(last_s(piecewise(swarm, size)), rel=MOST_APART)


@pytest.mark.parametrize("topology", ["star", "chain", "tree"])
def test_fixed_trees_have_their_textbook_times(topology: Topology) -> None:
    """Star N·F/B; chain and tree: the busiest sender, and one piece to the deepest leaf."""
    swarm = crowd((0.5, 0.5, 0.0), 8, topology, rtt_s=0.0)
    assert last_s(fluid(swarm, 5e7)) == pytest.approx(last_s(piecewise(swarm, 5e7)), rel=MOST_APART)


def test_a_star_by_hand() -> None:
    """Ten workers, 100 MB, 100 Mbit/s: eighty seconds, and half a round trip."""
    swarm = Swarm((Class(10, 1000.0),), 100.0, 0.1, "star")
    assert fluid(swarm, 1e8) == ((pytest.approx(80.05),),)


def test_a_slow_downlink_waits_for_itself_alone() -> None:
    """It is late, and holds nobody up."""
    swarm = Swarm((Class(70, 100.0), Class(1, 100.0, 5.0)), 1000.0, 0.0)
    fast, slow = arrivals(swarm, 1e8)
    assert slow == (pytest.approx(1e8 / (5 * MBIT)),)
    assert fast[0] < 0.1 * slow[0]
    piece_fast, piece_slow = piecewise(Swarm((Class(7, 100.0), Class(1, 100.0, 5.0)), 1000.0, 0.0), 1e7)
    assert piece_slow == (pytest.approx(16.0),)
    assert piece_fast[-1] < 2.0


def test_nobody_to_send_to() -> None:
    """Empty classes keep their place."""
    assert arrivals(Swarm((Class(0, 1.0), Class(0, 1.0)), 10.0, 0.0), 1e6) == ((), ())
    assert last_s(((), ())) == 0.0
    assert p95_s(((), ()), (0, 0)) == 0.0


def test_the_95th_percentile_counts_workers_not_entries() -> None:
    """A class's entry stands for all of its workers."""
    assert p95_s(((1.0,), (9.0,)), (96, 4)) == 1.0
    assert p95_s(((1.0,), (9.0,)), (90, 10)) == 9.0
    assert p95_s(((1.0, 2.0),), (2,)) == 2.0


@given(
    ups=st.lists(st.floats(5.0, 1000.0), min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 400), min_size=6, max_size=6),
    size=st.floats(1e6, 2e10),
    topology=st.sampled_from(get_args(Topology)),
)
def test_no_topology_beats_the_bound(ups: list[float], counts: list[int], size: float, topology: Topology) -> None:
    """Of whatever crowd; chain and tree may have free uplinks at their ends, so they are held to the seeder's part of it."""
    classes = tuple(Class(count, up, inf) for up, count in zip(ups, counts, strict=False))
    swarm = Swarm(classes, 100.0, 0.01, topology)
    every = [one.up_mbps * MBIT for one in classes for _ in range(one.count)]
    assert last_s(fluid(swarm, size)) >= fluid_bound(size, 100.0 * MBIT, every) * (1 - 1e-9)


@given(size=st.floats(1.0, 1e12), workers=st.integers(1, 10_000))
def test_pieces_are_as_the_policy_wants_them(size: float, workers: int) -> None:
    """64 KiB to 1 MiB."""
    assert 64 << 10 <= piece_bytes(size, workers) <= 1 << 20


def test_a_large_file_is_a_smaller_one_in_slow_motion() -> None:
    """Sixteen times the bytes and the round trip take sixteen times as long."""
    small, large = (piecewise(Swarm((Class(4, 100.0),), 100.0, 0.01 * k), k * 800 * 2.0**20) for k in (1, 16))
    assert large[0] == pytest.approx([16 * time for time in small[0]], rel=1e-3)


def test_slow_links_do_not_stop_a_keyframe() -> None:
    """25 Mbit/s and 16.4 GB: longer than any patience for one of 800 pieces, but it arrives."""
    times = piecewise(Swarm((Class(2, 100.0), Class(1, 500.0), Class(1, 25.0)), 500.0, 0.05), 16.4e9)
    assert last_s(times) < 2 * 4 * 16.4e9 / (1225.0 * MBIT)
