"""Loads a job's rows and makes what operators and authors see of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from coordinator.domain.audit import audit
from coordinator.domain.audit_money import Money, audit_money
from coordinator.domain.audit_turns import counted
from coordinator.domain.model import (
    Batch,
    Event,
    Group,
    GroupState,
    Holding,
    Invite,
    Job,
    JobState,
    Lease,
    LeaseState,
    LedgerAccount,
    LedgerEntry,
    Meter,
    Metric,
    Posting,
    Publication,
    PublicationState,
    QuoteRow,
    Refusal,
    Rollout,
    RolloutState,
    Turn,
    Worker,
    WorkerState,
)
from coordinator.service.accounting import accepted_tokens
from coordinator.service.ledger import reserved_uusd, spent_uusd
from coordinator.service.operator_errors import unknown
from coordinator.service.operator_figures import (
    figure,
    learner_view,
    rate_view,
    rate_window_s,
    staleness_view,
)
from coordinator.service.operator_warnings import TRUNCATED_METRIC, doing, warnings
from coordinator.service.ports import Reader, Store
from coordinator.service.tokens import Caller
from coordinator.service.worker_places import CONNECTED, why_unserved
from coordinator.wire.rest import (
    EVAL_METRIC,
    REWARD_METRIC,
    AuditView,
    JobList,
    JobsQuery,
    JobSummary,
    JobView,
    WorkView,
)
from pricing.ledger import Account

STEPS_COUNTED = 2000
EVENTS_LOOKED_AT = 200
MOST_VALUES = 500
MOST_REJECTED = 5000
IDS_AT_ONCE = 500
ROWS_AT_ONCE = 256  # of an audit: the longest rollouts and turns hold megabytes
Row = TypeVar("Row")
Lean = TypeVar("Lean")
ACCEPTED = [
    RolloutState.ACCEPTED,
    RolloutState.SCORED,
    RolloutState.UNSCORED,
    RolloutState.GRADER_FAILED,
    RolloutState.GRADER_TIMEOUT,
]


async def owned(reader: Reader, caller: Caller, job_id: str) -> Job:
    """The job, if the caller may see it; an author is not told about jobs of others."""
    job = await reader.get(Job, job_id)
    if job is None or (caller.is_author and job.owner != caller.token.id):
        raise unknown("job", job_id)
    return job


async def distinct(reader: Reader, kind: type[Any], field: str, **filters: object) -> list[str]:
    """The different values of a text field, ascending, at most `MOST_VALUES`: one indexed look-up each, no scan."""
    values: list[str] = []
    while len(values) < MOST_VALUES:
        above = {f"{field}__gt": values[-1]} if values else {}
        rows = await reader.select(kind, order_by=field, limit=1, **filters, **above)
        if not rows:
            break
        values.append(getattr(rows[0], field))
    return values


async def newest_metric(reader: Reader, job_id: str, name: str) -> Metric | None:
    """The point of the highest step."""
    rows = await reader.select(Metric, job_id=job_id, name=name, order_by="-step", limit=1)
    return rows[0] if rows else None


async def listed(reader: Reader, caller: Caller, query: JobsQuery) -> JobList:
    """The newest jobs that the caller may see."""
    filters: dict[str, object] = {}
    if caller.is_author:
        filters["owner"] = caller.token.id
    if query.state is not None:
        filters["state"] = JobState(query.state)
    if query.before is not None:
        filters["created_at__lt"] = query.before
    jobs = await reader.select(Job, order_by="-created_at", limit=query.limit, **filters)
    lines = [await summary(reader, job) for job in jobs]
    return JobList(jobs=tuple(lines), next_before=jobs[-1].created_at if len(jobs) == query.limit else None)


async def summary(reader: Reader, job: Job) -> JobSummary:
    """One line of the list."""
    return JobSummary(**await _line(reader, job))


async def _line(reader: Reader, job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": job.name,
        "owner": job.owner,
        "state": job.state.value,
        "reason": job.reason,
        "state_since": job.state_since,
        "created_at": job.created_at,
        "committed_steps": job.committed_steps,
        "planned_steps": job.config.budget.steps,
        "reward": figure(await newest_metric(reader, job.id, REWARD_METRIC)),
    }


async def job_view(reader: Reader, job: Job, *, now: float) -> JobView:
    """A whole job, as of `now`."""
    batches = await reader.select(Batch, job_id=job.id, order_by="-step", limit=STEPS_COUNTED)
    window_s = rate_window_s(job, now=now)
    work = await _work(reader, job)
    accepted = await reader.count(Rollout, job_id=job.id, accepted_at__gt=now - window_s)
    publications = await reader.select(Publication, job_id=job.id, state=PublicationState.PUBLISHED, order_by="-version", limit=1)
    return JobView(
        **await _line(reader, job),
        config=job.config,
        resume_state=None if job.resume_state is None else job.resume_state.value,
        eval=figure(await newest_metric(reader, job.id, EVAL_METRIC)),
        staleness=staleness_view(job, batches),
        learner=learner_view(job, batches),
        rate=rate_view(job, batches, accepted=accepted, window_s=window_s),
        work=work,
        doing=doing(await _newest_events(reader, job)),
        warnings=await _warnings(reader, job, work, is_published=bool(publications)),
        newest_version=publications[0].version if publications else None,
        spent_uusd=await spent_uusd(reader, job.id),
        reserved_uusd=await reserved_uusd(reader, job.id),
    )


async def _newest_events(reader: Reader, job: Job) -> list[Event]:
    """Of a job that runs, last first; few happen between the beginning of an evaluation and its end."""
    if job.state is not JobState.RUNNING:
        return []
    return await reader.select(Event, job_id=job.id, order_by="-seq", limit=EVENTS_LOOKED_AT)


async def _warnings(reader: Reader, job: Job, work: WorkView, *, is_published: bool) -> tuple[str, ...]:
    found = warnings(job, work, await newest_metric(reader, job.id, TRUNCATED_METRIC))
    if job.state is not JobState.RUNNING or not is_published or work.workers_serving:
        return tuple(found)
    workers = await reader.select(Worker, state=CONNECTED, order_by="id")
    invites = await reader.select(Invite, id=sorted({worker.invite_id for worker in workers})) if workers else []
    invited_to = {invite.id: invite.jobs for invite in invites}
    return (why_unserved(job, workers, invited_to, gone=await reader.count(Worker, state=WorkerState.GONE)), *found)


async def _work(reader: Reader, job: Job) -> WorkView:
    usable = max(job.committed_steps - job.config.staleness.max, 0)
    holdings = await reader.select(Holding, job_id=job.id, version__ge=usable)
    serving = sorted({holding.worker_id for holding in holdings})
    return WorkView(
        groups=await _counts(reader, Group, job.id, GroupState),
        rollouts=await _counts(reader, Rollout, job.id, RolloutState),
        refused=await refused_by_code(reader, job_id=job.id),
        rejected=await _rejected(reader, job.id),
        accepted_tokens=await accepted_tokens(reader, job_id=job.id),
        workers_serving=await reader.count(Worker, id=serving, state=WorkerState.ACTIVE) if serving else 0,
        live_leases=await reader.count(Lease, job_id=job.id, state=LeaseState.LIVE),
    )


async def _counts(reader: Reader, kind: type[Any], job_id: str, states: type[StrEnum]) -> dict[str, int]:
    counts = {state.value: await reader.count(kind, job_id=job_id, state=state) for state in states}
    return {state: count for state, count in counts.items() if count}


async def _rejected(reader: Reader, job_id: str) -> dict[str, int]:
    """Accepted rollouts of rejected groups by the code that a group's reason begins with (the newest MOST_REJECTED groups)."""
    groups = await reader.select(Group, job_id=job_id, state=GroupState.REJECTED, order_by="-number", limit=MOST_REJECTED)
    by_code: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        by_code[group.reason.partition(":")[0]].append(group.id)
    return {code: await _accepted_in(reader, ids) for code, ids in by_code.items()}


