"""Settles submissions: frame checked, completions judged, blob written, rows written, then the receipt (law 2).

Each (group, slot) settles at most once: a slot is settled by moving its row from LEASED under this very lease to ACCEPTED,
inside one transaction that reads lease, job and slots again. A repeated submission finds its slots settled by the same
lease and is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coordinator.domain.admission import CompletionLimits, Refused, Submitted, Verdict, check_completions, check_lease
from coordinator.domain.model import (
    Group,
    GroupState,
    Holding,
    Job,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
    Worker,
)
from coordinator.domain.states import ROLLOUT, move
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader, Tx
from coordinator.service.worker_faults import RefusedWork, record, strike
from coordinator.service.worker_leases import closed, reopened
from coordinator.service.worker_messages import invalid_message
from coordinator.service.worker_refusals import ProtocolRefusal, busy
from coordinator.wire.frames import FrameError, declared_bytes, decode_frame
from coordinator.wire.messages import SlotRefusal, SubmitHead, SubmitReply
from coordinator.wire.signing import receipt_message

ARRAYS: Mapping[str, type[np.generic]] = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
LARGE_FRAME_BYTES = 512 << 10
UNSETTLED = (RolloutState.OPEN, RolloutState.LEASED, RolloutState.VOID)


@dataclass(frozen=True, slots=True)
class Submission:
    """A decoded submission: its head, its completions, where each begins in the arrays, and the bytes as sent."""

    head: SubmitHead
    completions: tuple[Submitted, ...]
    starts: tuple[int, ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a submission is judged on, read in one transaction."""

    lease: Lease | None
    job: Job | None
    rollouts: Mapping[int, Rollout]  # of the lease's group, by slot
    confirmed: Mapping[int, str]
    rolled_back: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Judged:
    """Slots by what becomes of them."""

    accepted: tuple[int, ...] = ()  # places in the submission
    duplicates: tuple[int, ...] = ()  # slots
    refused: tuple[RefusedWork, ...] = ()
    jobs: frozenset[str] = frozenset()  # whose rows changed


def is_large(body: bytes) -> bool:
    """Whether decoding takes so long that it belongs in a thread."""
    return max(len(body), declared_bytes(body)) > LARGE_FRAME_BYTES


def decode(body: bytes) -> Submission:
    """The submission in a frame. Raises ProtocolRefusal naming what is malformed."""
    try:
        raw, arrays = decode_frame(body)
    except FrameError as error:
        raise ProtocolRefusal(422, "invalid_frame", str(error), field="body", fix="send a frame as PROTOCOL.md draws it") from error
    try:
        head = SubmitHead.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_message(error) from error
    total = sum(completion.length for completion in head.completions)
    _check_arrays(arrays, total)
    token_ids = arrays["token_ids"].astype(np.int32, copy=False)
    logprobs = arrays["logprobs"].astype(np.float32, copy=False)
    versions = arrays["versions"].astype(np.int32, copy=False)
    starts = [0, *accumulate(completion.length for completion in head.completions)]
    completions = tuple(
        Submitted(
            slot=done.slot,
            token_ids=token_ids[start : start + done.length],
            logprobs=logprobs[start : start + done.length],
            versions=versions[start : start + done.length],
            stop_reason=done.stop_reason,
            generate_s=done.generate_s,
        )
        for done, start in zip(head.completions, starts, strict=False)
    )
    return Submission(head, completions, tuple(starts[:-1]), body)


def _check_arrays(arrays: Mapping[str, NDArray[np.generic]], total: int) -> None:
    """Exactly the three arrays, one-dimensional, of the right type, and as long as the head says."""
    fix = f"send exactly {', '.join(f'{name} {np.dtype(dtype)} [T]' for name, dtype in ARRAYS.items())}"
    if set(arrays) != set(ARRAYS):
        words = f"the body holds arrays {sorted(arrays)[:8]}"
        raise ProtocolRefusal(422, "invalid_frame", words, field="body", fix=fix)
    for name, dtype in ARRAYS.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != 1:
            words = f"array {name} is {array.dtype} of shape {list(array.shape)}"
            raise ProtocolRefusal(422, "invalid_frame", words, field=name, fix=fix)
        if len(array) != total:
            words = f"array {name} holds {len(array)} tokens, the head's lengths add up to {total}"
            raise ProtocolRefusal(422, "invalid_frame", words, field=name, fix="make them agree")


async def submit(deps: Deps, worker: Worker, submission: Submission) -> SubmitReply:
    """Judge, store, settle and acknowledge one submission."""
    rows = await deps.store.read(lambda reader: _read(reader, worker.id, submission.head))
    blob = await _stored(deps, submission) if _judge(deps, worker, submission, rows).accepted else ""
    deps.reach("submit.blob_written")
    settled = await deps.store.write(lambda tx: _settle(tx, deps, worker, submission, blob))
    if settled is None:  # a version was confirmed in between: what was refused is acceptable now
        blob = await _stored(deps, submission)
        settled = await deps.store.write(lambda tx: _settle(tx, deps, worker, submission, blob))
    if settled is None:
        raise RuntimeError(f"submission under {submission.head.lease_id} was not settled with its body stored")
    deps.reach("submit.rows_written")
    for job_id in settled.jobs:
        deps.wake.notify(job_id)
    return _reply(deps, worker, submission, settled)


