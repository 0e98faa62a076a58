"""New rows, as the service would write them: what goes into a group, lease, batch or refusal of the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.domain import leases
from coordinator.domain.admission import CompletionLimits, Verdict
from coordinator.domain.model import (
    Batch,
    BatchState,
    Group,
    GroupState,
    Job,
    Lease,
    LeaseState,
    Refusal,
    Rollout,
    RolloutState,
    Worker,
)
from coordinator.domain.seal import Seal
from coordinator.domain.staleness import last_step

LIMITS = leases.LeaseLimits(min_s=5.0, max_s=600.0, slowest_tokens_per_s=0.2)
VOCABULARY = 16
STOP_TOKEN = 1
FASTEST_TOKENS_PER_S = 1e6


def new_group(job: Job, number: int, now: float) -> tuple[Group, list[Rollout]]:
    """The next group of a job, its slots open."""
    size = job.config.algorithm.group_size
    group = Group(f"g{number}", job.id, number, number, (2, 3), size, GroupState.ISSUED, now)
    return group, [Rollout(group.id, slot, job.id, number, RolloutState.OPEN) for slot in range(size)]


def new_lease(
    job: Job, worker: Worker, group: Group, *, name: str, slots: tuple[int, ...], held: tuple[int, str], now: float
) -> Lease:
    """A lease on slots of a group for a worker that holds a version (number, digest)."""
    version, digest = held
    deadline = leases.wall_deadline(
        now,
        slots=worker.max_slots,
        max_new_tokens=job.config.sampling.max_new_tokens,
        tokens_per_s=worker.tokens_per_s,
        limits=LIMITS,
    )
    return Lease(
        id=name,
        job_id=job.id,
        group_id=group.id,
        worker_id=worker.id,
        session_epoch=worker.session_epoch,
        slots=slots,
        version=version,
        digest=digest,
        last_step=last_step(version, job.config.staleness.max),
        deadline=deadline,
        fence=group.fence + 1,
        state=LeaseState.LIVE,
        issued_at=now,
    )


def completion_limits(
    job: Job, lease: Lease, *, confirmed: Mapping[int, str], claimed: Mapping[int, str], rolled_back: frozenset[str]
) -> CompletionLimits:
    """What a completion under a lease is held against."""
    return CompletionLimits(
        vocab_size=VOCABULARY,
        stop_token_ids=(STOP_TOKEN,),
        max_new_tokens=job.config.sampling.max_new_tokens,
        lease_version=lease.version,
        last_step=lease.last_step,
        bound=job.config.staleness.max,
        committed_steps=job.committed_steps,
        confirmed=confirmed,
        claimed=claimed,
        rolled_back=rolled_back,
        fastest_tokens_per_s=FASTEST_TOKENS_PER_S,
    )


def new_refusal(lease: Lease, verdict: Verdict, *, name: str, tokens: int, now: float) -> Refusal:
    """The row of a refused completion."""
    return Refusal(
        id=name,
        worker_id=lease.worker_id,
        job_id=lease.job_id,
        lease_id=lease.id,
        group_id=lease.group_id,
        slot=verdict.slot,
        code=verdict.code,
        reason=verdict.reason,
        blame=verdict.blame,
        paid=verdict.paid,
        tokens=tokens,
        at=now,
    )


def new_batch(job: Job, chosen: Seal, numbers: Sequence[int], now: float) -> Batch:
    """The batch of the job's next step."""
    return Batch(
        job_id=job.id,
        step=job.committed_steps,
        state=BatchState.SEALED,
        groups=tuple(numbers),
        path="",
        digest="",
        rollouts=len(numbers) * job.config.algorithm.group_size,
        no_signal=chosen.no_signal,
        staleness={str(age): count for age, count in chosen.staleness.items()},
        sealed_at=now,
        bound=job.config.staleness.max,
    )
