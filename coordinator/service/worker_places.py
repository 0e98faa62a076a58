"""Which jobs a worker may serve, and why nobody serves a job (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.domain.model import Job, Worker, WorkerState
from coordinator.domain.workers import standing

CONNECTED = tuple(state for state in WorkerState if state is not WorkerState.GONE)


@dataclass(frozen=True, slots=True)
class Refused:
    """What a job asks for, and how a worker differs: two parts of a sentence, so that workers refused for the same thing can be counted."""

    asked: str
    differs: str

    @property
    def words(self) -> str:
        return f"{self.asked}, {self.differs}"


def refusal(job: Job, worker: Worker, invited_to: Sequence[str]) -> Refused | None:
    """Why the worker may not serve the job; None: it may. `invited_to` is empty when its invite names no jobs."""
    wanted, name = job.config.workers, worker.name
    if invited_to and job.id not in invited_to and job.name not in invited_to:
        return Refused("takes workers whose invite names it or names no job", f"and that of {name} names others")
    kind = worker.engine.get("kind")
    if kind not in wanted.engines:
        return Refused(f"takes engines {', '.join(wanted.engines)} (workers.engines)", f"and {name} has {kind}")
    if wanted.names and name not in wanted.names:
        return Refused("takes named workers only (workers.names)", f"and {name} is not among them")
    if wanted.trust != "any" and name not in wanted.names:
        return Refused(f"asks for trust {wanted.trust!r} (workers.trust)", f"which {name} does not have")
    return None


def may_serve(job: Job, worker: Worker, invited_to: Sequence[str]) -> tuple[bool, str]:
    """Whether the worker may serve the job, and the reason in words that its owner reads."""
    refused = refusal(job, worker, invited_to)
    return (True, f"serves job {job.name}") if refused is None else (False, f"job {job.name} {refused.words}")


def why_unserved(job: Job, connected: Sequence[Worker], invited_to: Mapping[str, Sequence[str]], *, gone: int) -> str:
    """What a job's author reads while no worker serves it: how many workers there are, and for each kind of reason one of them.

    Args:
        job: one that no worker serves.
        connected: the pool, in any state but gone.
        invited_to: invite id -> the jobs it names.
        gone: workers that left or were lost.
    """
    if not connected:
        lost = f" ({gone} left or were lost)" if gone else ""
        return f"no worker serves it: none is connected{lost}; let one join with an invite: echo2 invite create"
    reasons: dict[str, list[str]] = {}
    for worker in connected:
        kind, words = _why_not(job, worker, invited_to.get(worker.invite_id, ()))
        reasons.setdefault(kind, []).append(words)
    each = [words[0] + (f" (and {len(words) - 1} more alike)" if len(words) > 1 else "") for words in reasons.values()]
    return f"no worker serves it, of {len(connected)} connected: {'; '.join(each)}"


def _why_not(job: Job, worker: Worker, invited_to: Sequence[str]) -> tuple[str, str]:
    """(the kind of reason, the reason) of one worker that does not serve the job now."""
    refused = refusal(job, worker, invited_to)
    if refused is not None:
        return refused.asked, f"it {refused.words}"
    says = f" (it says: {worker.activity})" if worker.activity else ""
    if worker.state is WorkerState.ACTIVE:
        return "active", f"{worker.name} holds no version that the next step may train on{says}"
    return worker.state.value, f"{worker.name} is {standing(worker, holds_newest_usable=False)[1]}{says}"