async def _stored(deps: Deps, submission: Submission) -> str:
    """Store the body, synced; its digest. Refused while the disk is nearly full, before anything can be lost."""
    if await deps.blobs.free_bytes() < deps.settings.minimum_free_bytes + len(submission.body):
        raise busy("disk_full", "the coordinator's disk is nearly full", retry_after_s=30.0)
    return await deps.blobs.put(submission.body)


async def _read(reader: Reader, worker_id: str, head: SubmitHead) -> _Rows:
    lease = await reader.get(Lease, head.lease_id)
    if lease is None or lease.worker_id != worker_id:
        return _Rows(lease, None, {}, {}, frozenset())
    rollouts = await reader.select(Rollout, group_id=lease.group_id)
    holdings = await reader.select(Holding, worker_id=worker_id, job_id=lease.job_id)
    return _Rows(
        lease=lease,
        job=await reader.get(Job, lease.job_id),
        rollouts={rollout.slot: rollout for rollout in rollouts},
        confirmed={holding.version: holding.digest for holding in holdings},
        rolled_back=await _rolled_back(reader, lease.job_id),
    )


async def _rolled_back(reader: Reader, job_id: str) -> frozenset[str]:
    """Digests that a replay replaced. Publication rows are large, and this is nearly always empty: count first."""
    state = PublicationState.ROLLED_BACK
    if not await reader.count(Publication, job_id=job_id, state=state):
        return frozenset()
    return frozenset(publication.digest for publication in await reader.select(Publication, job_id=job_id, state=state))


def _judge(deps: Deps, worker: Worker, submission: Submission, rows: _Rows) -> _Judged:
    """Duplicates first (they are no fault), then the lease, then each completion."""
    duplicates, places = _split(submission, rows)
    if not places:
        return _Judged(duplicates=duplicates)
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
        refused = tuple(_refused_whole(submission, place, whole) for place in places)
        return _Judged(duplicates=duplicates, refused=refused)
    if lease is None or rows.job is None:
        raise RuntimeError(f"lease {head.lease_id} has no job")
    held, strange = _held(submission, places, lease, rows)
    limits = _limits(deps, submission, lease, rows.job, rows)
    verdicts = check_completions([submission.completions[place] for place in held], limits)
    pairs = list(zip(held, verdicts, strict=True))
    return _Judged(
        accepted=tuple(place for place, verdict in pairs if verdict.accepted),
        duplicates=duplicates,
        refused=(*strange, *(_refused_one(submission, place, verdict) for place, verdict in pairs if not verdict.accepted)),
    )


def _split(submission: Submission, rows: _Rows) -> tuple[tuple[int, ...], list[int]]:
    """Slots that this very lease settled before, and the places of all others."""
    duplicates, places = [], []
    lease, head = rows.lease, submission.head
    mine = lease is not None and lease.fence == head.fence and bool(rows.rollouts)
    for place, done in enumerate(submission.completions):
        rollout = rows.rollouts.get(done.slot)
        if mine and rollout is not None and rollout.lease_id == head.lease_id and rollout.state not in UNSETTLED:
            duplicates.append(done.slot)
        else:
            places.append(place)
    return tuple(sorted(set(duplicates))), places


def _held(submission: Submission, places: Sequence[int], lease: Lease, rows: _Rows) -> tuple[list[int], tuple[RefusedWork, ...]]:
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
            blame = "worker" if rollout is not None and rollout.state is not RolloutState.VOID else "coordinator"
            strange.append(RefusedWork(done.slot, "slot_closed", words, blame, blame == "coordinator", tokens))
        else:
            held.append(place)
        seen.add(done.slot)
    return held, tuple(strange)


def _limits(deps: Deps, submission: Submission, lease: Lease, job: Job, rows: _Rows) -> CompletionLimits:
    return CompletionLimits(
        vocab_size=job.vocab_size,
        stop_token_ids=job.stop_token_ids,
        max_new_tokens=job.config.sampling.max_new_tokens,
        lease_version=lease.version,
        last_step=lease.last_step,
        bound=job.config.staleness.max,
        committed_steps=job.committed_steps,
        confirmed=rows.confirmed,
        claimed={int(version): digest for version, digest in submission.head.digests.items()},
        rolled_back=rows.rolled_back,
        fastest_tokens_per_s=deps.settings.fastest_tokens_per_s,
    )


def _refused_whole(submission: Submission, place: int, whole: Refused) -> RefusedWork:
    done = submission.completions[place]
    return RefusedWork(done.slot, whole.code, whole.reason, whole.blame, whole.paid, len(done.token_ids))


