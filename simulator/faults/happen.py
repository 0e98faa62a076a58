"""What a fault does to the world when its time comes, and how it heals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from coordinator.domain.market_trials import too_dear
from coordinator.domain.model import JobState
from coordinator.service import operator_jobs, operator_workers
from coordinator.service.ledger import fund_job
from coordinator.service.operator_done import Done
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.ports import Tx
from coordinator.wire.job import JobPatch
from simulator.faults.schedule import Fault
from simulator.faults.worker import SimWorker

if TYPE_CHECKING:
    from simulator.faults.world import World

AGAIN_S = 0.7
TENDED_AFTER_S = 11.0
RICH_USD = 50.0
CANCELLED_AFTER = 3  # versions: a schedule without a version change tests little


def happen(world: World, fault: Fault) -> None:
    """Do it, once the job is so far."""
    early = world.job.committed_steps < fault.after_step or (fault.when and fault.when not in world.states)
    if early and not world.has_ended:
        world.loop.call_later(0.3, happen, world, fault)
        return
    world.tell(f"fault: {fault}")
    if fault.whom < 0:
        COORDINATOR[fault.kind](world, fault)
    else:
        WORKER[fault.kind](world, world.workers[fault.whom], fault)


# To the coordinator


def _coordinator_crash(world: World, fault: Fault) -> None:
    world.truth.salt ^= int(fault.amount)  # the replay will give other bits, or those of before
    world.host.crash("a fault", fault.for_s)


def _learner_crash(world: World, fault: Fault) -> None:
    if world.has_ended:
        return
    if world.host.learners is None or not world.host.learners.kill():
        world.loop.call_later(AGAIN_S, _learner_crash, world, fault)
        return
    world.truth.salt ^= int(fault.amount)
    world.crashes += 1
    world.tell("the learner was killed")


def _clock_step(world: World, fault: Fault) -> None:
    world.host.clock.stepped_s += fault.amount
    world.host.clock.most_back_s += max(-fault.amount, 0.0)
    world.laws.clock_stepped(fault.amount)


def _disk_full(world: World, fault: Fault) -> None:
    world.host.disk_is_full = True
    world.loop.call_later(fault.for_s, _disk_free, world)


def _disk_free(world: World) -> None:
    world.host.disk_is_full = False
    _resume(world)


def _publisher_fault(world: World, fault: Fault) -> None:
    world.publisher_is_broken = True
    world.loop.call_later(fault.for_s, _publisher_mended, world)


def _publisher_mended(world: World) -> None:
    world.publisher_is_broken = False


def _pause(world: World, fault: Fault) -> None:
    _operate(world, "pause", lambda tx, now: operator_jobs.pause(tx, world.caller, world.job.id, "a look", now=now))
    world.loop.call_later(fault.for_s, _resume, world)


def _resume(world: World) -> None:
    _operate(world, "resume", lambda tx, now: operator_jobs.resume(tx, world.caller, world.job.id, "go on", now=now))


def _cancel_now(world: World, fault: Fault) -> None:  # noqa: ARG001
    _operate(world, "cancel", lambda tx, now: operator_jobs.cancel(tx, world.caller, world.job.id, "enough", now=now))


def _learners_refuse(world: World, fault: Fault) -> None:  # noqa: ARG001
    world.truth.learners_refuse = True
    if world.host.learners is not None:
        world.host.learners.kill()


def _encoder_refuses(world: World, fault: Fault) -> None:  # noqa: ARG001
    world.truth.encoder_refuses = True


def _cancel(world: World, fault: Fault) -> None:
    if len(world.truth.weights) < CANCELLED_AFTER and not world.has_ended:
        world.loop.call_later(AGAIN_S, _cancel, world, fault)
        return
    _operate(world, "cancel", lambda tx, now: operator_jobs.cancel(tx, world.caller, world.job.id, "enough", now=now))


def _new_bound(world: World, fault: Fault) -> None:
    patch = JobPatch(staleness_max=int(fault.amount))
    _operate(
        world, f"S {patch.staleness_max}", lambda tx, now: operator_jobs.change(tx, world.caller, world.job.id, patch, now=now)
    )


def tend(world: World) -> None:
    """The operator looks at a job that stays paused, or whose budget the one honest worker's price does not fit into, and helps."""
    job = world.job
    if world.host.clock.now() - job.state_since <= TENDED_AFTER_S:
        return
    if job.state is JobState.RUNNING and too_dear(world.workers[0].price, job.config.budget.usd):
        _more_money(world)
    if job.state is JobState.PAUSED:
        if "budget" in job.reason:
            _more_money(world)
        _resume(world)


