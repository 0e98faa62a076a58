"""Settles submissions: completions judged, blob written, rows written, then the receipt (law 2).

Each (group, slot) settles at most once: a slot is settled by moving its row from LEASED under this very lease to ACCEPTED,
inside one transaction that reads lease, job and slots again. A repeated submission finds its slots settled by the same
lease and is told so. Submissions with nothing wrong share transactions (`Batcher`); the others have one of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

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
    Turn,
    Worker,
)
from coordinator.domain.states import ROLLOUT, move
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader, Tx
from coordinator.service.worker_batching import Batcher
from coordinator.service.worker_faults import record, strike
from coordinator.service.worker_judging import Judged, Rows, judge
from coordinator.service.worker_leases import closed, reopened
from coordinator.service.worker_refusals import busy
from coordinator.service.worker_submissions import Submission
from coordinator.wire.messages import SlotRefusal, SubmitReply
from coordinator.wire.signing import receipt_message

log = structlog.get_logger()
BATCH_MOST = 32  # submissions settled in one transaction
# Being late is a fault of the worker's, but a slow card or line is no broken engine: no strike.
TIMELY = ("lease_expired", "lease_closed", "slot_closed", "old_session")


@dataclass(frozen=True, slots=True)
class Sent:
    """A submission on its way: who sent it, and the blob of its stored body ("": not stored)."""

    worker: Worker
    submission: Submission
    blob: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows after a submission."""

    rollouts: tuple[Rollout, ...] = ()
    group: Group | None = None
    lease: Lease | None = None


class SubmitDesk:
    """Judges, stores, settles and acknowledges."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._reads: Batcher[Sent, Rows] = Batcher(self._read, most=BATCH_MOST)
        self._plain: Batcher[Sent, Judged | None] = Batcher(self._settle_plain, most=BATCH_MOST)

    async def submit(self, worker: Worker, submission: Submission) -> SubmitReply:
        """Durable when this returns."""
        deps = self._deps
        sent = Sent(worker, submission)
        judged = judge(deps, worker, submission, await self._reads.ask(sent))
        if judged.accepted:
            sent = await self._stored(sent)
        deps.reach("submit.blob_written")
        settled = await self._plain.ask(sent) if judged.is_plain and not worker.strikes else None
        if settled is None:
            settled = await self._settle_alone(sent)
        deps.reach("submit.rows_written")
        for job_id in settled.jobs:
            deps.wake.notify(job_id)
        return _reply(deps, worker, submission, settled)

    async def _read(self, batch: Sequence[Sent]) -> list[Rows]:
        return await self._deps.store.read(lambda reader: read_rows(reader, batch))

    async def _settle_plain(self, batch: Sequence[Sent]) -> list[Judged | None]:
        return await self._deps.store.write(lambda tx: settle_plain(tx, self._deps, batch))

    async def _settle_alone(self, sent: Sent) -> Judged:
        """In a transaction of its own. What was refused at first may have become acceptable: then its body is stored first."""
        deps = self._deps
        settled = await deps.store.write(lambda tx: settle(tx, deps, sent))
        if settled is None:
            stored = await self._stored(sent)
            settled = await deps.store.write(lambda tx: settle(tx, deps, stored))
        if settled is None:
            raise RuntimeError(f"submission under {sent.submission.head.lease_id} was not settled with its body stored")
        return settled

    async def _stored(self, sent: Sent) -> Sent:
        """Store the body, synced. Refused while the disk is nearly full, before anything can be lost."""
        deps, body = self._deps, sent.submission.body
        if await deps.blobs.free_bytes() < deps.settings.minimum_free_bytes + len(body):
            raise busy("disk_full", "the coordinator's disk is nearly full", retry_after_s=30.0)
        return replace(sent, blob=await deps.blobs.put(body))


async def read_rows(reader: Reader, batch: Sequence[Sent]) -> list[Rows]:
    """What each submission is judged on. A lease of another worker's comes without the rows below it."""
    ids = sorted({sent.submission.head.lease_id for sent in batch})
    leases = {lease.id: lease for lease in await reader.select(Lease, id=ids)}
    group_ids = sorted({lease.group_id for lease in leases.values()})
    job_ids = sorted({lease.job_id for lease in leases.values()})
    if not leases:
        return [Rows(None, None, None, {}, {}, frozenset()) for _ in batch]
    rollouts: dict[str, dict[int, Rollout]] = defaultdict(dict)
    for rollout in await reader.select(Rollout, group_id=group_ids):
        rollouts[rollout.group_id][rollout.slot] = rollout
    confirmed: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for holding in await reader.select(Holding, worker_id=sorted({sent.worker.id for sent in batch}), job_id=job_ids):
        confirmed[holding.worker_id, holding.job_id][holding.version] = holding.digest
    groups = {group.id: group for group in await reader.select(Group, id=group_ids)}
    jobs = {job.id: job for job in await reader.select(Job, id=job_ids)}
    rolled_back = {job_id: await _rolled_back(reader, job_id) for job_id in job_ids}
    turns: dict[str, list[Turn]] = defaultdict(list)
    if any(rollout.turn for of_group in rollouts.values() for rollout in of_group.values()):
        for turn in await reader.select(Turn, lease_id=ids):
            turns[turn.lease_id].append(turn)

    def rows_of(sent: Sent) -> Rows:
        lease = leases.get(sent.submission.head.lease_id)
        if lease is None or lease.worker_id != sent.worker.id:
            return Rows(lease, None, None, {}, {}, frozenset())
        return Rows(
            lease=lease,
            job=jobs.get(lease.job_id),
            group=groups.get(lease.group_id),
            rollouts=rollouts[lease.group_id],
            confirmed=confirmed[sent.worker.id, lease.job_id],
            rolled_back=rolled_back[lease.job_id],
            turns=tuple(turns[lease.id]),
        )

    return [rows_of(sent) for sent in batch]


