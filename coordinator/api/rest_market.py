"""Routes on the market."""

from __future__ import annotations

from coordinator.api.rest_table import Call, Route
from coordinator.service.market_view import history, market_view
from coordinator.wire.market import HistoryQuery, MarketHistory, MarketQuery, MarketView

MARKET = "/api/v1/market"


async def market(call: Call) -> MarketView:
    """GET /market."""
    return await market_view(call.deps, call.caller, with_gains=call.query_as(MarketQuery).gains)


async def market_history(call: Call) -> MarketHistory:
    """GET /market/history."""
    query = call.query_as(HistoryQuery)
    return await call.deps.store.read(lambda reader: history(reader, call.caller, query))


ROUTES = (
    Route("GET", MARKET, "viewer", "market", "Who works for which running job, and why", market, MarketView, query=MarketQuery),
    Route(
        "GET",
        MARKET + "/history",
        "viewer",
        "market",
        "Prices and quotes over time",
        market_history,
        MarketHistory,
        query=HistoryQuery,
    ),
)
