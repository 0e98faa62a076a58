"""Schedules by hand for states that random ones pass through too quickly: jobs that end, pause or fail at odd moments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.faults.coverage import Coverage, Fired
from simulator.faults.schedule import Fault, Kind, Schedule, schedule
from simulator.faults.world import LawBroken, run

HONEST = Kind("honest", 4, 10.0, 0, 0.1, 0.01, 1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """A schedule, and the states in which its job may end. With `tries`, a race: seeds are tried until it goes that way."""

    name: str
    plan: Schedule
    states: frozenset[str] = frozenset({"completed"})
    tries: int = 1
    otherwise: str = "completed"  # how a try may end that does not go that way
    fires: Fired | None = None  # the transition that it is for


def _plan(*faults: Fault, **fields: object) -> Schedule:
    """One honest worker, and nothing but these faults."""
    calm: dict[str, object] = {
        "workers": (HONEST,),
        "faults": faults,
        "steps": 3,
        "group_size": 2,
        "groups_per_step": 2,
        "bound": 1,
        "publish_every": 1,
        "on_update": "keep",
        "min_group": None,
        "checkpoint_every": 2,
        "max_replacements": None,
        "train_s": 0.5,
        "encode_s": 0.1,
        "grade_s": 0.05,
        "tail": 0.5,
        "loss": 0.0,
        "duplicates": 0.0,
        "zero_variance": 0.0,
        "ungraded": 0.0,
        "disk_s": 0.0,
        "activation": "all",
        "budget_usd": None,
        "crash_commits": (),
        "turns": 1,
    }
    return replace(schedule(0), **{**calm, **fields})  # type: ignore[arg-type]


def _at(state: str, kind: str, for_s: float = 2.0, amount: float = 0.0) -> Fault:
    """As soon as the job is in that state."""
    return Fault(0.0, kind, -1, for_s, amount, when=state)


CANCELLED, FAILED = frozenset({"cancelled"}), frozenset({"failed"})
SLOW_DISK = 0.4
ENDINGS: tuple[Ending, ...] = (
    Ending("cancelled while queued", _plan(_at("queued", "cancel_now"), submitted_s=0.5), CANCELLED),
    Ending("paused while queued", _plan(_at("queued", "pause"), submitted_s=0.5)),
    Ending("the environment does not start", _plan(broken_plane=True, budget_usd=1.0), FAILED, otherwise="failed"),
    Ending("cancelled while starting", _plan(_at("starting", "cancel_now")), CANCELLED),
    Ending("paused while starting", _plan(_at("starting", "pause"))),
    Ending("cancelled while paused", _plan(_at("running", "pause", 9.0), _at("paused", "cancel_now"), budget_usd=1.0), CANCELLED),
    Ending("a second process has the key", _plan(Fault(4.0, "twin", 0))),
    Ending("no learner starts", _plan(_at("starting", "learners_refuse")), FAILED),
    Ending("no learner starts again", _plan(_at("running", "learners_refuse")), FAILED),
    Ending("cancelled while a batch is trained", _plan(_at("sealed", "cancel_now")), CANCELLED),
    Ending("nothing can be encoded", _plan(_at("running", "encoder_refuses"), encode_s=1.0), FAILED),
    Ending(
        "nothing can be encoded, and paused",
        _plan(_at("running", "encoder_refuses"), _at("running", "pause"), encode_s=1.0),
        FAILED,
    ),
    Ending(
        "paused while finishing",
        _plan(_at("finishing", "pause"), _at("paused", "coordinator_crash"), disk_s=SLOW_DISK),
        tries=40,
        fires=("job", "paused", "resumed_finishing"),
    ),
    Ending(
        "paused while the last batch is trained",
        _plan(_at("sealed", "pause", 9.0), steps=1, train_s=2.0),
        tries=5,
        fires=("job", "paused", "steps_done"),
    ),
    Ending("cancelled while finishing", _plan(_at("finishing", "cancel_now"), disk_s=SLOW_DISK), CANCELLED, tries=40),
    Ending(
        "a retired version is lost, and tokens of it wait",
        _plan(
            Fault(2.0, "learner_crash", -1, 0.0, 1.0, after_step=4),
            steps=7,
            bound=4,
            groups_per_step=1,
            train_s=1.5,
            checkpoint_every=100,
        ),
    ),
    Ending(
        "no learner while finishing",
        _plan(_at("finishing", "learners_refuse"), _at("finishing", "coordinator_crash"), disk_s=SLOW_DISK),
        FAILED,
    ),
    Ending(
        "a group ends while an environment is asked",
        _plan(
            Fault(2.0, "learner_crash", -1, 0.0, 1.0, after_step=2),
            workers=(HONEST, HONEST),
            turns=3,
            group_size=4,
            groups_per_step=1,
            bound=3,
            steps=5,
            grade_s=2.5,
            checkpoint_every=100,
        ),
        tries=20,
        fires=("rollout", "accepted", "group_ended"),
    ),
    Ending("drained twice", _plan(Fault(3.0, "drain", 0, 4.0), Fault(3.0, "drain", 0, 4.0), group_size=4, groups_per_step=3)),
    Ending("drained and quarantined", _plan(Fault(3.0, "drain", 0, 4.0), Fault(3.01, "quarantine", 0, 3.0), group_size=4)),
    Ending("quarantined twice", _plan(Fault(3.0, "quarantine", 0, 4.0), Fault(3.5, "quarantine", 0, 4.0))),
    Ending("gone in quarantine", _plan(Fault(3.0, "quarantine", 0, 0.0), Fault(3.2, "preemption", 0, 3.0, 4.0))),
    Ending(
        "lost bits come back",
        _plan(
            Fault(2.0, "learner_crash", -1, 0.0, 1.0, after_step=1),
            Fault(9.0, "learner_crash", -1, 0.0, 1.0, after_step=2),
            steps=4,
            bound=3,
            checkpoint_every=100,
        ),
    ),
)


def play(ending: Ending, coverage: Coverage) -> None:
    """Until it goes as its name says. Raises LawBroken when a law is broken, or when no try goes that way."""
    for seed in range(ending.tries):
        plan, seen = replace(ending.plan, seed=seed), Coverage()
        outcome = run(seed, plan=plan, ends=ending.states | {ending.otherwise}, coverage=seen)
        coverage.add(seen)
        if outcome.state in ending.states and (ending.fires is None or seen.fired[ending.fires]):
            return
    raise LawBroken(f"{ending.name}: it did not come to that in {ending.tries} tries", 0)
