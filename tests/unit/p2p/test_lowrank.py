"""When low-rank edges are made, and which edge of a version goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2p.domain import lineage, lowrank
from p2p.domain.lineage import LOWRANK, Way
from p2p.domain.lowrank import Adapters
from p2p.domain.manifest import Tensor
from tests.factories_lowrank import matrix

ADAPTERS = Adapters(4, ("q_proj", "down_proj"))
Q, DOWN = matrix("model.layers.0.self_attn.q_proj.weight", 32, 16), matrix("model.layers.0.mlp.down_proj.weight", 16, 48)
OTHERS = [matrix("model.layers.0.mlp.up_proj.weight", 48, 16), Tensor("model.layers.0.self_attn.q_proj.bias", "BF16", (32,), 64)]


def way(base: int | None, to: int, nbytes: int, encoding: str = "delta") -> Way:
    return Way(f"{encoding}:{base}>{to}", f"d{to}", to, encoding, None if base is None else f"d{base}", base, nbytes)


def order(last: int) -> list[str]:
    return [f"d{number}" for number in range(last + 1)]


def test_factors_take_two_bytes_a_number() -> None:
    """4 * (32 + 16) and 4 * (16 + 48) numbers."""
    assert lowrank.factor_bytes([Q, DOWN, *OTHERS], ADAPTERS) == 2 * 4 * (48 + 64)


def test_what_no_edge_can_carry_is_known_beforehand() -> None:
    assert lowrank.factor_bytes(OTHERS, ADAPTERS) is None, "no target"
    small = matrix("a.q_proj.weight", 8, 7)  # 56 numbers, factors of 60
    assert lowrank.factor_bytes([Q, small], ADAPTERS) is None
    assert lowrank.factor_bytes([Tensor("a.q_proj.weight", "F32", (32, 32), 4096)], ADAPTERS) is None
    assert lowrank.fits(matrix("w", 8, 8), 4), "as large as its factors"


def test_the_newest_edge_tells_what_the_next_one_takes() -> None:
    assert lowrank.expected_bytes([way(0, 1, 7)], most=100) == 100
    assert lowrank.expected_bytes([way(0, 3, 70, LOWRANK), way(0, 2, 60, LOWRANK), way(3, 4, 7)], most=100) == 70


def test_the_smaller_edge_goes_first() -> None:
    """Judged by the newest single: an edge over eight versions says nothing about a step."""
    ways = [way(None, 0, 1000, "planes"), *(way(n, n + 1, 40 + n) for n in range(8)), way(0, 8, 120)]
    assert not lowrank.goes_first(order(8), ways, nbytes=47)
    assert lowrank.goes_first(order(8), ways, nbytes=46)
    assert not lowrank.goes_first(order(0), ways[:1], nbytes=1), "nothing is known of deltas yet"
    assert not lowrank.goes_first(order(8), [way(9, 10, 1000)], nbytes=1), "of a publication that is not known"


def test_an_edge_is_due_where_it_beats_what_leads_there() -> None:
    """From version 0 to 3 by singles costs 30: an edge of 29 is made, one of 30 is not."""
    ways = [way(None, 0, 1000, "planes"), *(way(n, n + 1, 10) for n in range(3))]
    assert lowrank.is_due(order(3), ways, base="d0", nbytes=29)
    assert not lowrank.is_due(order(3), ways, base="d0", nbytes=30)
    assert lowrank.is_due(order(3), ways[:3], base="d0", nbytes=500), "nothing leads from the base to version 3"
    assert not lowrank.is_due(order(3), [*ways, way(0, 3, 20, LOWRANK)], base="d0", nbytes=5), "it has one"
    assert not lowrank.is_due(order(0), ways[:1], base="d0", nbytes=1), "the base itself"


def test_the_delta_follows_where_the_low_rank_edge_went_first() -> None:
    led = [way(None, 0, 1000, "planes"), way(0, 1, 20, LOWRANK)]
    assert lowrank.lacks_single(order(1), led)
    assert not lowrank.lacks_single(order(1), [*led, way(0, 1, 50)])
    assert not lowrank.lacks_single(order(1), led[:1]), "a base of its own"
    assert not lowrank.lacks_single(order(0), led)
    assert not lowrank.lacks_single(["", "d1"], led), "the publication before it was not read"


@given(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=40, max_size=40), st.integers(1, 800))
def test_a_due_edge_shortens_the_way_of_who_comes_late(last: int, sizes: list[int], nbytes: int) -> None:
    """With the edge a joiner and one that kept the base pay less; without it being due, it would not have been taken."""
    ways = [way(None, 0, 5000, "planes"), *(way(n, n + 1, sizes[n]) for n in range(last))]
    edge = way(0, last, nbytes, LOWRANK)
    for held in (frozenset(), frozenset({"d0"})):
        before = lineage.cost(lineage.path(ways, f"d{last}", held=held))
        after = lineage.cost(lineage.path([*ways, edge], f"d{last}", held=held))
        assert (after < before) == lowrank.is_due(order(last), ways, base="d0", nbytes=nbytes)


# --- what the lineage makes of them


def test_two_low_rank_edges_are_kept_and_none_stands_in_for_a_delta() -> None:
    ways = [way(None, 0, 1000, "planes"), *(way(n, n + 1, 10) for n in range(30)), *(way(0, n, 25, LOWRANK) for n in range(20, 31))]
    kept = lineage.retained(order(30), ways, held=frozenset({"d29"}))
    assert {one for one in kept if one.startswith(LOWRANK)} == {"lowrank:0>29", "lowrank:0>30"}
    assert {f"delta:{n}>{n + 1}" for n in range(30)} <= kept


def test_a_job_with_low_rank_edges_needs_no_new_base() -> None:
    """After 600 publications, and with a delta from the base of any size: the low-rank edge is as large as ever."""
    late = order(600)
    ways = [way(None, 0, 1000, "planes"), way(0, 600, 900), *(way(n, n + 1, 10) for n in range(600))]
    assert lineage.due(late, ways, parameters=1000).keyframe
    assert not lineage.due(late, [*ways, way(0, 600, 25, LOWRANK)], parameters=1000).keyframe
