"""Random fault sequences: a coordinator that rents, dies and starts again, against a provider that misbehaves in all known ways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from coordinator.adapters.providers import RemoteProvider
from pricing.feeds.contract import Failed, Handle, RentalOffer, Spec
from pricing.rentals import Limits
from tests.integration.renting.scene import CRASHES, LIMITS, Scene, feed_of
from tests.standin.here import sender, standin
from tests.standin.world import Fates

FATES = Fates(slow_start=0.1, outbid=0.15, dies=0.1, dearer=0.15, stuck=0.25, deaf=0.15, late=0.5, late_s=118.0)
TURNS = 45
AT_ONCE = 4


@dataclass
class Tally:
    """What happened over all sequences."""

    fired: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    rented: int = 0
    busy: int = 0  # sequences in which a worker ran
    stopped: int = 0  # sequences in which the budget ended a machine, or kept one from being rented
    failures: list[str] = field(default_factory=list)

    def table(self) -> str:
        lines = [f"{'what happened':<34} times"]
        lines += [f"{name:<34} {count:>5}" for name, count in sorted(self.fired.items()) if count]
        lines += [f"crash after {name:<22} {count:>5}" for name, count in sorted(self.crashes.items())]
        return "\n".join([*lines, f"{self.rented} machines rented; a worker ran in {self.busy} sequences"])


class HastyProvider(RemoteProvider):
    """What must not be: a create that brought nothing is sent again at once."""

    async def create(self, offer: RentalOffer, spec: Spec, label: str) -> Handle | Failed:
        answer = await super().create(offer, spec, label)
        return await super().create(offer, spec, label) if isinstance(answer, Failed) else answer


async def run_sequence(
    seed: int, store: Any, tally: Tally, *, limits: Limits = LIMITS, caller: type[RemoteProvider] = RemoteProvider
) -> list[str]:
    """One sequence; the laws that it broke."""
    rng = Random(seed)
    kind = ("vast", "runpod")[seed % 2]
    there = standin(kind, rng, fates=FATES, share=rng.choice((0.05, 0.15, 0.3)), storm_share=0.004)
    scene = Scene(
        store,
        there,
        feed_of(kind),
        sender(there),
        rng,
        budget_uusd=int(400_000 * 8 ** rng.random()),
        job_usd=rng.choice((None, 0.4 * 8 ** rng.random())),
        offset_s=rng.uniform(-3000.0, 3000.0),
        limits=limits,
        caller=caller,
    )
    await scene.open()
    if rng.random() < 0.5 and scene.limit_uusd > 800_000:
        scene.plant_orphan()
    count = rng.randrange(1, 4)
    for _ in range(TURNS):
        if rng.random() < 0.1:
            count = rng.randrange(0, 5)
        if rng.random() < 0.35:
            scene.crash_at = rng.choice(CRASHES)
        if rng.random() < 0.02:
            scene.clock.offset_s += rng.uniform(-1000.0, 1000.0)  # our clock jumps; the provider's does not
            there.world.happened["our clock jumped"] += 1
        await scene.turn(count, down_s=rng.uniform(0.0, 300.0))
        there.world.advance(rng.uniform(10.0, 90.0))
    await scene.end()
    tally.fired += there.faults.happened + there.world.happened
    tally.crashes += scene.crashes
    tally.rented += len(there.world.instances)
    tally.busy += scene.most_running > 0
    return scene.violations


async def run_sequences(
    seeds: range, stores: Callable[[], Any], *, limits: Limits = LIMITS, caller: type[RemoteProvider] = RemoteProvider
) -> Tally:
    """All of them, each on its own store and clock; some at a time, since a store's threads take turns with the loop."""
    tally, places = Tally(), asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        async with places:
            store = await stores()
            broken = await run_sequence(seed, store, tally, limits=limits, caller=caller)
            tally.failures += [f"seed {seed}: {words}" for words in dict.fromkeys(broken)]
            await store.close()

    await asyncio.gather(*(one(seed) for seed in seeds))
    return tally
