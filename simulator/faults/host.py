"""The coordinator's process: the product's service on a store in memory, started, killed and started again.

Mirrored here: the order in which `coordinator/app.py` starts things. Real: everything that it starts. What a process loses in a
crash is what it kept outside store, blobs and files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.jobs_loop import JobsLoop
from coordinator.service.accounting import keep_accounts
from coordinator.service.deps import Deps
from coordinator.service.driving import Tools
from coordinator.service.market import keep_market
from coordinator.service.sweeping import keep_sweeping, recover
from coordinator.service.tidying import keep_tidy
from simulator.faults.front import Front
from simulator.faults.parts import SimLearners, SimPlane, SimPublisher
from simulator.faults.store import Change, Died, MemoryBlobs, MemoryStore, Process
from simulator.faults.virtual import OrderedWakeups

if TYPE_CHECKING:
    from simulator.faults.world import World

T = TypeVar("T")
EPOCH = 1_700_000_000.0  # Unix seconds at virtual time 0
ROOMY = 1 << 40


@dataclass(slots=True)
class SteppedClock:
    """The coordinator's wall clock: steps survive restarts, as those of a host do."""

    world: World
    stepped_s: float = 0.0
    most_back_s: float = 0.0  # how far it was put back in all

    def now(self) -> float:
        """Unix seconds."""
        return EPOCH + self.world.loop.time() + self.stepped_s


class Host:
    """Where the coordinator runs. `life` counts its processes; `front` is None while none answers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = SteppedClock(world)
        self.life = 0
        self.front: Front | None = None
        self.deps: Deps | None = None
        self.up_since = 0.0  # virtual seconds
        self.learners: SimLearners | None = None
        self.disk_is_full = False
        self._process: Process | None = None
        self._blobs: dict[str, tuple[bytes, float]] = {}
        self._commits = 0
        self._wanted = False

    @property
    def is_up(self) -> bool:
        """Whether the process answers workers."""
        return self.front is not None

    @property
    def blobs(self) -> dict[str, tuple[bytes, float]]:
        """What is on disk: digest -> bytes and when they were put."""
        return self._blobs

    def world_time(self) -> float:
        """True time, Unix seconds."""
        return EPOCH + self.world.loop.time()

    # --- life and death

    def start(self) -> None:
        """Begin a process unless one runs."""
        if self._process is not None:
            return
        self.life += 1
        self._process = Process(self._pace, self._committed, self._before_commit, self._after_commit)
        self.spawn(self._run(self._process))

    def die(self, why: str) -> None:
        """As kill -9: what is not committed is lost, its children end with it."""
        process = self._process
        if process is None:
            return
        self.world.tell(f"the coordinator dies: {why}")
        process.is_dead = True
        self._process, self.front, self.deps = None, None, None
        if self.learners is not None:
            self.learners.host_died()
            self.learners = None
        for task in process.tasks:
            if not task.done():
                task.get_loop().call_soon(task.cancel)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the process: it dies with it."""
        task = self.world.loop.create_task(work)
        if self._process is not None:
            tasks = self._process.tasks
            if len(tasks) > 64:
                tasks[:] = [one for one in tasks if not one.done()]
            tasks.append(task)
        return task

    async def _run(self, process: Process) -> None:
        world = self.world
        store = MemoryStore(world.rows, process)
        blobs = MemoryBlobs(self._blobs, process, self.clock.now, lambda: 0 if self.disk_is_full else ROOMY)
        deps = Deps(
            store=store,
            blobs=blobs,
            clock=self.clock,
            settings=world.settings,
            key=world.key,
            started_at=self.clock.now(),
            wake=OrderedWakeups(world.loop),
            reach=lambda point: self._reach(process, point),
        )
        world.laws.before_recovery()
        await recover(deps)
        world.laws.recovered(self.clock.now())
        self.learners = SimLearners(world.plan, world.truth, world.laws.training)
        publisher = SimPublisher(world.plan, world.truth, world.key, lambda: world.publisher_is_broken)
        tools = Tools(self.learners, publisher, SimPlane(world.plan))
        self.deps, self.front, self.up_since = deps, Front(deps), world.loop.time()
        world.tell(f"the coordinator is up, life {self.life}")
        loops = (
            JobsLoop(deps, tools).run(),
            keep_sweeping(deps),
            keep_market(deps),
            keep_accounts(deps),
            keep_tidy(deps, publisher, lambda: 0),
        )
        for loop in loops:
            self._guard(self.spawn(loop))

    def _guard(self, task: asyncio.Task[Any]) -> None:
        """A loop of the service that ends while the process lives is a fault."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.world.broke(f"a loop of the coordinator ended: {task.exception()!r}")

        task.add_done_callback(ended)

    # --- the store's side

    async def _pace(self) -> None:
        slowest = self.world.plan.disk_s
        await asyncio.sleep(self.world.rng.uniform(0.0, slowest) if slowest else 0)

    def _committed(self, changes: list[Change]) -> None:
        self._commits += 1
        self.world.committed(self._commits, changes)

    def _before_commit(self) -> None:
        self._die_at("before", self._commits + 1)

    def _after_commit(self) -> None:
        self._die_at("after", self._commits)

    def _die_at(self, when: str, number: int) -> None:
        if self.world.crash_is_planned(number, when):
            self.crash(f"{when} commit {number}", self.world.rng.uniform(0.2, 4.0))
            raise Died

    def _reach(self, process: Process, point: str) -> None:
        """Commit points: dying is planned by commits, which come before or after every point."""
        process.check()
        if point == "sweep.rows_written":
            self.world.laws.timers.swept()

    def crash(self, why: str, for_s: float) -> None:
        """Die, and come back after a while."""
        self.world.crashes += self._process is not None
        self.die(why)
        self.world.loop.call_later(for_s, self.start)
