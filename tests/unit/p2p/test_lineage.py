from __future__ import annotations

import itertools

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.domain import lineage
from p2p.domain.lineage import Due, Way, anchors, cost, current_base, due, path, retained, should_jump
from p2p.errors import ManifestError

NONE: frozenset[str] = frozenset()


def name(number: int) -> str:
    return blake3(number.to_bytes(4, "little")).hexdigest()


def way(base: int | None, to: int, nbytes: int = 10, encoding: str = "") -> Way:
    kind = encoding or ("planes" if base is None else "delta")
    return Way(f"{kind}:{base}>{to}", name(to), to, kind, None if base is None else name(base), base, nbytes)


def singles(last: int, nbytes: int = 10) -> list[Way]:
    return [way(number - 1, number, nbytes) for number in range(1, last + 1)]


def grown(last: int, *, single: int = 10, keyframe: int = 1000) -> tuple[list[str], list[Way]]:
    """The lineage after `last` publications that got what was due; a squashed edge over k costs single * k**0.68."""
    order: list[str] = []
    ways: list[Way] = []
    for number in range(last + 1):
        order.append(name(number))
        ways += [way(number - 1, number, single)] if number else [way(None, 0, keyframe)]
        wanted = due(order, ways, parameters=1000)
        ways += [way(None, number, keyframe)] if wanted.keyframe else []
        for digest in wanted.bases:
            base = order.index(digest)
            ways.append(way(base, number, int(single * (number - base) ** 0.68)))
    return order, ways


def ids(ways: tuple[Way, ...]) -> list[str]:
    return [one.id for one in ways]


def test_a_worker_in_step_takes_the_single() -> None:
    _, ways = grown(20)
    assert ids(path(ways, name(20), held=frozenset({name(19)}))) == ["delta:19>20"]


def test_a_worker_that_was_away_takes_squashed_edges() -> None:
    """From 10 to 40: singles to 16, eights to 40. Seen by hand: 6 * 10 + 3 * int(10 * 8 ** 0.68) = 60 + 3 * 41 = 183."""
    _, ways = grown(40)
    route = path(ways, name(40), held=frozenset({name(10)}))
    assert ids(route) == [*(f"delta:{n}>{n + 1}" for n in range(10, 16)), "delta:16>24", "delta:24>32", "delta:32>40"]
    assert cost(route) == 183


def test_a_joiner_takes_the_base_the_cumulative_and_the_tail() -> None:
    order, ways = grown(75)
    assert ids(path(ways, order[-1], held=NONE)) == [
        "planes:None>0",
        "delta:0>64",
        "delta:64>72",
        *(f"delta:{n}>{n + 1}" for n in (72, 73, 74)),
    ]


def test_a_held_target_needs_nothing() -> None:
    assert path([], name(3), held=frozenset({name(3)})) == ()


def test_unknown_encodings_are_passed_over() -> None:
    ways = [way(0, 1, 1, "zip"), way(0, 1, 9), way(None, 1, 99)]
    assert ids(path(ways, name(1), held=frozenset({name(0)}))) == ["delta:0>1"]
    with pytest.raises(ManifestError, match="no path is known"):
        path(ways[:2], name(1), held=NONE)


def test_what_failed_is_not_tried_again_first() -> None:
    ways = [way(0, 1, 10), way(None, 1, 100), way(None, 0, 50)]
    held = frozenset({name(0)})
    assert ids(path(ways, name(1), held=held, doubted=frozenset({"delta:0>1"}))) == ["planes:None>1"]
    assert ids(path(ways, name(1), held=held, doubted=frozenset({"delta:0>1", "planes:None>1"}))) == ["delta:0>1"]
    by_base = ids(path(ways, name(1), held=held, doubted=frozenset({name(0)})))
    assert by_base == ["planes:None>0", "delta:0>1"], "the held base is doubted: the same version from a keyframe is not"
    assert ids(path(ways[:1], name(1), held=held, doubted=frozenset({"delta:0>1", name(0)}))) == ["delta:0>1"], (
        "nothing else is left"
    )


edges = st.tuples(st.none() | st.integers(0, 5), st.integers(0, 5), st.integers(0, 40))