def _refused_one(submission: Submission, place: int, verdict: Verdict) -> RefusedWork:
    tokens = len(submission.completions[place].token_ids)
    return RefusedWork(verdict.slot, verdict.code, verdict.reason, verdict.blame, verdict.paid, tokens)


async def _settle(tx: Tx, deps: Deps, worker: Worker, submission: Submission, blob: str) -> _Judged | None:
    """Judge again on rows that cannot change any more, and write what follows. None: it is accepted, but not stored yet."""
    now = deps.clock.now()
    rows = await _read(tx, worker.id, submission.head)
    judged = _judge(deps, worker, submission, rows)
    if judged.accepted and not blob:
        return None
    lease = rows.lease
    jobs = {lease.job_id} if lease is not None and rows.job is not None else set[str]()
    if lease is not None and rows.rollouts:
        await _write(tx, submission, judged, rows, blob, now=now)
    if judged.accepted:
        await _clear_strikes(tx, worker)
    if judged.refused:
        await record(tx, worker.id, lease if rows.job else None, submission.head.lease_id, judged.refused, now=now)
    fault = next((work for work in judged.refused if work.blame == "worker" and work.code not in TIMELY), None)
    if fault is not None:
        jobs |= await strike(tx, worker.id, fault.reason, limit=deps.settings.strikes_to_quarantine, now=now)
    return replace(judged, jobs=frozenset(jobs))


# Being late is a fault of the worker's, but a slow card or line is no broken engine: no strike.
TIMELY = ("lease_expired", "lease_closed", "slot_closed", "old_session")


async def _write(tx: Tx, submission: Submission, judged: _Judged, rows: _Rows, blob: str, *, now: float) -> None:
    """Settle accepted slots, reopen refused ones, close the lease when nothing of it is left."""
    lease = rows.lease
    if lease is None or lease.state is not LeaseState.LIVE:
        return
    changed = {}
    for place in judged.accepted:
        rollout = rows.rollouts[submission.completions[place].slot]
        changed[rollout.slot] = _accepted(rollout, submission, place, blob, now=now)
    for work in judged.refused:
        found = rows.rollouts.get(work.slot)
        if found is not None and found.slot not in changed and found.state is RolloutState.LEASED and found.lease_id == lease.id:
            changed[found.slot] = reopened(found)
    if not changed:
        return
    await tx.put(*changed.values())
    await _age(tx, lease.group_id, [row for row in changed.values() if row.oldest_version is not None])
    after = {**rows.rollouts, **changed}
    if not any(row.state is RolloutState.LEASED and row.lease_id == lease.id for row in after.values()):
        settled = sum(row.lease_id == lease.id for row in after.values())
        await tx.put(closed(lease, LeaseState.DONE, f"{settled} of {len(lease.slots)} slots accepted", now=now))


def _accepted(rollout: Rollout, submission: Submission, place: int, blob: str, *, now: float) -> Rollout:
    done = submission.completions[place]
    oldest, newest = int(done.versions[0]), int(done.versions[-1])
    used = {str(version) for version in (np.unique(done.versions).tolist() if oldest != newest else [oldest])}
    return replace(
        rollout,
        state=move(ROLLOUT, rollout.state, "accepted"),
        blob=blob,
        blob_start=submission.starts[place],
        length=len(done.token_ids),
        oldest_version=oldest,
        newest_version=newest,
        digests={version: digest for version, digest in submission.head.digests.items() if version in used},
        stop_reason=done.stop_reason,
        generate_s=done.generate_s,
        accepted_at=now,
    )


async def _age(tx: Tx, group_id: str, accepted: Sequence[Rollout]) -> None:
    """Keep the group's oldest version."""
    group = await tx.get(Group, group_id) if accepted else None
    if group is None or group.state is not GroupState.ISSUED:
        return
    oldest = min(row.oldest_version for row in accepted if row.oldest_version is not None)
    if group.oldest_version is None or oldest < group.oldest_version:
        await tx.put(replace(group, oldest_version=oldest))


async def _clear_strikes(tx: Tx, worker: Worker) -> None:
    if not worker.strikes:
        return
    row = await tx.get(Worker, worker.id)
    if row is not None and row.strikes:
        await tx.put(replace(row, strikes=0))


def _reply(deps: Deps, worker: Worker, submission: Submission, judged: _Judged) -> SubmitReply:
    accepted = tuple(sorted(submission.completions[place].slot for place in judged.accepted))
    settled = sorted({*accepted, *judged.duplicates})
    receipt = ""
    if settled:
        head = submission.head
        receipt = deps.key.sign(receipt_message(worker.id, head.lease_id, head.fence, settled)).hex()
    return SubmitReply(
        accepted=accepted,
        duplicates=judged.duplicates,
        refused=tuple(
            SlotRefusal(slot=work.slot, code=work.code, reason=work.reason, blame=work.blame, paid=work.paid)
            for work in judged.refused
        ),
        receipt=receipt,
    )
