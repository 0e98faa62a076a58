"""GET /market and its history, on rows that the market looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.domain.model import PriceRow, QuoteRow, Worker, WorkerState
from coordinator.service.market import Market, turn

MARKET = "/api/v1/market"


async def looked(bench: Any, seeded: Any, owner: str = "someone") -> None:
    """A running job, a worker with a price and one that asks for nothing."""
    rows = seeded(owner)
    worker = next(row for row in rows if isinstance(row, Worker))
    free = replace(worker, id="w-2", public_key="f" * 64, name="free", price_uusd_per_hour=0, state=WorkerState.STANDBY)
    await bench.put(*rows, free, PriceRow("w-1", bench.clock.now() - 50, 350_000))
    await turn(bench.deps, Market())


async def test_before_a_job_runs_there_is_no_market(bench: Any) -> None:
    assert (await bench.ask("GET", MARKET, status=200))["jobs"] == []
    history = await bench.ask("GET", MARKET + "/history", status=200)
    assert history == {"prices": [], "quotes": []}


async def test_who_is_active_who_waits_and_why(bench: Any, seeded: Any) -> None:
    await looked(bench, seeded)
    (job,) = (await bench.ask("GET", MARKET, status=200))["jobs"]
    assert (job["job_id"], job["active"], job["usd_per_hour"]) == ("j-1", 1, 0.35)
    assert job["required_rate"] is None
    assert "not measured yet" in job["reason"]
    offers = {one["name"]: one for one in job["offers"]}
    assert offers["box"]["is_active"]
    assert offers["box"]["quote"].startswith("j-1/w-1/1/")
    assert offers["box"]["uusd_per_million_tokens"] is None
    assert not offers["free"]["is_active"]
    assert "no version yet" in offers["free"]["reason"]
    (again,) = (await bench.ask("GET", MARKET + "?gains=true", status=200))["jobs"]
    assert again["gains"] == []  # nothing is simulated before the learner's time is known


async def test_prices_and_quotes_over_time(bench: Any, seeded: Any) -> None:
    await looked(bench, seeded)
    history = await bench.ask("GET", MARKET + "/history", status=200)
    assert [(one["name"], one["uusd_per_hour"]) for one in history["prices"]] == [("box", 350_000)]
    (quote,) = history["quotes"]
    assert (quote["worker_id"], quote["uusd_per_idle_hour"], quote["ended_at"]) == ("w-1", 350_000, None)
    assert (await bench.ask("GET", MARKET + "/history?worker=w-2", status=200)) == {"prices": [], "quotes": []}
    assert (await bench.ask("GET", MARKET + f"/history?since={bench.clock.now() + 1}", status=200))["quotes"] == []


async def test_an_author_sees_the_market_of_own_jobs(bench: Any, seeded: Any) -> None:
    await bench.token("writer", "author")
    await looked(bench, seeded)
    assert (await bench.ask("GET", MARKET, role="writer", status=200))["jobs"] == []
    assert (await bench.ask("GET", MARKET + "/history", role="writer", status=200))["quotes"] == []
    assert (await bench.ask("GET", MARKET, role="viewer", status=200))["jobs"]


async def test_prometheus_tells_the_market(bench: Any, seeded: Any) -> None:
    await looked(bench, seeded)
    text = await (await bench.client.get("/metrics")).text()
    assert 'echo2_market_active{job="j-1"' in text
    assert 'echo2_market_usd_per_hour{job="j-1"' in text


async def test_what_changes_would_buy_is_simulated_once(bench: Any, seeded: Any) -> None:
    """With a measured learner the answer names a worker, S and (where links are known) a link; asked again it is the same."""
    rows = seeded("someone")
    await bench.put(*rows)
    (batch,) = [row for row in rows if type(row).__name__ == "Batch"]
    await bench.put(*(replace(batch, step=step) for step in range(1, 5)))
    await turn(bench.deps, Market())
    (job,) = (await bench.ask("GET", MARKET + "?gains=true", status=200))["jobs"]
    assert job["required_rate"] is not None
    assert [gain["change"].split(" ")[0] for gain in job["gains"]][:2] == ["one", "S"]
    (again,) = (await bench.ask("GET", MARKET + "?gains=true", status=200))["jobs"]
    assert again["gains"] == job["gains"]
    assert (await bench.deps.store.read(lambda reader: reader.select(QuoteRow)))[0].uusd_per_idle_hour == 350_000