async def _accepted_in(reader: Reader, group_ids: list[str]) -> int:
    return sum([await reader.count(Rollout, group_id=chunk, state=ACCEPTED) for chunk in _chunks(group_ids)])


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    return (ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE))


async def refused_by_code(reader: Reader, **filters: object) -> dict[str, int]:
    """Refusals counted by code."""
    codes = await distinct(reader, Refusal, "code", **filters)
    return {code: await reader.count(Refusal, code=code, **filters) for code in codes}


async def audit_view(store: Store, caller: Caller, job_id: str) -> AuditView:
    """Audit one job from a consistent snapshot; the checking itself runs in a thread, off the event loop."""

    async def load(reader: Reader) -> tuple[Any, ...]:
        job = await owned(reader, caller, job_id)
        groups = await _lean(reader, Group, job_id, "number", lambda row: row.id, _without_prompt)
        rollouts = await _lean(reader, Rollout, job_id, "group_number", lambda row: (row.group_id, row.slot), _without_words)
        turns = await _lean(reader, Turn, job_id, "accepted_at", lambda row: (row.group_id, row.slot, row.turn), counted)
        others = [await reader.select(kind, job_id=job_id) for kind in (Lease, Batch, Publication, Refusal)]
        return await load_money(reader, job), job, groups, rollouts, turns, *others

    money, job, groups, rollouts, turns, leases, batches, publications, refusals = await store.read(load)
    outcome = await asyncio.to_thread(audit, job, groups, rollouts, leases, batches, publications, refusals, turns)
    findings = (*outcome.findings, *await asyncio.to_thread(audit_money, money, [*rollouts, *turns], leases, refusals))
    counts = {
        **outcome.counts,
        "ledger_entries": sum(entry.job_id == job_id for entry in money.entries),
        "quotes": len(money.quotes),
    }
    return AuditView(ok=not findings, findings=findings, counts=counts)


