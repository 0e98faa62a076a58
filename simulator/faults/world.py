"""One run of a schedule: the coordinator's service, its workers and what goes wrong, on a virtual clock.

`run(seed)` returns what happened, or raises LawBroken with the story so far and the command that replays it.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.domain import capacity_forecast
from coordinator.domain.model import ApiToken, Batch, BatchState, Invite, Job, JobState
from coordinator.domain.seeds import derive
from coordinator.domain.states import TERMINAL
from coordinator.service import market
from coordinator.service.deps import ServiceSettings
from coordinator.service.invites import invite_code
from coordinator.service.tokens import Caller, secret_hash
from coordinator.wire.environment import EnvironmentConfig
from coordinator.wire.job import (
    AlgorithmConfig,
    BudgetConfig,
    CheckpointConfig,
    JobConfig,
    SamplingConfig,
    StalenessConfig,
    WorkersConfig,
)
from coordinator.wire.signing import public_hex
from simulator.faults.coverage import Coverage
from simulator.faults.happen import fund, happen, tend
from simulator.faults.host import EPOCH, Host
from simulator.faults.hostile import HostileWorker
from simulator.faults.laws import Laws
from simulator.faults.parts import NEW_TOKENS, TURN_TOKENS, Truth
from simulator.faults.patching import Patch, planted
from simulator.faults.schedule import HOSTILE, Schedule, schedule
from simulator.faults.store import Change, Rows
from simulator.faults.virtual import Stuck, VirtualLoop
from simulator.faults.worker import SimWorker
from worker_node.domain import instructions as do

STORY_LINES = 60
HORIZON_S = 420.0
LOOK_S = 1.0  # between two looks at what should have ended by its timer
AUDIT_EVERY = 100  # commits
JOB = "j1"
ENDS = frozenset({"completed", "cancelled"})
MAIL_KEPT = 24  # submissions that others may have seen
SHM = Path("/dev/shm")  # noqa: S108 (memory: syncing costs nothing there)


class LawBroken(Exception):
    """A law does not hold; the message says which, where, and how it came to it. `commits`: of the run until then."""

    def __init__(self, words: str, commits: int) -> None:
        super().__init__(words)
        self.commits = commits


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `reasons` counts refusals and the ends of groups by their codes."""

    seed: int
    state: str
    steps: int
    seconds: float  # virtual
    commits: int
    lives: int  # of the coordinator
    versions: int
    replays: int
    crashes: int
    partitions: int
    reasons: dict[str, int]
    story: tuple[str, ...]


