"""What a death or a late member costs, against the fluid bound of a planner who knows it from the start."""

from __future__ import annotations

from simulator.swarm import Network
from simulator.swarm_cases import MBIT, Case, MakePolicy, Outcome, bound, build, join, name, outcome, swarm_policy

LOOK_S = 0.005


def fastest_dies(case: Case, seed: int, seen_after_s: float, make: MakePolicy = swarm_policy) -> Outcome:
    """The peer with the best uplink dies at 30 % of the bound; its neighbours learn of it later."""
    peers = range(1, len(case.ups))
    fastest = max(peers, key=lambda peer: case.ups[peer])
    at = 0.3 * bound(case)
    network = build(case, seed, make)
    network.at(at, lambda: network.kill(name(fastest), seen_after_s))
    rest = sum(case.ups) - case.ups[fastest]
    size = case.size / MBIT
    least = max(size / case.ups[0], ((len(peers) - 1) * size - case.ups[fastest] * at) / rest)
    return outcome(network, case, least)


def seeder_dies(case: Case, seed: int, seen_after_s: float, make: MakePolicy = swarm_policy) -> Outcome:
    """The seeder dies at half of the bound, or once it has sent one full copy."""
    network = build(case, seed, make)
    half = 0.5 * bound(case)
    died_at: list[float] = []

    def look() -> None:
        if network.nodes["seeder"].sent_bytes < case.size:
            network.at(network.now + LOOK_S, look)
            return
        died_at.append(network.now)
        network.kill("seeder", seen_after_s)

    network.at(half, look)
    result = outcome(network, case)
    peers = case.ups[1:]
    size = case.size / MBIT
    least = max(size / case.ups[0], (len(peers) * size - case.ups[0] * died_at[0]) / sum(peers))
    return Outcome(least, result.last_s, result.seeder_copies, result.wasted, result.gave_up)


def last_joins(case: Case, seed: int, make: MakePolicy = swarm_policy) -> Outcome:
    """The last peer of the list joins at 30 % of the bound."""
    late = len(case.ups) - 1
    at = 0.3 * bound(case)
    network: Network = build(case, seed, make, frozenset({late}))
    network.at(at, lambda: join(network, case, late))
    size = case.size / MBIT
    least = max(size / case.ups[0], (late * size + case.ups[late] * at) / sum(case.ups))
    return outcome(network, case, least)
