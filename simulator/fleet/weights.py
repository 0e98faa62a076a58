"""A version on its way to a simulated fleet: over which links, how long for whom, and what the traffic costs."""

from __future__ import annotations

from collections.abc import Sequence

from pricing.cost import GB
from pricing.money import usd_to_uusd
from simulator.fleet.scenario import Scenario
from simulator.fleet.spread import Class, Swarm
from simulator.fleet.worker import Publication
from simulator.swarm_cases import MBIT

SEEDER_COPIES = {"swarm": 2.0, "chain": 1.0, "tree": 2.0}  # that the coordinator's side sends; the swarm's were seen at 1.0 to 2.7


def refresh_bytes(scenario: Scenario) -> float:
    """What one version weighs for a worker in step."""
    return scenario.snapshot.delta_bytes or scenario.snapshot.keyframe_bytes


def swarm_of(scenario: Scenario, active: Sequence[int]) -> Swarm:
    """The links of so many active workers of each group."""
    network = scenario.network
    classes = tuple(Class(count, group.up_mbps, group.down_mbps) for count, group in zip(active, scenario.fleet, strict=True))
    return Swarm(classes, network.seeder_up_mbps, network.rtt_s, network.topology)


def published(scenario: Scenario, swarm: Swarm, times: tuple[tuple[float, ...], ...], at: float, version: int) -> Publication:
    """One version, as workers will fetch it. Version 0 comes to all at once and whole."""
    snapshot = scenario.snapshot
    alone = [_cold_s(scenario, swarm, place) for place in range(len(times))]
    if version == 0:
        alone = [one[-1] if one else seconds for one, seconds in zip(times, alone, strict=True)]
    most = snapshot.keyframe_bytes / refresh_bytes(scenario)
    return Publication(at, version, times, tuple(seconds + snapshot.load_s for seconds in alone), most)


def _cold_s(scenario: Scenario, swarm: Swarm, place: int) -> float:
    """A keyframe for one newcomer: from everybody, or from the coordinator alone in a fixed tree."""
    sources = sum(one.count * one.up_mbps for one in swarm.classes) if swarm.topology == "swarm" else 0.0
    rate = min(swarm.classes[place].down_mbps, swarm.seeder_up_mbps + sources)
    return scenario.snapshot.keyframe_bytes / (rate * MBIT) + swarm.rtt_s


def bills(scenario: Scenario, size: float, active: Sequence[int]) -> list[int]:
    """Micro-dollars for one version's traffic: the coordinator's, and each group's down and up."""
    workers = sum(active)
    copies = min(SEEDER_COPIES.get(scenario.network.topology, float(workers)), float(workers))
    relayed_gb = (workers - copies) * size / GB / max(workers, 1)  # each worker's on average
    charges = [(copies * size / GB, scenario.network.usd_per_gb_up)]
    for count, group in zip(active, scenario.fleet, strict=True):
        charges.append((count * size / GB, group.usd_per_gb_down))
        charges.append((count * relayed_gb, group.usd_per_gb_up))
    return [int(gigabytes * usd_to_uusd(usd)) for gigabytes, usd in charges]