def _more_money(world: World) -> None:
    job, budget = world.job, world.job.config.budget
    if budget.usd is None or budget.usd > RICH_USD:
        return
    patch = JobPatch(budget=budget.model_copy(update={"usd": budget.usd + RICH_USD}))
    _operate(world, "more money", lambda tx, now: operator_jobs.change(tx, world.caller, job.id, patch, now=now))


# To a worker


def _worker_crash(world: World, worker: SimWorker, fault: Fault) -> None:
    if not worker.is_up:
        world.loop.call_later(AGAIN_S, _worker_crash, world, worker, fault)
        return
    world.crashes += 1
    worker.die(wipe=bool(fault.amount))
    world.loop.call_later(fault.for_s, worker.start)


def _preemption(world: World, worker: SimWorker, fault: Fault) -> None:
    """Told `amount` seconds before the machine goes; back after `for_s`."""
    if worker.is_up:
        worker.drain("the provider takes the machine")
        world.loop.call_later(fault.amount, _taken, world, worker, fault)


def _taken(world: World, worker: SimWorker, fault: Fault) -> None:
    if worker.is_up:
        worker.die(wipe=True)
    world.loop.call_later(fault.for_s, worker.start)


def _partition(world: World, worker: SimWorker, fault: Fault) -> None:
    world.partitions += 1
    worker.line.cut_until = world.loop.time() + fault.for_s


def _worker_clock_step(world: World, worker: SimWorker, fault: Fault) -> None:  # noqa: ARG001
    worker.line.skew_s += fault.amount


def _twin(world: World, worker: SimWorker, fault: Fault) -> None:  # noqa: ARG001
    if worker.is_up:
        worker.twin()


def _engine_fault(world: World, worker: SimWorker, fault: Fault) -> None:  # noqa: ARG001
    if worker.is_up:
        worker.engine_fails()


def _new_price(world: World, worker: SimWorker, fault: Fault) -> None:
    """The owner starts it anew with another price."""
    worker.price = int(fault.amount)
    if worker.is_up:
        worker.die()
        world.loop.call_later(fault.for_s, worker.start)


def _drain(world: World, worker: SimWorker, fault: Fault) -> None:
    _operate(world, "drain", lambda tx, now: operator_workers.drain(tx, world.caller, worker.id, "a look", now=now))
    world.loop.call_later(fault.for_s, _release, world, worker, fault)


def _quarantine(world: World, worker: SimWorker, fault: Fault) -> None:
    _operate(world, "quarantine", lambda tx, now: operator_workers.quarantine(tx, world.caller, worker.id, "a look", now=now))
    if fault.for_s:
        world.loop.call_later(fault.for_s, _release, world, worker, fault)


def _release(world: World, worker: SimWorker, fault: Fault) -> None:  # noqa: ARG001
    _operate(world, "release", lambda tx, now: operator_workers.release(tx, world.caller, worker.id, "go on", now=now))


# The operator's hand


def fund(world: World) -> None:
    """A job's budget is given to it as it is submitted."""

    async def action(tx: Tx, now: float) -> Done:
        await fund_job(tx, world.job, now=now)
        return Done(world.job.config)

    if world.job.config.budget.usd is not None:
        _operate(world, "fund", action)


def _operate(world: World, name: str, action: Callable[[Tx, float], Awaitable[Done]]) -> None:
    """A command of the operator; repeated until the coordinator answers."""
    deps = world.host.deps
    if deps is None:
        world.loop.call_later(AGAIN_S, _operate, world, name, action)
        return

    async def command() -> None:
        try:
            done = await deps.store.write(lambda tx: action(tx, deps.clock.now()))
        except RequestRefused as error:
            world.tell(f"operator: {name} refused: {error}")
            return
        world.tell(f"operator: {name}")
        for topic in sorted(done.topics):
            deps.wake.notify(topic)

    world.host.spawn(command())


COORDINATOR: Mapping[str, Callable[[World, Fault], None]] = {
    "coordinator_crash": _coordinator_crash,
    "learner_crash": _learner_crash,
    "clock_step": _clock_step,
    "pause": _pause,
    "new_bound": _new_bound,
    "disk_full": _disk_full,
    "publisher_fault": _publisher_fault,
    "cancel": _cancel,
    "cancel_now": _cancel_now,
    "learners_refuse": _learners_refuse,
    "encoder_refuses": _encoder_refuses,
}
WORKER: Mapping[str, Callable[[World, SimWorker, Fault], None]] = {
    "worker_crash": _worker_crash,
    "preemption": _preemption,
    "partition": _partition,
    "worker_clock_step": _worker_clock_step,
    "engine_fault": _engine_fault,
    "new_price": _new_price,
    "drain": _drain,
    "quarantine": _quarantine,
    "release": _release,
    "twin": _twin,
}
