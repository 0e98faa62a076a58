"""Activation on large markets: CPU seconds, cost over the linear bound, and over HiGHS where it answers in time.

    python -m tests.bench activation [--offers 10000] [--highs-s 20] [--json]

Markets are drawn from one seed: uneven rates, prices that follow them loosely, one worker in twenty a volunteer, links from 10 Mbit/s to
1 Gbit/s up. `rate`: a fixed required rate. `owners`: the same with at most three workers of each of 3,000 owners. `broadcast`: the rate
falls due for the fluid bound of the chosen set. `switch`: a fifth of the set that is active is lost. Seconds are CPU time of one call of
`activate`, the pool and the words included, best of `--repeats`.
"""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp

from p2p.domain.fluid import fluid_bound
from pricing.activation import activate
from pricing.cost import Terms
from pricing.decision import Activation
from pricing.offers import Offer
from pricing.pool import Held, Limits, Need, constant, pooled

SEED = 4
PERIOD_S = 120.0
TERMS = Terms(horizon_hours=24, refresh_s=PERIOD_S, refresh_bytes=2e8, start_bytes=8e9, load_s=60)
Case = tuple[str, Need, Limits, Sequence[Held]]


def main(offers: int = 10_000, repeats: int = 3, highs_s: float = 20.0, json: bool = False) -> list[dict[str, float | str]]:
    """Measure all cases and print them; returns the figures."""
    market = drawn(offers)
    rows = [_row(market, case, repeats, highs_s) for case in _cases(market)]
    if json:
        print(json_module.dumps(rows))
        return rows
    table = Table(title=f"activation, {offers} offers")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.5g}" for value in row.values()))
    Console().print(table)
    return rows


def drawn(offers: int) -> list[Offer]:
    """A market."""
    random = np.random.default_rng(SEED)
    ups = np.exp(random.uniform(np.log(10), np.log(1000), offers))
    downs = ups * random.uniform(1, 8, offers)
    rates = random.lognormal(0, 0.6, offers)
    prices = rates * 0.3 * random.lognormal(0, 0.4, offers) * (random.random(offers) > 0.05)
    counts, owners = random.integers(1, 4, offers), random.integers(0, 3_000, offers)
    return [
        Offer(
            f"o{i}",
            int(prices[i] * 1e6),
            float(rates[i]),
            float(ups[i]),
            float(downs[i]),
            count=int(counts[i]),
            uusd_per_gb_up=10_000,
            uusd_per_gb_down=10_000,
            reliability=0.98,
            owner=f"p{owners[i]}",
        )
        for i in range(offers)
    ]


def _cases(market: Sequence[Offer]) -> list[Case]:
    rate = 0.1 * sum(one.count * one.completions_per_second for one in market)
    fixed = Need(constant(rate))
    active = [Held(one.offer_id, one.count) for one in activate(market, fixed, TERMS).picked]
    return [
        ("rate", fixed, Limits(), ()),
        ("owners", fixed, Limits(per_owner=3), ()),
        ("broadcast", Need(partial(_waiting, rate), broadcast=partial(fluid_bound, 2e8, 1.25e8)), Limits(), ()),
        ("broadcast, shared", Need(partial(_waiting, rate), broadcast=partial(fluid_bound, 2e9, 1.25e8)), Limits(), ()),
        ("switch", fixed, Limits(), active[: len(active) * 4 // 5]),
    ]


def _waiting(rate: float, t_bcast: float) -> float:
    """The rate of workers that wait while they load."""
    return rate * PERIOD_S / (PERIOD_S - t_bcast) if t_bcast < PERIOD_S else inf


def _row(market: Sequence[Offer], case: Case, repeats: int, highs_s: float) -> dict[str, float | str]:
    name, need, limits, held = case
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        decision = activate(market, need, TERMS, limits=limits, held=held)
        spent.append(time.process_time() - start)
    plain = not held and "broadcast" not in name
    start = time.process_time()
    best = _highs(market, need, limits, highs_s) if plain else None
    return {
        "case": name,
        "CPU s": min(spent),
        "workers": float(sum(one.count for one in decision.picked)),
        "rate / planned": decision.rate / (decision.required * decision.headroom),
        "USD/h": decision.usd_per_hour,
        "/ bound": _over(decision) if not held else "",
        "/ HiGHS": "" if best is None else decision.usd_per_hour / best,
        "HiGHS CPU s": "" if best is None else time.process_time() - start,
    }


def _over(decision: Activation) -> float:
    return decision.usd_per_hour / decision.bound_usd_per_hour


def _highs(market: Sequence[Offer], need: Need, limits: Limits, seconds: float) -> float | None:
    """The optimum to 1e-6, or the best that HiGHS has in that time."""
    pool = pooled([replace(one) for one in market], TERMS, limits)
    lots = pool.lots
    held = np.flatnonzero(lots.owners >= 0)
    rows = np.zeros((1 + len(lots.caps), len(lots.rates)))
    rows[0] = lots.rates
    rows[1 + lots.owners[held], held] = 1.0
    lower = np.concatenate([[need.rate(0.0)], np.zeros(len(lots.caps))])
    upper = np.concatenate([[inf], lots.caps])
    found = milp(
        lots.costs,
        constraints=LinearConstraint(rows, lower, upper),
        integrality=np.ones(len(lots.costs)),
        bounds=Bounds(0, lots.most),
        options={"mip_rel_gap": 1e-6, "time_limit": seconds, "presolve": False},  # its presolve alone takes longer on 10,000 offers
    )
    return None if found.x is None else float(found.fun)