async def _rolled_back(reader: Reader, job_id: str) -> frozenset[str]:
    """Digests that a replay replaced. Publication rows are large, and this is nearly always empty: count first."""
    state = PublicationState.ROLLED_BACK
    if not await reader.count(Publication, job_id=job_id, state=state):
        return frozenset()
    return frozenset(publication.digest for publication in await reader.select(Publication, job_id=job_id, state=state))


async def settle_plain(tx: Tx, deps: Deps, batch: Sequence[Sent]) -> list[Judged | None]:
    """Settle submissions in which everything is accepted, in order; None for one that is not so any more (`settle` it)."""
    now = deps.clock.now()
    rollouts: dict[tuple[str, int], Rollout] = {}
    groups: dict[str, Group] = {}
    leases: dict[str, Lease] = {}
    results: list[Judged | None] = []
    for sent, read in zip(batch, await read_rows(tx, batch), strict=True):
        rows = _as_left(read, rollouts, groups, leases)
        judged = judge(deps, sent.worker, sent.submission, rows)
        if not judged.is_plain or not sent.blob:
            results.append(None)
            continue
        changes = _changes(sent, judged, rows, now=now)
        rollouts.update(((row.group_id, row.slot), row) for row in changes.rollouts)
        groups.update({changes.group.id: changes.group} if changes.group else {})
        leases.update({changes.lease.id: changes.lease} if changes.lease else {})
        results.append(judged)
    for changed in (rollouts, groups, leases):
        if changed:
            await tx.put(*changed.values())
    return results


def _as_left(
    rows: Rows, rollouts: Mapping[tuple[str, int], Rollout], groups: Mapping[str, Group], leases: Mapping[str, Lease]
) -> Rows:
    """The rows as earlier submissions of the same transaction leave them."""
    lease = rows.lease
    if lease is None:
        return rows
    return replace(
        rows,
        lease=leases.get(lease.id, lease),
        group=groups.get(lease.group_id, rows.group),
        rollouts={slot: rollouts.get((lease.group_id, slot), rollout) for slot, rollout in rows.rollouts.items()},
    )


