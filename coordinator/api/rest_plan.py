"""The route that plans a job before it runs."""

from __future__ import annotations

from coordinator.api.rest_table import Call, Route, Write
from coordinator.service import planning
from coordinator.service.operator_done import Done
from coordinator.service.ports import Tx
from coordinator.wire.plan import PlanRequest, PlanView


async def planned(call: Call) -> Write:
    """POST /plan: planned before the transaction, which only keeps the answer for its Idempotency-Key."""
    view = await planning.answered(call.deps, call.caller, call.body_as(PlanRequest))

    async def action(_tx: Tx) -> Done:
        return Done(view)

    return Write(action)


ROUTES = (
    Route(
        "POST",
        "/api/v1/plan",
        "author",
        "market",
        "What fleet a job needs, what it costs, and how busy it keeps the learner",
        planned,
        PlanView,
        PlanRequest,
        "json",
    ),
)