def brute_force(ways: list[Way], target: str, held: frozenset[str], doubted: frozenset[str]) -> tuple[int, int, int] | None:
    """The least (doubted parts, bytes, ways) over every sequence of distinct ways."""
    best = (int(target in doubted), 0, 0) if target in held else None
    for length in range(1, min(len(ways), 5) + 1):
        for route in itertools.permutations(ways, length):
            ends = [route[0].base_digest, *(one.digest for one in route)]
            linked = all(one.base_digest == before.digest for before, one in itertools.pairwise(route))
            if not linked or ends[-1] != target or (ends[0] is not None and ends[0] not in held):
                continue
            doubts = sum(one.id in doubted for one in route) + (ends[0] in doubted)
            price = (doubts, sum(one.nbytes for one in route), length)
            best = price if best is None else min(best, price)
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(edges, max_size=6, unique_by=lambda one: one[:2]), st.sets(st.integers(0, 5), max_size=2), st.data())
def test_the_path_is_the_cheapest_of_all(some: list[tuple[int | None, int, int]], held: set[int], data: st.DataObject) -> None:
    ways = [way(*one) for one in some]
    mine = frozenset(name(number) for number in held)
    doubted = frozenset(data.draw(st.sets(st.sampled_from([*(one.id for one in ways), *sorted(mine), "none"]), max_size=3)))
    best = brute_force(ways, name(3), mine, doubted)
    if best is None:
        with pytest.raises(ManifestError):
            path(ways, name(3), held=mine, doubted=doubted)
        return
    route = path(ways, name(3), held=mine, doubted=doubted)
    start = route[0].base_digest if route else name(3)
    found = (sum(one.id in doubted for one in route) + (start in doubted), cost(route), len(route))
    assert found == best
    shuffled = data.draw(st.permutations(ways))
    assert path(shuffled, name(3), held=mine, doubted=doubted) == route, "both ends of a wire choose alike"


def test_what_is_due() -> None:
    """Every 8th an edge over eight, every 64th one against the base; nothing twice."""
    order, ways = grown(64)
    made = [one for one in ways if one.base_version is not None and one.version - one.base_version > 1]
    assert [(one.base_version, one.version) for one in made] == [*((n - 8, n) for n in range(8, 65, 8)), (0, 64)]
    assert due(order, ways, parameters=1000) == Due()
    assert due([], [], parameters=1) == Due()


def test_the_first_version_and_one_that_nothing_leads_to_get_a_keyframe() -> None:
    assert due([name(0)], [], parameters=1000) == Due(keyframe=True)
    assert due([name(0), name(1)], [way(None, 0)], parameters=1000) == Due(keyframe=True)
    assert due([name(0), name(1)], [way(0, 1)], parameters=1000) == Due(keyframe=True), "the base's keyframe is gone"


def test_a_new_base_is_declared_when_the_way_from_the_old_one_is_dearer_than_a_keyframe() -> None:
    order, ways = grown(3, single=400, keyframe=1000)
    assert [one.id for one in ways if one.base_digest is None] == ["planes:None>0", "planes:None>3"], "3 * 400 > 1000"
    assert current_base(order, ways) == name(3)


def test_a_new_base_is_declared_when_the_cumulative_edge_exceeds_a_quarter_byte_a_parameter() -> None:
    order = [name(number) for number in range(65)]
    ways = [way(None, 0, 1334), way(0, 64, 250), *singles(64)]
    assert not due(order, ways, parameters=1000).keyframe
    assert due(order, [way(None, 0, 1334), way(0, 64, 251), *singles(64)], parameters=1000).keyframe


def test_a_new_base_is_declared_after_five_hundred() -> None:
    order = [name(number) for number in range(501)]
    ways = [way(None, 0), *singles(500, 0)]
    assert due(order, ways, parameters=1000).keyframe
    assert not due(order[:-1], ways[:-1], parameters=1000).keyframe


