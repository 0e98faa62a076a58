"""Neighbourhoods: complete when small, connected and stable when large."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from coordinator.domain.neighbours import MOST_UPLINK, NEIGHBOURS, Member, Swarm, neighbours, takes_from_seeder


def _swarm(count: int, *, deaf: int = 0) -> list[Member]:
    rng = Random(count)
    return [Member(f"w{number}", rng.lognormvariate(15, 0.8), number >= deaf) for number in range(count)]


def test_a_small_swarm_is_fully_connected_fastest_first() -> None:
    members = [Member("a", 1.0, True), Member("b", 8.0, True), Member("c", 2.0, True)]
    assert [one.worker_id for one in neighbours("a", members)] == ["b", "c"]


def test_who_does_not_listen_is_dialled_by_nobody() -> None:
    members = _swarm(6, deaf=3)
    for member in members:
        assert all(one.is_reachable for one in neighbours(member.worker_id, members))
    assert len(neighbours("w0", members)) == 3


@pytest.mark.parametrize("count", [18, 64, 500])
def test_a_large_swarm_is_connected_with_few_links(count: int) -> None:
    members = _swarm(count)
    swarm = Swarm(members)
    links: dict[str, set[str]] = {one.worker_id: set() for one in members}
    for member in members:
        chosen = swarm.neighbours(member.worker_id)
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
    median = sorted(int(one.uplink).bit_length() for one in members)[100]
    swarm = Swarm(members)
    for member in members:
        chosen = swarm.neighbours(member.worker_id)
        assert sum(int(one.uplink).bit_length() >= median for one in chosen) >= NEIGHBOURS // 4


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


def _fed(members: list[Member], *, salt: str = "") -> set[str]:
    swarm = Swarm(members, salt=salt)
    return {one.worker_id for one in members if swarm.takes_from_seeder(one.worker_id)}


def _named(members: list[Member], *, salt: str = "") -> dict[str, set[str]]:
    swarm = Swarm(members, salt=salt)
    return {one.worker_id: {other.worker_id for other in swarm.neighbours(one.worker_id)} for one in members}


def test_the_seeder_feeds_everyone_in_a_small_swarm_and_few_of_a_large_one() -> None:
    small, large = _swarm(NEIGHBOURS), _swarm(1000)
    assert all(takes_from_seeder(one.worker_id, small) for one in small)
    fed = _fed(large)
    assert len(fed) == NEIGHBOURS
    median = sorted(one.uplink for one in large)[500]
    assert sum(one.uplink > median for one in large if one.worker_id in fed) >= NEIGHBOURS // 2


def test_half_of_those_whom_the_seeder_feeds_do_not_depend_on_what_anyone_claims() -> None:
    large = _swarm(1000)
    liars = [replace(one, uplink=1e30) if number % 2 else one for number, one in enumerate(large)]
    honest = [replace(one, uplink=0.0) for one in large]
    kept = _fed(large) & _fed(liars) & _fed(honest)
    assert len(kept) >= NEIGHBOURS // 2


def test_a_claim_above_the_most_is_worth_no_more_than_the_most() -> None:
    large = _swarm(1000)
    at_most = [replace(one, uplink=MOST_UPLINK) if number % 2 else one for number, one in enumerate(large)]
    above = [replace(one, uplink=1e30) if number % 2 else one for number, one in enumerate(large)]
    assert _fed(at_most) == _fed(above)
    assert _named(at_most) == _named(above)


def test_a_rate_that_changes_within_its_power_of_two_reshuffles_nobody() -> None:
    rng = Random(5)
    steady = [Member(f"w{number}", float(1 << rng.randrange(15, 25)), True) for number in range(300)]
    moved = [replace(one, uplink=one.uplink * rng.uniform(1.0, 1.9)) for one in steady]
    assert _fed(steady) == _fed(moved)
    assert _named(steady) == _named(moved)


def test_who_has_no_neighbour_takes_from_the_seeder_however_large_the_swarm_is() -> None:
    deaf = _swarm(200, deaf=200)
    assert _fed(deaf) == {one.worker_id for one in deaf}
    one_listens = _swarm(200, deaf=199)
    assert "w199" in _fed(one_listens), "it dials nobody"
    assert len(_fed(one_listens)) <= NEIGHBOURS + 1


def test_jobs_of_the_same_workers_have_other_draws() -> None:
    members = _swarm(400)
    assert len(_fed(members, salt="a") & _fed(members, salt="b")) < NEIGHBOURS // 2
    one, other = _named(members, salt="a"), _named(members, salt="b")
    assert sum(one[name] == other[name] for name in one) <= 2
    assert neighbours("w0", members, salt="a") == Swarm(members, salt="a").neighbours("w0")
    assert takes_from_seeder("w0", members, salt="a") == ("w0" in _fed(members, salt="a"))