async def settle(tx: Tx, deps: Deps, sent: Sent) -> Judged | None:
    """Judge again on rows that cannot change any more, and write what follows. None: it is accepted, but not stored yet."""
    now = deps.clock.now()
    worker, head = sent.worker, sent.submission.head
    rows = (await read_rows(tx, [sent]))[0]
    judged = judge(deps, worker, sent.submission, rows)
    if judged.accepted and not sent.blob:
        return None
    changes = _changes(sent, judged, rows, now=now)
    for row in (*changes.rollouts, changes.group, changes.lease):
        if row is not None:
            await tx.put(row)
    if judged.accepted:
        await _clear_strikes(tx, worker)
    if judged.refused:
        await record(tx, worker.id, rows.lease if rows.job else None, head.lease_id, judged.refused, now=now)
    fault = next((work for work in judged.refused if work.blame == "worker" and work.code not in TIMELY), None)
    if fault is None:
        return judged
    jobs = await strike(tx, worker.id, fault.reason, limit=deps.settings.strikes_to_quarantine, now=now)
    return replace(judged, jobs=judged.jobs | jobs)


def _changes(sent: Sent, judged: Judged, rows: Rows, *, now: float) -> Changes:
    """Settle accepted slots, reopen refused ones, close the lease when nothing of it is left."""
    lease = rows.lease
    if lease is None or lease.state is not LeaseState.LIVE or not rows.rollouts:
        return Changes()
    changed = {}
    for place in judged.accepted:
        rollout = rows.rollouts[sent.submission.completions[place].slot]
        changed[rollout.slot] = _accepted(rollout, sent.submission, place, sent.blob, now=now)
    for work in judged.refused:
        found = rows.rollouts.get(work.slot)
        if found is not None and found.slot not in changed and found.state is RolloutState.LEASED and found.lease_id == lease.id:
            changed[found.slot] = reopened(found)
    after = {**rows.rollouts, **changed}
    done = None
    if changed and not any(row.state is RolloutState.LEASED and row.lease_id == lease.id for row in after.values()):
        settled = [row.length for row in after.values() if row.lease_id == lease.id] + [turn.length for turn in rows.turns]
        done = closed(lease, LeaseState.DONE, f"{len(settled)} of {len(lease.slots)} slots accepted", now=now)
        done = replace(done, tokens=sum(settled))
    return Changes(tuple(changed.values()), _aged(rows.group, list(changed.values())), done)


def _aged(group: Group | None, changed: Sequence[Rollout]) -> Group | None:
    """The group with its oldest version, if that changed."""
    versions = [row.oldest_version for row in changed if row.oldest_version is not None]
    if group is None or group.state is not GroupState.ISSUED or not versions:
        return None
    oldest = min(versions)
    if group.oldest_version is not None and group.oldest_version <= oldest:
        return None
    return replace(group, oldest_version=oldest)


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
        oldest_version=oldest if rollout.oldest_version is None else min(oldest, rollout.oldest_version),
        newest_version=newest if rollout.newest_version is None else max(newest, rollout.newest_version),
        digests={**rollout.digests, **{v: digest for v, digest in submission.head.digests.items() if v in used}},
        stop_reason=done.stop_reason,
        generate_s=done.generate_s,
        accepted_at=now,
    )


async def _clear_strikes(tx: Tx, worker: Worker) -> None:
    if not worker.strikes:
        return
    row = await tx.get(Worker, worker.id)
    if row is not None and row.strikes:
        await tx.put(replace(row, strikes=0))


def _reply(deps: Deps, worker: Worker, submission: Submission, judged: Judged) -> SubmitReply:
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