async def _lean(
    reader: Reader, kind: type[Row], job_id: str, field: str, key: Callable[[Row], Hashable], lean: Callable[[Row], Lean]
) -> list[Lean]:
    """All rows of a job as `lean` makes them, read page by page along an indexed `field`: they hold texts and tokens that need not stay."""
    found: dict[Hashable, Lean] = {}
    most, since = ROWS_AT_ONCE, dict[str, object]()
    while True:
        page = await reader.select(kind, job_id=job_id, order_by=field, limit=most, **since)
        known = len(found)
        found.update((key(row), lean(row)) for row in page)
        if len(page) < most:
            return list(found.values())
        if len(found) == known:
            most *= 2  # more rows than a page have the same value
        since = {f"{field}__ge": getattr(page[-1], field)}


def _without_prompt(group: Group) -> Group:
    return replace(group, prompt_ids=(), prompt_text="")


def _without_words(rollout: Rollout) -> Rollout:
    return replace(rollout, text="", detail="")


async def load_money(reader: Reader, job: Job) -> Money:
    """The job's rows that are about money, and what its workers earned and were paid out over all jobs."""
    quotes = await reader.select(QuoteRow, job_id=job.id)
    entries = await reader.select(LedgerEntry, job_id=job.id)
    accounts = await reader.select(LedgerAccount, job_id=job.id)
    earned: dict[str, int] = defaultdict(int)
    for ids in _chunks(sorted({quote.worker_id for quote in quotes})):
        entries += await reader.select(LedgerEntry, job_id="", worker_id=ids)
        accounts += await reader.select(LedgerAccount, worker_id=ids, kind=[Account.CASH, Account.PAID])
        for account in await reader.select(LedgerAccount, worker_id=ids, kind=Account.EARNED):
            earned[account.worker_id] += account.uusd
    postings = [row for ids in _chunks([entry.id for entry in entries]) for row in await reader.select(Posting, entry_id=ids)]
    return Money(
        job=job,
        quotes=quotes,
        meters=await reader.select(Meter, job_id=job.id),
        entries=entries,
        postings=postings,
        accounts=accounts,
        earned=earned,
    )
