"""Offers and random markets for the tests of `pricing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pricing.covering import Lots
from pricing.money import usd_to_uusd
from pricing.offers import Offer


def offer(name: str = "a", usd: float = 0.35, rate: float = 1.0, **other: Any) -> Offer:
    """A worker on a fast link that stays."""
    return Offer(name, usd_to_uusd(usd), rate, **{"up_mbps": 1000.0, "down_mbps": 1000.0, "reliability": 1.0, **other})


def lots(
    rates: list[float], costs: list[float], most: list[int], owners: list[int] | None = None, caps: tuple[int, ...] = ()
) -> Lots:
    """Lots from lists."""
    return Lots(
        np.array(rates, dtype=float),
        np.array(costs, dtype=float),
        np.array(most, dtype=np.int64),
        np.array(owners if owners is not None else [-1] * len(rates), dtype=np.int64),
        np.array(caps, dtype=np.int64),
    )


def random_lots(random: np.random.Generator, size: int, *, has_owners: bool) -> Lots:
    """A market of one of many characters: even or uneven rates, prices that follow them closely, loosely or not, some volunteers."""
    rates = random.lognormal(0, 0.7, size) if random.random() < 0.5 else random.integers(1, 8, size) * 0.5
    worth = (random.lognormal(0, 0.4, size), random.uniform(0.5, 2, size), random.lognormal(0, 0.1, size), np.ones(size))
    costs = np.round(rates * worth[int(random.integers(4))] * 0.3, 3)
    costs[random.random(size) < 0.1 * random.integers(2)] = 0.0
    most = random.integers(1, (2, 4, 12, 60)[int(random.integers(4))], size)
    if not has_owners:
        return Lots(rates, costs, most, np.full(size, -1), np.zeros(0, dtype=np.int64))
    people = max(1, size // 4)
    return Lots(rates, costs, most, random.integers(-1, people, size), random.integers(0, 6, people))


def random_offers(random: np.random.Generator, size: int, most: int) -> list[Offer]:
    """Workers on links from 10 Mbit/s to 1 Gbit/s up."""
    ups = np.exp(random.uniform(np.log(10), np.log(1000), size))
    downs = ups * random.uniform(1, 8, size)
    rates = random.lognormal(0, 0.6, size)
    prices = rates * 0.3 * random.lognormal(0, 0.4, size)
    counts = random.integers(1, most + 1, size)
    return [
        offer(f"o{i}", float(prices[i]), float(rates[i]), up_mbps=float(ups[i]), down_mbps=float(downs[i]), count=int(counts[i]))
        for i in range(size)
    ]


def fluid(size: float, seeder_up: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Seconds of a broadcast that no schedule undercuts (Kumar and Ross 2006)."""
    return max(size / seeder_up, size / min(downs), len(ups) * size / (seeder_up + sum(ups)))
