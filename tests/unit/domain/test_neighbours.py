"""Neighbourhoods: complete when small, connected and stable when large."""

from __future__ import annotations

from random import Random

import pytest

from coordinator.domain.neighbours import NEIGHBOURS, Member, neighbours, takes_from_seeder


def _swarm(count: int, *, deaf: int = 0) -> list[Member]:
    rng = Random(count)
    return [Member(f"w{number}", rng.lognormvariate(15, 0.8), number >= deaf) for number in range(count)]


def test_a_small_swarm_is_fully_connected_fastest_first() -> None:
    members = [Member("a", 1.0, True), Member("b", 3.0, True), Member("c", 2.0, True)]
    assert [one.worker_id for one in neighbours("a", members)] == ["b", "c"]


def test_who_does_not_listen_is_dialled_by_nobody() -> None:
    members = _swarm(6, deaf=3)
    for member in members:
        assert all(one.is_reachable for one in neighbours(member.worker_id, members))
    assert len(neighbours("w0", members)) == 3


@pytest.mark.parametrize("count", [18, 64, 500])
def test_a_large_swarm_is_connected_with_few_links(count: int) -> None:
    members = _swarm(count)
    links: dict[str, set[str]] = {one.worker_id: set() for one in members}
    for member in members:
        chosen = neighbours(member.worker_id, members)
        assert len(chosen) == NEIGHBOURS // 2
        assert len({one.worker_id for one in chosen} - {member.worker_id}) == len(chosen)
        for other in chosen:
            links[member.worker_id].add(other.worker_id)
            links[other.worker_id].add(member.worker_id)
    assert _reached(links, "w0") == set(links)
    assert sum(map(len, links.values())) / count <= NEIGHBOURS


def _reached(links: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        fresh = links[todo.pop()] - seen
        seen |= fresh
        todo += fresh
    return seen


def test_half_of_the_neighbours_are_among_the_faster_half() -> None:
    members = _swarm(200)
    faster = {one.worker_id for one in sorted(members, key=lambda one: -one.uplink)[:101]}
    for member in members:
        chosen = neighbours(member.worker_id, members)
        assert sum(one.worker_id in faster for one in chosen) >= NEIGHBOURS // 4


def test_one_that_leaves_changes_only_its_own_neighbourhoods() -> None:
    members = _swarm(100)
    left = members[7].worker_id
    rest = [one for one in members if one.worker_id != left]
    changed = 0
    for member in rest:
        before = {one.worker_id for one in neighbours(member.worker_id, members)}
        after = {one.worker_id for one in neighbours(member.worker_id, rest)}
        changed += len(before - after - {left})
    assert changed <= NEIGHBOURS  # the border of the faster half moves by one


def test_the_seeder_feeds_everyone_in_a_small_swarm_and_the_fastest_of_a_draw_in_a_large_one() -> None:
    small, large = _swarm(NEIGHBOURS), _swarm(1000)
    assert all(takes_from_seeder(one.worker_id, small) for one in small)
    fed = [one for one in large if takes_from_seeder(one.worker_id, large)]
    assert len(fed) == NEIGHBOURS
    median = sorted(one.uplink for one in large)[500]
    assert all(one.uplink > median for one in fed)
