"""Routes on money."""

from __future__ import annotations

from coordinator.api.rest_table import Call, Route
from coordinator.service import operator_ledger
from coordinator.wire import rest_ledger

LEDGER = "/api/v1/ledger"


async def entries(call: Call) -> rest_ledger.LedgerPage:
    """GET /ledger."""
    query = call.query_as(rest_ledger.LedgerQuery)
    return await call.deps.store.read(lambda reader: operator_ledger.page(reader, call.caller, query))


async def balances(call: Call) -> rest_ledger.Balances:
    """GET /ledger/balances."""
    query = call.query_as(rest_ledger.BalancesQuery)
    return await call.deps.store.read(lambda reader: operator_ledger.balances(reader, call.caller, query))


ROUTES = (
    Route(
        "GET",
        LEDGER,
        "viewer",
        "ledger",
        "Entries of the ledger, newest first",
        entries,
        rest_ledger.LedgerPage,
        query=rest_ledger.LedgerQuery,
    ),
    Route(
        "GET",
        LEDGER + "/balances",
        "viewer",
        "ledger",
        "Accounts as they stand",
        balances,
        rest_ledger.Balances,
        query=rest_ledger.BalancesQuery,
    ),
)
