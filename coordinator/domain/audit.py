"""Law 1 and law 2 from the rows alone: what `echo2 audit` proves after any crash.

Every finding names the job's group, slot or batch and says what is wrong. No findings: every issued prompt was trained once
or rejected with a reason, nothing is pending once the job ended, and every batch kept the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.domain.audit_turns import CountedTurn, turn_findings
from coordinator.domain.model import (
    Batch,
    BatchState,
    Group,
    GroupState,
    Job,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Refusal,
    Rollout,
    RolloutState,
)
from coordinator.domain.staleness import StalenessError, staleness
from coordinator.domain.states import TERMINAL
from coordinator.domain.turns import has_tokens

_SETTLED = frozenset(
    {
        RolloutState.ACCEPTED,
        RolloutState.SCORED,
        RolloutState.UNSCORED,
        RolloutState.GRADER_FAILED,
        RolloutState.GRADER_TIMEOUT,
    }
)


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome: `ok` iff there are no findings. `counts` are rows by state, in words."""

    ok: bool
    findings: tuple[str, ...]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one job, indexed."""

    job: Job
    groups: Mapping[int, Group]  # by number
    rollouts: Mapping[int, Sequence[Rollout]]  # by group number
    leases: Mapping[str, Lease]
    batches: Sequence[Batch]  # by step
    publications: Sequence[Publication]

    @property
    def ended(self) -> bool:
        return self.job.state in TERMINAL[JobState]


def audit(  # noqa: PLR0913 (rows of different kinds)
    job: Job,
    groups: Sequence[Group],
    rollouts: Sequence[Rollout],
    leases: Sequence[Lease],
    batches: Sequence[Batch],
    publications: Sequence[Publication],
    refusals: Sequence[Refusal],
    turns: Sequence[CountedTurn] = (),
) -> Audit:
    """Check the rows of one job. Rows of any other job are an error of the caller and are found too."""
    by_number: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_number.setdefault(rollout.group_number, []).append(rollout)
    rows = _Rows(
        job=job,
        groups={group.number: group for group in groups},
        rollouts=by_number,
        leases={lease.id: lease for lease in leases},
        batches=sorted(batches, key=lambda batch: batch.step),
        publications=publications,
    )
    findings = (
        *_foreign(job, (*groups, *rollouts, *leases, *batches, *publications, *turns)),
        *_numbering(groups),
        *_slots(rows, rollouts),
        *_outcomes(rows),
        *_batches(rows),
        *_bound(rows),
        *_rolled_back(rows),
        *_pending(rows),
        *turn_findings(rollouts, rows.leases, turns),
        *_refusals(refusals),
    )
    counts = _counts(groups, rollouts, batches, refusals) | ({"turns": len(turns)} if turns else {})
    return Audit(not findings, findings, counts)


def _foreign(job: Job, rows: Iterable[Group | Rollout | Lease | Batch | Publication | CountedTurn]) -> Iterator[str]:
    for row in rows:
        if row.job_id != job.id:
            yield f"{_kind(row)} row of job {row.job_id} among the rows of job {job.id}"


def _kind(row: object) -> str:
    return type(row).__name__.lower().removeprefix("counted")


def _numbering(groups: Sequence[Group]) -> Iterator[str]:
    numbers = Counter(group.number for group in groups)
    for number, times in sorted(numbers.items()):
        if times > 1:
            yield f"group {number} exists {times} times"
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    if missing:
        yield f"groups {_some(missing)} were issued and have no row"


def _slots(rows: _Rows, rollouts: Sequence[Rollout]) -> Iterator[str]:
    """Each (group, slot) has one row, and what was settled names the lease that settled it."""
    for (number, slot), times in sorted(Counter((r.group_number, r.slot) for r in rollouts).items()):
        if times > 1:
            yield f"group {number} slot {slot} settled {times} times"
        if number not in rows.groups:
            yield f"group {number} slot {slot} has a rollout and its group has no row"
    for number, group in sorted(rows.groups.items()):
        present = {rollout.slot for rollout in rows.rollouts.get(number, ())}
        if present != set(range(group.size)):
            yield f"group {number} has slots {sorted(present)}, it was issued with 0..{group.size - 1}"
        for rollout in rows.rollouts.get(number, ()):
            yield from _settlement(rows, rollout)


def _settlement(rows: _Rows, rollout: Rollout) -> Iterator[str]:
    if rollout.state not in _SETTLED:
        return
    place = f"group {rollout.group_number} slot {rollout.slot}"
    lease = rows.leases.get(rollout.lease_id or "")
    if lease is None:
        yield f"{place} is {rollout.state} without a lease"
        return
    if rollout.slot not in lease.slots or lease.group_id != rollout.group_id:
        yield f"{place} is {rollout.state} under lease {lease.id}, which does not hold it"
    if lease.worker_id != rollout.worker_id:
        yield f"{place} is {rollout.state} by worker {rollout.worker_id}, lease {lease.id} is worker {lease.worker_id}'s"
    if not rollout.digests or rollout.oldest_version is None:
        yield f"{place} is {rollout.state} without a policy version"
    if (rollout.reward is not None) != (rollout.state is RolloutState.SCORED):
        yield f"{place} is {rollout.state} and its reward is {rollout.reward}"


def _outcomes(rows: _Rows) -> Iterator[str]:
    """A settled group has a reason or a step, and holds what its state says."""
    for number, group in sorted(rows.groups.items()):
        states = {rollout.state for rollout in rows.rollouts.get(number, ())}
        accepted = any(rollout.state in _SETTLED or has_tokens(rollout) for rollout in rows.rollouts.get(number, ()))
        if group.state is GroupState.REJECTED and not group.reason:
            yield f"group {number} is rejected without a reason"
        if group.state is GroupState.VOID and accepted:
            yield f"group {number} is void and holds accepted rollouts: they would be lost"
        if group.state is GroupState.TRAINED and RolloutState.SCORED not in states:
            yield f"group {number} is trained and none of its rollouts is scored"
        if group.state is not GroupState.ISSUED and RolloutState.LEASED in states:
            yield f"group {number} is {group.state} and a slot of it is still leased"


def _batches(rows: _Rows) -> Iterator[str]:
    """Steps are contiguous from 0, each group is in one batch at most, and batch and group agree."""
    steps = [batch.step for batch in rows.batches]
    if steps != list(range(len(steps))):
        yield f"batches have steps {_some(steps)}; they must count 0..{max(len(steps) - 1, 0)} without gap or repeat"
    yield from _commitment(rows)
    times = Counter(number for batch in rows.batches for number in batch.groups)
    for number, count in sorted(times.items()):
        if count > 1:
            yield f"group {number} is in {count} batches"
        if number not in rows.groups:
            yield f"group {number} is in a batch and has no row"
    for number, group in sorted(rows.groups.items()):
        if group.state in (GroupState.TRAINED, GroupState.SEALED) and number not in times:
            yield f"group {number} is {group.state} and in no batch"


def _commitment(rows: _Rows) -> Iterator[str]:
    committed = sum(batch.state is BatchState.COMMITTED for batch in rows.batches)
    if committed != rows.job.committed_steps:
        yield f"{committed} batches are committed, the job counts {rows.job.committed_steps} committed steps"
    if rows.job.state is JobState.COMPLETED and committed != rows.job.config.budget.steps:
        yield f"the job completed after {committed} steps, {rows.job.config.budget.steps} were planned"
    for batch in rows.batches:
        expected = _group_state(batch, ended=rows.ended)
        for number in batch.groups:
            group = rows.groups.get(number)
            if group is not None and (group.state is not expected or group.step != batch.step):
                yield (
                    f"group {number} is {group.state} with step {group.step}, "
                    f"the batch of step {batch.step} that holds it is {batch.state}"
                )


def _group_state(batch: Batch, *, ended: bool) -> GroupState:
    """What the groups of a batch must be. A job that ended before the step was committed rejects them."""
    if batch.state is BatchState.COMMITTED:
        return GroupState.TRAINED
    return GroupState.REJECTED if ended else GroupState.SEALED


def _bound(rows: _Rows) -> Iterator[str]:
    """Staleness of every batch, recomputed from the rollouts, against the bound that held when it was sealed."""
    for batch in rows.batches:
        spread: Counter[str] = Counter()
        for number in batch.groups:
            oldest = _oldest(rows.rollouts.get(number, ()))
            if oldest is None:
                yield f"group {number} in the batch of step {batch.step} has no accepted tokens"
                continue
            try:
                age = staleness(batch.step, oldest)
            except StalenessError as error:
                yield f"group {number} in the batch of step {batch.step}: {error}"
                continue
            spread[str(age)] += 1
            bound = rows.job.config.staleness.max if batch.bound is None else batch.bound
            if age > bound:
                yield f"group {number} is in the batch of step {batch.step} with staleness {age}, the bound is {bound}"
        if dict(spread) != {key: value for key, value in batch.staleness.items() if value}:
            yield f"the batch of step {batch.step} records staleness {batch.staleness}, its rollouts give {dict(spread)}"


def _oldest(rollouts: Sequence[Rollout]) -> int | None:
    return min((r.oldest_version for r in rollouts if r.oldest_version is not None), default=None)


def _rolled_back(rows: _Rows) -> Iterator[str]:
    """A digest that a replay replaced trains nothing, unless its batch was sealed before the version was published anew."""
    replaced_at = _replaced_at(rows.publications)
    known = {(str(p.version), p.digest) for p in rows.publications}
    for batch in rows.batches:
        for number in batch.groups:
            for rollout in rows.rollouts.get(number, ()):
                for version, digest in sorted(rollout.digests.items()):
                    place = f"group {number} slot {rollout.slot} in the batch of step {batch.step}"
                    if (version, digest) not in known:
                        yield f"{place} carries version {version} ({digest[:12]}), which was never published"
                    elif batch.sealed_at >= replaced_at.get((version, digest), float("inf")):
                        yield f"{place} carries version {version} ({digest[:12]}), which was rolled back before the seal"


def _replaced_at(publications: Sequence[Publication]) -> dict[tuple[str, str], float]:
    """When each rolled-back (version, digest) was published anew with other weights; never: absent."""
    replaced: dict[tuple[str, str], float] = {}
    for lost in publications:
        later = [p.published_at for p in publications if p.version == lost.version and p.published_at > lost.published_at]
        if lost.state is PublicationState.ROLLED_BACK and later:
            replaced[str(lost.version), lost.digest] = min(later)
    return replaced


def _pending(rows: _Rows) -> Iterator[str]:
    """Nothing is pending when a job ended, and no accepted rollout lies outside a trained or rejected group."""
    if not rows.ended:
        return
    for number, group in sorted(rows.groups.items()):
        if group.state not in TERMINAL[GroupState]:
            yield f"group {number} is still {group.state}, and the job is {rows.job.state}"
        for rollout in rows.rollouts.get(number, ()):
            if rollout.state in (RolloutState.OPEN, RolloutState.LEASED):
                yield f"group {number} slot {rollout.slot} is still {rollout.state}, and the job is {rows.job.state}"
    for lease in sorted(rows.leases.values(), key=lambda lease: lease.id):
        if lease.state is LeaseState.LIVE:
            yield f"lease {lease.id} is still live, and the job is {rows.job.state}"


def _refusals(refusals: Sequence[Refusal]) -> Iterator[str]:
    for refusal in refusals:
        if not refusal.code or not refusal.reason:
            yield f"refusal {refusal.id} of worker {refusal.worker_id} has no code or no reason"


def _counts(
    groups: Sequence[Group], rollouts: Sequence[Rollout], batches: Sequence[Batch], refusals: Sequence[Refusal]
) -> dict[str, int]:
    counts = {"groups": len(groups), "rollouts": len(rollouts), "batches": len(batches), "refusals": len(refusals)}
    for kind, states in (
        ("groups", (group.state for group in groups)),
        ("rollouts", (rollout.state for rollout in rollouts)),
        ("batches", (batch.state for batch in batches)),
    ):
        counts.update({f"{kind}_{state}": count for state, count in sorted(Counter(states).items())})
    counts.update({f"refused_{code}": n for code, n in sorted(Counter(r.code for r in refusals).items())})
    return counts


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:10])
    return f"{shown} and {len(numbers) - 10} more" if len(numbers) > 10 else shown