def test_retention_keeps_the_newest_of_each_kind() -> None:
    order, ways = grown(200)
    kept = retained(order, ways, held=NONE)
    by_kind = {"single": [], "eight": [], "cumulative": [], "keyframe": []}
    for one in ways:
        if one.id in kept:
            by_kind[lineage._kind(one, {digest: number for number, digest in enumerate(order)})].append(one.version)
    assert by_kind["single"] == list(range(137, 201))
    assert by_kind["eight"] == list(range(144, 201, 8))
    assert by_kind["cumulative"] == [128, 192]
    assert by_kind["keyframe"] == [0]


def test_retention_never_drops_what_a_live_worker_or_a_fetch_needs() -> None:
    order, ways = grown(200)
    kept = retained(order, ways, held=frozenset({name(30)}), in_use=frozenset({"delta:3>4"}))
    assert "delta:3>4" in kept
    left = [one for one in ways if one.id in kept]
    assert cost(path(left, order[-1], held=frozenset({name(30)}))) == cost(path(ways, order[-1], held=frozenset({name(30)})))


@settings(max_examples=60, deadline=None)
@given(last=st.integers(0, 150), held=st.sets(st.integers(0, 150), max_size=3))
def test_after_retention_every_receiver_pays_what_it_paid_before(last: int, held: set[int]) -> None:
    order, ways = grown(last)
    receivers = frozenset(name(number) for number in held if number <= last)
    kept = retained(order, ways, held=receivers)
    left = [one for one in ways if one.id in kept]
    for start in [NONE, *(frozenset({digest}) for digest in receivers)]:
        assert path(left, order[-1], held=start) == path(ways, order[-1], held=start)
    assert retained(order, left, held=receivers) == kept, "once is enough"


def test_edges_of_lost_digests_do_not_count() -> None:
    order, ways = grown(5)
    alien = Way("alien", name(99), 5, "delta", name(4), 4, 1)
    assert "alien" not in retained(order, [*ways, alien], held=frozenset({name(98)}))
    assert retained([], ways, held=NONE) == NONE


def replayed(last: int, first: int) -> tuple[list[str], list[Way]]:
    """The lineage after a replay gave the versions `first` to `last` - 1 other bits (numbers above 100), and not yet `last`."""
    order, ways = grown(last)
    for number in range(first, last):
        base = order[number - 1]
        order[number] = name(100 + number)
        ways.append(Way(f"again:{number}", order[number], number, "delta", base, number - 1, 10))
    return order, ways


def test_ways_over_lost_versions_stay_while_the_newest_is_reached_by_them() -> None:
    """Version 20 is still the old one: from 17, from nothing. Once it is replaced too they go."""
    order, ways = replayed(20, 18)
    held = name(17)
    kept = retained(order, ways, held=frozenset({held}))
    left = [one for one in ways if one.id in kept]
    assert ids(path(left, name(20), held=frozenset({held}))) == ["delta:17>18", "delta:18>19", "delta:19>20"]
    assert path(left, name(20), held=NONE) == path(ways, name(20), held=NONE)
    order[20] = name(120)
    ways.append(Way("again:20", name(120), 20, "delta", order[19], 19, 10))
    kept = retained(order, ways, held=frozenset({held}))
    assert not kept & {"delta:17>18", "delta:18>19", "delta:19>20"}


def test_a_way_from_lost_bits_stays_as_long_as_singles_do() -> None:
    """Receivers that still hold them take it."""
    order, ways = grown(100)
    bridges = [Way(f"bridge:{number}", name(number), number, "delta", name(900 + number), number, 10) for number in (30, 90)]
    kept = retained(order, [*ways, *bridges], held=NONE)
    assert "bridge:90" in kept
    assert "bridge:30" not in kept


def test_a_version_that_nothing_leads_to_keeps_what_there_is() -> None:
    """Its keyframe is about to be made."""
    assert retained([name(0), name(1)], [way(0, 1)], held=frozenset({name(7)})) == {"delta:0>1"}


def test_anchors_are_what_the_next_edges_are_made_from() -> None:
    order, ways = grown(21)
    assert anchors(order, ways) == {name(0), name(16), name(21)}
    assert anchors([name(0)], []) == {name(0)}
    assert anchors([], []) == NONE


def test_a_running_fetch_is_finished_unless_the_jump_is_cheaper() -> None:
    assert not should_jump(left=10, jump=10)
    assert should_jump(left=11, jump=10)
