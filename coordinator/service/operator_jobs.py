"""Commands on jobs: submit, change, pause, resume, cancel. Each loads rows, decides, and saves them in one transaction."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from coordinator.domain.model import Batch, Job, JobState
from coordinator.domain.states import JOB, IllegalMove, move, resumed_event
from coordinator.service.deps import ServiceSettings
from coordinator.service.ending import settle_all
from coordinator.service.files import resolve_name, uploads_dir
from coordinator.service.ledger import bound_uusd, budget_uusd, fund_job
from coordinator.service.operator_done import Done, said
from coordinator.service.operator_errors import conflict, forbidden, invalid
from coordinator.service.operator_figures import ENDED
from coordinator.service.operator_views import job_view, owned
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event
from coordinator.service.tokens import Caller
from coordinator.wire.environment import TYPES, EnvironmentConfig, NamedFile, code_of, is_known
from coordinator.wire.job import BudgetConfig, JobConfig, JobPatch
from pricing.money import usd_to_uusd, uusd_to_usd

DATASETS = (".jsonl", ".parquet")
CODE = (".py",)


def model_dir(config: JobConfig, settings: ServiceSettings) -> Path:
    """The job's model directory. Raises RequestRefused."""
    uploads = uploads_dir(settings.data_dir)
    path = resolve_name(config.model, field="model", roots=settings.roots, uploads=uploads, directory=True)
    if not (path / "config.json").is_file():
        raise invalid(
            "not_a_model",
            f"model is {config.model!r}: that directory holds no config.json",
            field="model",
            fix="name a Hugging Face model directory",
        )
    return path


def check_types(environment: EnvironmentConfig, caller: Caller) -> None:
    """Every type that the section names is one that exists, and that the caller may bring. Raises RequestRefused, naming the field."""
    for field, kind in environment.types():
        if not is_known(kind):
            raise invalid("unknown_environment", f"{field} is {kind[:200]!r}", field=field, fix=f"use {TYPES}")
        if code_of(kind) is not None and not caller.may_bring_code:
            raise forbidden(
                "code_right_needed",
                f"{field} is {kind[:200]!r}, and token {caller.token.name!r} may not bring Python",
                field=field,
                fix="use a built-in environment, or ask an admin for a token with the right `code`",
            )


def file_of(named: NamedFile, settings: ServiceSettings) -> Path:
    """Where a file that a job names lies. Raises RequestRefused."""
    name, field = named.name, named.field
    suffixes = DATASETS if named.kind == "dataset" else CODE
    uploads = uploads_dir(settings.data_dir)
    path = resolve_name(name, field=field, roots=settings.roots, uploads=uploads, directory=False)
    if path.suffix not in suffixes:
        raise invalid(
            "wrong_suffix",
            f"{field} is {name[:200]!r}, which is a {path.suffix or 'suffixless'} file",
            field=field,
            fix=f"name a file that ends in {' or '.join(suffixes)}",
        )
    return path


def check_config(config: JobConfig, caller: Caller, settings: ServiceSettings) -> Path:
    """Everything about a new job that needs no rows; the model's directory. Touches the file system: run it in a thread."""
    check_types(config.environment, caller)
    if config.environment.type == "math" and config.environment.train is None and not config.environment.sources:
        raise invalid(
            "train_needed",
            "environment.train is not set, and environment.type is 'math'",
            field="environment.train",
            fix="name a JSONL or Parquet file",
        )
    if (words := config.environment.turns_refused()) is not None:
        field = "environment.max_turns"
        raise invalid("wrong_turns", words, field=field, fix="allow several turns exactly where the environment takes them")
    for named in config.environment.files():
        file_of(named, settings)
    return model_dir(config, settings)


async def submit(tx: Tx, caller: Caller, config: JobConfig, *, model: Path, now: float) -> Done:
    """Queue a new job."""
    await _check_spend(tx, caller, config.budget, besides=None)
    job = Job(
        id=f"j-{secrets.token_hex(8)}",
        name=config.name,
        owner=caller.token.id,
        config=config,
        state=JobState.QUEUED,
        reason="waits for a free learner",
        state_since=now,
        created_at=now,
        model_dir=str(model),
    )
    await tx.put(job)
    await fund_job(tx, job, now=now)
    await record_event(tx, job.id, "job_submitted", {"name": job.name, "by": caller.token.name}, now=now)
    return Done(await job_view(tx, job, now=now), _topics(job))


async def _check_spend(reader: Reader, caller: Caller, budget: BudgetConfig, *, besides: str | None) -> None:
    """The budgets of a token's live jobs, what its ended jobs cost, and this budget must stay within its spend limit."""
    limit = caller.token.spend_limit_uusd
    if limit is None:
        return
    if budget.usd is None:
        raise forbidden(
            "budget_needed",
            f"budget.usd is not set, and token {caller.token.name!r} may spend at most {limit} uUSD",
            field="budget.usd",
            fix="set budget.usd",
        )
    committed = 0
    for job in await reader.select(Job, owner=caller.token.id):
        if job.id != besides:
            committed += await _committed_uusd(reader, job)
    if committed + usd_to_uusd(budget.usd) > limit:
        raise forbidden(
            "spend_limit_passed",
            f"budget.usd is {budget.usd}; {committed} of the token's {limit} uUSD are spent or budgeted by its other jobs",
            field="budget.usd",
            fix="lower budget.usd, or ask an admin for a token with a higher spend limit",
        )


async def _committed_uusd(reader: Reader, job: Job) -> int:
    usd = job.config.budget.usd
    if job.state in ENDED or usd is None:
        return await bound_uusd(reader, job.id)
    return usd_to_uusd(usd)