@dataclass
class World:
    """Everything in one run."""

    plan: Schedule
    folder: Path
    loop: VirtualLoop
    key: Ed25519PrivateKey
    settings: ServiceSettings
    coverage: Coverage
    rows: Rows = field(default_factory=Rows)
    truth: Truth = field(default_factory=Truth)
    mail: tuple[do.SubmitCompletions, ...] = ()
    publisher_is_broken: bool = False
    crashes: int = 0
    partitions: int = 0
    is_over: bool = False
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LINES))
    workers: list[SimWorker] = field(default_factory=list)
    wrong: str = ""

    def __post_init__(self) -> None:
        self.rng = Random(derive(self.plan.seed, "world"))  # noqa: S311 (seeded on purpose)
        self.public_key = public_hex(self.key)
        self.invite_code = invite_code(self.public_key, "x" * 43)
        self.caller = Caller(ApiToken("t-sim", "operator", "admin", "", EPOCH), "")
        self.host = Host(self)
        self.laws = Laws(self)
        self._unsubmitted = _job(self.plan)
        self._waiting = [fault for fault in self.plan.faults if fault.when]
        self._over = self.loop.create_future()
        self._planned = list(self.plan.crash_commits)
        self.commits = 0

    @property
    def job(self) -> Job:
        """The row of the one job."""
        job: Job = self.rows.tables[Job].get(JOB) or self._unsubmitted
        return job

    @property
    def states(self) -> frozenset[str]:
        """What faults may wait for."""
        sealed = any(batch.state is BatchState.SEALED for batch in self.rows.tables[Batch].values())
        known = JOB in self.rows.tables[Job]
        return frozenset({self.job.state.value if known else ""} | ({"sealed"} if sealed else set()))

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.job.state in TERMINAL[JobState]

    def tell(self, words: str) -> None:
        """Add to the story."""
        self.story.append(f"{self.loop.time():9.3f} s  step {self.job.committed_steps}: {words}")

    def broke(self, words: str) -> None:
        """A law does not hold: the run ends here. The first one counts."""
        if not self.wrong and not self.is_over:
            self.wrong = words
            self.tell(f"BROKEN: {words}")
            self._over.set_result(None)

    def crash_is_planned(self, number: int, when: str) -> bool:
        """Whether the coordinator is to die at this commit; asked once, it is done."""
        if not self._planned or self._planned[0][0] > number or self._planned[0][1] != when:
            return False
        self._planned.pop(0)
        return True

    def committed(self, number: int, changes: list[Change]) -> None:
        """After every commit: the laws, and now and then the whole audit."""
        self.commits = number
        self.laws.check(changes)
        if number % AUDIT_EVERY == 0:
            self.laws.audit()
        for fault in [one for one in self._waiting if one.when in self.states]:
            self._waiting.remove(fault)
            self.loop.call_soon(happen, self, fault)

    def sent(self, sender: SimWorker, submission: do.SubmitCompletions) -> None:
        """A submission is on its way; others may have seen it."""
        self.mail = (*self.mail[1 - MAIL_KEPT :], submission)
        for worker in self.workers:
            if worker is not sender and worker.is_up:
                worker.saw(submission)

    def worker(self, worker_id: str) -> SimWorker:
        """The machine of a row."""
        return next(worker for worker in self.workers if worker.id == worker_id)

    def stopped(self, worker: SimWorker) -> None:
        """A worker's process ended by itself; whoever keeps it running starts it again."""
        self.loop.call_later(self.rng.uniform(1.0, 4.0), worker.start)

    async def play(self) -> None:
        """Until the job is over and settled, or a law is broken."""
        ending = self.loop.create_task(self._play())
        await asyncio.wait([ending, self._over], return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()

    def _submit(self) -> None:
        """The operator's job is queued; the jobs loop finds it at its next turn."""
        self.rows.tables[Job][JOB] = self._unsubmitted
        fund(self)

    async def _play(self) -> None:
        self.host.start()
        for place, kind in enumerate(self.plan.workers):
            make = HostileWorker if kind.temper in HOSTILE else SimWorker
            worker = make(self, place, kind)
            self.workers.append(worker)
            self.loop.call_later(self.rng.uniform(0.5, 2.0), worker.start)
        self.loop.call_later(self.plan.submitted_s, self._submit)
        for fault in self.plan.faults:
            if not fault.when:
                self.loop.call_later(fault.at, happen, self, fault)
        while not (self.has_ended and self.laws.is_settled()):
            await asyncio.sleep(LOOK_S)
            self.laws.look()
            tend(self)
            if self.loop.time() > HORIZON_S:
                self.broke(f"laws 5 and 8: the job is {self.job.state} at step {self.job.committed_steps} after {HORIZON_S:.0f} s")
        self.laws.at_the_end()

    def outcome(self) -> Outcome:
        """What happened."""
        return Outcome(
            seed=self.plan.seed,
            state=self.job.state.value,
            steps=self.job.committed_steps,
            seconds=round(self.loop.time(), 3),
            commits=self.commits,
            lives=self.host.life,
            versions=len(self.truth.weights),
            replays=sum(len(times) - 1 for times in self.truth.trained.values()),
            crashes=self.crashes,
            partitions=self.partitions,
            reasons=dict(sorted(self.laws.reasons().items())),
            story=tuple(self.story),
        )


def run(seed: int, *, coverage: Coverage | None = None, plan: Schedule | None = None, ends: frozenset[str] = ENDS) -> Outcome:
    """Play the schedule of a seed (or a given one), whose job must end in one of these states. Raises LawBroken."""
    plan = plan or schedule(seed)
    coverage = coverage or Coverage()
    folder = Path(tempfile.mkdtemp(prefix="echo2-faults-", dir=SHM if SHM.is_dir() else None))
    loop = VirtualLoop()
    world = World(plan, folder, loop, _key(plan.seed), _settings(folder), coverage)
    if not plan.submitted_s:
        world.rows.tables[Job][JOB] = world.job
    invite = Invite("i1", secret_hash("x" * 43), "owner", 100, EPOCH, EPOCH + 1e6)
    world.rows.tables[Invite][invite.id] = invite
    gc.disable()  # tasks and frames are many, and short-lived
    try:
        with planted(_shorter), _Logged(world), coverage.counting():
            _play(world)
    finally:
        gc.enable()
        shutil.rmtree(folder, ignore_errors=True)
    if not world.wrong and world.job.state.value not in ends:
        world.wrong = f"law 8: the job is {world.job.state.value}: {world.job.reason}"
    if world.wrong:
        lines = (world.wrong, str(plan), *world.story, f"replay: python -m simulator.faults --seed {plan.seed}")
        raise LawBroken("\n".join(lines), world.commits)
    return world.outcome()


def _shorter(patch: Patch) -> None:
    """The rehearsal that foretells idle time for the metrics, and nothing else, takes longer than all the rest."""
    patch.attribute(capacity_forecast, "FEWEST_STEPS", 3)
    patch.attribute(market, "REHEARSED", 10)


def _play(world: World) -> None:
    loop = world.loop
    try:
        loop.run_until_complete(world.play())
    except Stuck as error:
        world.broke(f"law 5: {error}")
    finally:
        world.is_over = True
        world.host.die("the run is over")
        for worker in world.workers:
            if worker.is_up:
                worker.die()
        _drop_tasks(loop)


def _drop_tasks(loop: VirtualLoop) -> None:
    """Unwind what is left, so that nothing of this run is alive in the next."""
    tasks = sorted(asyncio.all_tasks(loop), key=hash)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


class _Logged:
    """The service's own log: warnings go to the story, and an exception that it swallowed breaks the run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None:
        self._before = structlog.get_config()
        structlog.configure(processors=[self._note], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)

    def __exit__(self, *_: object) -> None:
        structlog.configure(**self._before)

    def _note(self, _logger: object, level: str, event: MutableMapping[str, Any]) -> str:
        words = " ".join(f"{name}={value}" for name, value in event.items() if name != "exc_info")
        if level in ("exception", "error"):
            self._world.broke(f"the service failed: {words}: {event.get('exc_info') or sys.exc_info()[1]!r}")
        elif level == "warning":
            self._world.tell(f"log: {words}")
        raise structlog.DropEvent


def _key(seed: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derive(seed, "key").to_bytes(32, "little"))


def _settings(folder: Path) -> ServiceSettings:
    return ServiceSettings(
        data_dir=folder,
        heartbeat_s=1.5,
        lost_after_s=5.25,
        restart_grace_s=4.0,
        lease_min_s=3.0,
        lease_max_s=30.0,
        slowest_tokens_per_s=0.5,
        strikes_to_quarantine=3,
        quarantine_s=8.0,
        paused_learner_s=5.0,
        minimum_free_bytes=1000,
        allow_scripted=True,
        tidy_s=60.0,
    )


def _job(plan: Schedule) -> Job:
    config = JobConfig(
        name="faults",
        model="m",
        seed=plan.seed % 2**63,
        environment=EnvironmentConfig(
            type="digit_sort",
            grade_timeout_s=10.0,
            max_turns=plan.turns,
            turn_tokens=None if plan.turns == 1 else TURN_TOKENS,
        ),
        algorithm=AlgorithmConfig(
            group_size=plan.group_size,
            groups_per_step=plan.groups_per_step,
            min_group=plan.min_group,
            max_replacements=plan.max_replacements,
        ),
        staleness=StalenessConfig(max=plan.bound, publish_every=plan.publish_every, on_update=plan.on_update),
        sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
        checkpoints=CheckpointConfig(every_steps=plan.checkpoint_every, eval_every_steps=4, eval_prompts=2),
        workers=WorkersConfig(engines=("scripted",), activation=plan.activation),
        budget=BudgetConfig(steps=plan.steps, usd=plan.budget_usd),
    )
    return Job(JOB, "faults", "t-sim", config, JobState.QUEUED, "", EPOCH, EPOCH, "m")
