"""POST /plan: measured figures from the rows, what the model's files tell, and the plan, off the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.domain.plan import plan
from coordinator.domain.plan_facts import Fact, PlanRefused
from coordinator.service.deps import Deps
from coordinator.service.operator_errors import RequestRefused, invalid, unavailable
from coordinator.service.operator_jobs import model_dir
from coordinator.service.plan_measured import measured_facts
from coordinator.service.plan_model import model_facts
from coordinator.service.plan_view import plan_view, question_of
from coordinator.service.ports import Reader
from coordinator.service.tokens import Caller
from coordinator.wire.plan import PlanRequest, PlanView
from pricing.errors import OfferRefused
from pricing.offers import read_offers

PLAN_S = 120.0  # with the wait for a place
RETRY_S = 10.0


async def answered(deps: Deps, caller: Caller, request: PlanRequest) -> PlanView:
    """The plan. Raises RequestRefused."""

    async def load(reader: Reader) -> dict[str, Fact]:
        return await measured_facts(reader, caller, request.job)

    measured = await deps.store.read(load)
    try:
        async with asyncio.timeout(PLAN_S):
            await deps.plans.acquire()
            work = asyncio.ensure_future(asyncio.to_thread(_planned, deps, request, measured))
            work.add_done_callback(lambda done: _released(deps, done))
            return await asyncio.shield(work)  # a thread cannot be stopped: it keeps its place until it is done
    except TimeoutError as error:
        words = f"no plan within {PLAN_S:g} s: the coordinator is busy, or the market is very large"
        fix = "repeat the request after the delay, name fewer offers, or run `echo2 plan` on your own machine"
        raise unavailable("plan_too_slow", words, fix=fix, retry_after_s=RETRY_S) from error


def _released(deps: Deps, done: asyncio.Future[PlanView]) -> None:
    deps.plans.release()
    if not done.cancelled():
        done.exception()  # nobody may be waiting any more


def _planned(deps: Deps, request: PlanRequest, measured: dict[str, Fact]) -> PlanView:
    """What a thread does."""
    try:
        offers = read_offers([offer.model_dump(exclude_none=True) for offer in request.market])
        facts = {} if request.required_rate is not None else _of_files(deps, request) | measured
        question = question_of(
            request.job,
            offers,
            given=request.assumptions,
            measured=facts,
            required_rate=request.required_rate,
            headroom=request.headroom,
            now=deps.clock.now(),
        )
        return plan_view(plan(question), question.facts, by_rate=request.required_rate is not None)
    except OfferRefused as error:
        raise invalid("market_refused", str(error), field="market", fix="correct that offer") from error
    except PlanRefused as error:
        raise invalid("plan_refused", str(error), field="assumptions", fix="correct the figure that the words name") from error


def _of_files(deps: Deps, request: PlanRequest) -> dict[str, Fact]:
    directory = _directory(deps, request)
    return {} if directory is None else model_facts(directory, request.job.algorithm.learning_rate)


def _directory(deps: Deps, request: PlanRequest) -> Path | None:
    """The model's, if the coordinator has it: a plan needs no model to be there yet."""
    try:
        return model_dir(request.job, deps.settings)
    except RequestRefused:
        return None