async def _check_bound(reader: Reader, job: Job) -> None:
    """A budget cannot be set below what is gone."""
    budget, bound = budget_uusd(job), await bound_uusd(reader, job.id)
    if budget is not None and budget < bound:
        raise invalid(
            "budget_below_spent",
            f"budget.usd is {job.config.budget.usd}; {uusd_to_usd(bound)} USD are spent or reserved for work under way",
            field="budget.usd",
            fix=f"set at least {uusd_to_usd(bound)}, or pause the job",
        )


async def change(tx: Tx, caller: Caller, job_id: str, patch: JobPatch, *, now: float) -> Done:
    """Change S, kappa or the budget; the driver reads them at the next seal."""
    job = await owned(tx, caller, job_id)
    _refuse_ended(job, "be changed")
    if patch.budget is not None and patch.budget.steps != job.config.budget.steps:
        _refuse_finishing(job)
    in_training = await tx.count(Batch, job_id=job.id, step=job.committed_steps)
    config = patched(job, patch, in_training=in_training)
    if patch.budget is not None:
        await _check_spend(tx, caller, patch.budget, besides=job.id)
    job = replace(job, config=config)
    await _check_bound(tx, job)
    await tx.put(job)
    await fund_job(tx, job, now=now)
    changes = patch.model_dump(mode="json", exclude_none=True)
    await record_event(tx, job.id, "job_changed", {"by": caller.token.name, **changes}, now=now)
    return Done(await job_view(tx, job, now=now), _topics(job))


def _refuse_finishing(job: Job) -> None:
    if JobState.FINISHING in (job.state, job.resume_state):
        raise conflict(
            "job_finishing",
            f"job {job.id} is finishing after {job.committed_steps} steps; budget.steps stays {job.config.budget.steps}",
            field="budget.steps",
            fix="submit a new job that starts from this one's last checkpoint",
        )


def patched(job: Job, patch: JobPatch, *, in_training: int = 0) -> JobConfig:
    """The configuration after the patch (pure). Raises RequestRefused when it changes nothing or cannot be met any more.

    `in_training`: 1 while the batch of the next step is sealed; that step is going to be committed.
    """
    if patch == JobPatch():
        raise invalid("nothing_to_change", "the patch sets nothing", field="body", fix="set staleness_max, publish_every or budget")
    begun = job.committed_steps + in_training
    if patch.budget is not None and patch.budget.steps < begun:
        raise invalid(
            "steps_already_committed",
            f"budget.steps is {patch.budget.steps}; {begun} steps are committed or in training",
            field="budget.steps",
            fix=f"set at least {begun}, or cancel the job",
        )
    bound = job.config.staleness.max if patch.staleness_max is None else patch.staleness_max
    if (refusal := job.config.algorithm.stale_data_refused(bound)) is not None:
        raise invalid(
            "stale_without_correction", refusal, field="staleness_max", fix="submit a job with algorithm.correction 'sampler'"
        )
    every = job.config.staleness.publish_every if patch.publish_every is None else patch.publish_every
    staleness = job.config.staleness.model_copy(update={"max": bound, "publish_every": every})
    return job.config.model_copy(update={"staleness": staleness, "budget": patch.budget or job.config.budget})


async def pause(tx: Tx, caller: Caller, job_id: str, reason: str, *, now: float) -> Done:
    """Stop granting work and training; `resume` leads back."""
    job = await owned(tx, caller, job_id)
    state = _moved(job, "pause_requested", "paused")
    paused = replace(job, state=state, resume_state=job.state, reason=said("paused", caller, reason), state_since=now)
    return await _save(tx, paused, "paused", now=now)


async def resume(tx: Tx, caller: Caller, job_id: str, reason: str, *, now: float) -> Done:
    """Back to where it was paused."""
    job = await owned(tx, caller, job_id)
    state = _moved(job, resumed_event(job.resume_state), "resumed")
    words = said("resumed", caller, reason)
    resumed = replace(job, state=state, resume_state=None, reason=words, state_since=now, no_signal_streak=0)
    return await _save(tx, resumed, "resumed", now=now)


async def cancel(tx: Tx, caller: Caller, job_id: str, reason: str, *, now: float) -> Done:
    """End it now: every group settles with this reason (law 2), every lease closes."""
    job = await owned(tx, caller, job_id)
    state = _moved(job, "cancelled", "cancelled")
    words = said("cancelled", caller, reason)
    cancelled = replace(job, state=state, resume_state=None, reason=words, state_since=now)
    await settle_all(tx, job.id, f"job_cancelled: {words}", now=now)
    return await _save(tx, cancelled, "job_cancelled", now=now)


async def _save(tx: Tx, job: Job, kind: str, *, now: float) -> Done:
    await tx.put(job)
    await record_event(tx, job.id, kind, {"reason": job.reason, "state": job.state.value}, now=now)
    return Done(await job_view(tx, job, now=now), _topics(job))


def _moved(job: Job, event: str, verb: str) -> JobState:
    try:
        return move(JOB, job.state, event)
    except IllegalMove as error:
        raise conflict(
            "illegal_state",
            f"job {job.id} is {job.state.value} and cannot be {verb}",
            field="job_id",
            fix=f"look at the job's state: echo2 job show {job.id}, or GET /api/v1/jobs/{job.id}",
        ) from error


def _refuse_ended(job: Job, what: str) -> None:
    if job.state in ENDED:
        raise conflict(
            "job_ended", f"job {job.id} is {job.state.value} and cannot {what}", field="job_id", fix="submit a new job instead"
        )


def _topics(job: Job) -> frozenset[str]:
    return frozenset({job.id, "jobs"})
