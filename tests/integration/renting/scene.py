"""One coordinator that rents from the stand-in: its rows in a real store, its clock and its crashes in the test's hands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.providers import RemoteProvider
from coordinator.domain.model import Job, JobState, LedgerAccount, Worker, WorkerState
from coordinator.service import invites
from coordinator.service.deps import Deps, ServiceSettings
from coordinator.service.renting import Renter, deployment_prefix
from coordinator.service.renting_ports import RentalDesk, RentingSettings
from coordinator.service.worker_presence import Heard
from coordinator.store.sql import SqlStore
from coordinator.wire.job import JobConfig
from coordinator.wire.signing import public_hex
from pricing.feeds.contract import Feed, Need
from pricing.feeds.runpod import RunPod
from pricing.feeds.vast import Vast
from pricing.ledger import Account
from pricing.rentals import Limits, Rental, RentalState
from tests.standin.desk import StandIn
from tests.standin.world import Machine

JOB = "job-1"
STEPS = ("looked", "decided", "create_saved", "create_called", "create_answered", "destroy_called", "destroy_saved")
CRASHES = tuple(f"renting.{step}" for step in STEPS)
LIMITS = Limits(
    appear_s=120.0,
    gone_looks=3,
    start_s=600.0,
    join_s=400.0,
    silent_s=300.0,
    unknown_s=240.0,
    blind_s=600.0,
    stop_s=1800.0,
    cool_s=900.0,
)


class Crash(BaseException):
    """The coordinator dies here: nothing after it happens."""


class NoBlobs:
    """Renting stores no blobs."""


@dataclass
class LocalClock:
    """The coordinator's clock: off by some seconds from the provider's, and it may jump."""

    there: StandIn
    offset_s: float = 0.0

    def now(self) -> float:
        return self.there.world.now + self.offset_s


@dataclass
class Scene:
    """A coordinator, its provider, and what is true of both."""

    store: SqlStore
    there: StandIn
    feed: Feed
    send: Any
    rng: Random
    budget_uusd: int = 10_000_000
    job_usd: float | None = None
    limits: Limits = LIMITS
    caller: type[RemoteProvider] = RemoteProvider
    offset_s: float = 0.0
    crash_at: str = ""  # where it dies next; "": nowhere
    crashes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    joined: dict[str, str] = field(default_factory=dict)  # instance -> worker
    most_running: int = 0

    def __post_init__(self) -> None:
        self.desk = RentalDesk()
        self.key = Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32))
        self.clock = LocalClock(self.there, self.offset_s)
        self.deps = Deps(
            store=self.store,
            blobs=NoBlobs(),  # type: ignore[arg-type]
            clock=self.clock,
            settings=ServiceSettings(Path("/nonexistent")),
            key=self.key,
            started_at=self.clock.now(),
            reach=self._reach,
        )
        self.start()

    def start(self) -> None:
        """As after a start of the process: all that was in memory is new."""
        need = Need(most_uusd_per_hour=3_000_000)
        settings = RentingSettings(self.budget_uusd, "https://coordinator.example", "echo2:worker", need=need, limits=self.limits)
        provider = self.caller(self.feed, self.send)
        self.desk = RentalDesk()
        self.deps = replace(self.deps, started_at=self.clock.now())
        self.renter = Renter(self.deps, provider, settings, self.desk, rng=Random(self.rng.random()))

    async def open(self) -> None:
        """The job that rents."""
        budget: dict[str, Any] = {"steps": 10} | ({} if self.job_usd is None else {"usd": self.job_usd})
        values = {"name": "j", "model": "m", "environment": {"type": "digit_sort"}, "budget": budget}
        job = Job(JOB, "j", "o", JobConfig.model_validate(values), JobState.RUNNING, "", 0.0, self.clock.now(), "m")
        await self.write(job)

    @property
    def limit_uusd(self) -> float:
        """The tighter of the provider's budget and the job's; there is one of each."""
        return self.budget_uusd if self.job_usd is None else min(self.budget_uusd, self.job_usd * 1e6)

    def plant_orphan(self) -> None:
        """A machine with our label that no row knows: the store was put back to an earlier state."""
        world = self.there.world
        cheap = Machine(9000, 900, "RTX 3060", 12_000, 100_000)
        world.rent(cheap, f"{deployment_prefix(public_hex(self.key))}{'0' * 16}", {}, cheap.uusd_per_hour)
        world.happened["orphan planted"] += 1

    async def write(self, *rows: object) -> None:
        async def action(tx: Any) -> None:
            await tx.put(*rows)

        await self.store.write(action)

    def _reach(self, name: str) -> None:
        if name == self.crash_at:
            self.crash_at = ""
            self.crashes[name] += 1
            raise Crash

    async def turn(self, count: int, *, down_s: float = 0.0) -> None:
        """The market says its wish again, the loop turns; a crash costs `down_s` until the next start. The laws are looked at after."""
        try:
            await self.renter.search()
            offers = self.desk.offers.get(self.feed.name, ())
            self.desk.want(self.feed.name, JOB, count, offers)
            await self.renter.turn()
        except Crash:
            self.there.world.advance(down_s)
            self.start()
        await self._workers()
        self.look()

    async def _workers(self) -> None:
        """Machines that run join with the invite they were given, most of them, and say that they live."""
        world = self.there.world
        running = [one for one in world.rented() if one.status(world.now) == "running"]
        self.most_running = max(self.most_running, len(running))
        for one in running:
            if one.id not in self.joined and one.env:
                self.joined[one.id] = await self._join(one.id, one.env.get("ECHO2_INVITE", ""))
            if self.joined.get(one.id):
                self.deps.presence.hear(Heard(self.joined[one.id], 1, self.clock.now(), tokens_per_s=None))

    async def _join(self, instance_id: str, code: str) -> str:
        invite = await self.store.read(lambda r: invites.find(r, code))
        if invite is None or invite.max_uses != 1 or invite.jobs != (JOB,):
            self.violations.append(f"machine {instance_id} was not given a single-use invite for its job")
            return ""
        if invite.revoked_at is not None or self.rng.random() < 0.1:
            return ""
        name, now = f"w-{instance_id}", self.clock.now()
        await self.write(
            Worker(
                name,
                f"key-{name}",
                name,
                invite.owner,
                invite.id,
                WorkerState.STANDBY,
                "",
                now,
                now,
                now,
                1,
                {"name": "torch"},
                0,
                8,
            )
        )
        return name

    def look(self) -> None:
        """Laws that hold at any moment, by the stand-in's own truth: what was spent only grows, so a look now covers all before."""
        world = self.there.world
        spent = world.spent()
        if spent > self.limit_uusd:
            self.violations.append(f"spent {spent:.0f} of {self.limit_uusd:.0f} uUSD")
        labels = Counter(one.label for one in world.rented())
        self.violations += [f"{label} was rented {count} times at once" for label, count in labels.items() if count > 1]
        self.violations += world.violations
        world.violations.clear()

    async def end(self) -> None:
        """The job ends; the loop turns until nothing is open. What is rented then is an orphan."""
        job = await self.store.read(lambda r: r.get(Job, JOB))
        assert job is not None
        await self.write(replace(job, state=JobState.COMPLETED))
        world = self.there.world
        for _ in range(250):
            await self.turn(0)
            world.advance(self.rng.uniform(20.0, 60.0))
            self.look()
            if not await self.open_rows() and not world.rented():
                break
        self.violations += [f"orphan: machine {one.id} with label {one.label} still bills" for one in world.rented()]
        self.violations += [f"row {row.id} is still {row.state.value}: {row.reason}" for row in await self.open_rows()]
        await self._books()

    async def open_rows(self) -> list[Rental]:
        states = [state for state in RentalState if state is not RentalState.GONE]
        return await self.store.read(lambda r: r.select(Rental, state=states))

    async def _books(self) -> None:
        """What we say that it cost is never less than the truth, but for the second that a Date header cuts off.

        A machine that ended before anything showed it is known to its provider alone.
        """
        rows = await self.store.read(lambda r: r.select(Rental))
        slack = sum(row.price for row in rows) / 3600 + 1
        world, known = self.there.world, {(row.instance_id or "").removeprefix("pod") for row in rows}
        said = sum(row.cost_uusd for row in rows)
        true = sum(one.cost(world.now) for one in world.instances if one.id in known)
        if said + slack < true:
            self.violations.append(f"the books say {said} uUSD, the provider billed {true:.0f}")
        accounts = await self.store.read(lambda r: r.select(LedgerAccount, job_id=JOB))
        held = sum(one.uusd for one in accounts if one.kind == Account.RESERVED)
        posted = sum(one.uusd for one in accounts if one.kind == Account.PROVIDER)
        due = sum(row.cost_uusd for row in rows if row.job_id == JOB)
        if held or posted != due:
            self.violations.append(f"the ledger holds {held} uUSD for rentals that are gone, and posted {posted} of {due}")


def feed_of(kind: str) -> Feed:
    return Vast() if kind == "vast" else RunPod()
