"""What becomes of each completion of a submission, given the rows: duplicate, refused in words, or accepted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.domain.admission import CompletionLimits, Refused, Verdict, check_completions, check_lease, check_unneeded
from coordinator.domain.model import Group, Job, Lease, Rollout, RolloutState, Turn, Worker
from coordinator.service.deps import Deps
from coordinator.service.worker_faults import RefusedWork
from coordinator.service.worker_submissions import Submission

UNSETTLED = (RolloutState.OPEN, RolloutState.LEASED, RolloutState.VOID)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a submission is judged on, read in one transaction."""

    lease: Lease | None
    job: Job | None
    group: Group | None
    rollouts: Mapping[int, Rollout]  # of the lease's group, by slot
    confirmed: Mapping[int, str]
    rolled_back: frozenset[str]
    turns: tuple[Turn, ...] = ()  # of the lease: settled, and continued since


@dataclass(frozen=True, slots=True)
class Judged:
    """Slots by what becomes of them."""

    accepted: tuple[int, ...] = ()  # places in the submission
    duplicates: tuple[int, ...] = ()  # slots
    refused: tuple[RefusedWork, ...] = ()
    jobs: frozenset[str] = frozenset()  # whose rows changed

    @property
    def is_plain(self) -> bool:
        """Whether everything that was sent is accepted."""
        return bool(self.accepted) and not self.refused and not self.duplicates


def judge(deps: Deps, worker: Worker, submission: Submission, rows: Rows) -> Judged:
    """Duplicates first (they are no fault), then the lease, then each completion."""
    duplicates, places = _split(submission, rows)
    if not places:
        return Judged(duplicates=duplicates)
    head, lease = submission.head, rows.lease
    whole = check_lease(
        lease,
        lease_id=head.lease_id,
        worker_id=worker.id,
        session_epoch=head.session_epoch,
        fence=head.fence,
        committed_steps=rows.job.committed_steps if rows.job else 0,
        now=deps.clock.now(),
    )
    if whole is not None:
        refused = tuple(_refused_whole(deps, submission, place, whole, rows) for place in places)
        return Judged(duplicates=duplicates, refused=refused)
    if lease is None or rows.job is None:
        raise RuntimeError(f"lease {head.lease_id} has no job")
    limits = _limits(deps, submission, lease, rows.job, rows)
    held, strange = _held(submission, places, lease, rows, limits)
    verdicts = check_completions([submission.completions[place] for place in held], limits)
    pairs = list(zip(held, verdicts, strict=True))
    return Judged(
        jobs=frozenset({lease.job_id}),
        accepted=tuple(place for place, verdict in pairs if verdict.accepted),
        duplicates=duplicates,
        refused=(*strange, *(_refused_one(submission, place, verdict) for place, verdict in pairs if not verdict.accepted)),
    )


def _split(submission: Submission, rows: Rows) -> tuple[tuple[int, ...], list[int]]:
    """Slots that this very lease settled before, and the places of all others."""
    duplicates, places = [], []
    lease, head = rows.lease, submission.head
    mine = lease is not None and lease.fence == head.fence and bool(rows.rollouts)
    continued = {turn.slot for turn in rows.turns}
    for place, done in enumerate(submission.completions):
        rollout = rows.rollouts.get(done.slot)
        is_settled = rollout is not None and rollout.lease_id == head.lease_id and rollout.state not in UNSETTLED
        if mine and (is_settled or done.slot in continued):
            duplicates.append(done.slot)
        else:
            places.append(place)
    return tuple(sorted(set(duplicates))), places


def _held(
    submission: Submission, places: Sequence[int], lease: Lease, rows: Rows, limits: CompletionLimits
) -> tuple[list[int], tuple[RefusedWork, ...]]:
    """Places whose slot is leased to this lease and named once; the others, refused."""
    held, strange, seen = [], [], set[int]()
    for place in places:
        done = submission.completions[place]
        rollout = rows.rollouts.get(done.slot)
        tokens = len(done.token_ids)
        if done.slot not in lease.slots:
            words = f"slot {done.slot} is not in lease {lease.id}, which holds slots {list(lease.slots)}"
            strange.append(RefusedWork(done.slot, "slot_not_leased", words, "worker", False, tokens))
        elif done.slot in seen:
            words = f"slot {done.slot} comes twice in one submission"
            strange.append(RefusedWork(done.slot, "slot_repeated", words, "worker", False, tokens))
        elif rollout is None or rollout.state is not RolloutState.LEASED or rollout.lease_id != lease.id:
            words = f"slot {done.slot} is no longer wanted from lease {lease.id}"
            if rollout is not None and rollout.state is not RolloutState.VOID:
                strange.append(RefusedWork(done.slot, "slot_closed", words, "worker", False, tokens))
            else:
                strange.append(_unneeded(submission, place, Refused("slot_closed", words, "coordinator", True), limits))
        else:
            held.append(place)
        seen.add(done.slot)
    return held, tuple(strange)


def _limits(deps: Deps, submission: Submission, lease: Lease, job: Job, rows: Rows) -> CompletionLimits:
    return CompletionLimits(
        vocab_size=job.vocab_size,
        stop_token_ids=job.stop_token_ids,
        max_new_tokens=lease.max_new_tokens or job.config.sampling.max_new_tokens,
        lease_version=lease.version,
        last_step=lease.last_step,
        bound=job.config.staleness.max,
        committed_steps=job.committed_steps,
        confirmed=rows.confirmed,
        claimed={int(version): digest for version, digest in submission.head.digests.items()},
        rolled_back=rows.rolled_back,
        fastest_tokens_per_s=deps.settings.fastest_tokens_per_s,
    )


def _refused_whole(deps: Deps, submission: Submission, place: int, whole: Refused, rows: Rows) -> RefusedWork:
    """Paid when it was asked for, is what it should be, and only comes too late by no fault of the worker's."""
    done, lease = submission.completions[place], rows.lease
    if whole.paid and lease is not None and rows.job is not None and done.slot in lease.slots:
        limits = _limits(deps, submission, lease, rows.job, rows)
        proven = {lease.version: lease.digest, **rows.confirmed}  # the grant asked for it, whatever was forgotten since
        return _unneeded(submission, place, whole, replace(limits, confirmed=proven))
    return RefusedWork(done.slot, whole.code, whole.reason, whole.blame, False, len(done.token_ids))


def _unneeded(submission: Submission, place: int, why: Refused, limits: CompletionLimits) -> RefusedWork:
    """Refused because nobody needs it, and paid, unless something is wrong with it."""
    done = submission.completions[place]
    wrong = check_unneeded(done, limits)
    if wrong is not None:
        return RefusedWork(done.slot, wrong.code, f"slot {done.slot}: {wrong.reason}", wrong.blame, wrong.paid, len(done.token_ids))
    return RefusedWork(done.slot, why.code, why.reason, why.blame, why.paid, len(done.token_ids))


def _refused_one(submission: Submission, place: int, verdict: Verdict) -> RefusedWork:
    tokens = len(submission.completions[place].token_ids)
    return RefusedWork(verdict.slot, verdict.code, verdict.reason, verdict.blame, verdict.paid, tokens)
