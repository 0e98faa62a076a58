"""Routes on money."""

from __future__ import annotations

from coordinator.api.rest_table import Call, Route, Write
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


async def pay_out(call: Call) -> Write:
    """POST /ledger/payouts."""
    new = call.body_as(rest_ledger.NewPayout)
    return Write(lambda tx: operator_ledger.pay_out(tx, new, now=call.now))


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
    Route(
        "POST",
        LEDGER + "/payouts",
        "admin",
        "ledger",
        "Put on record that a worker was paid",
        pay_out,
        rest_ledger.PayoutView,
        body=rest_ledger.NewPayout,
        body_kind="json",
        status=201,
    ),
)
