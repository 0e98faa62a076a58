"""`echo2 ledger` against a server that answers as the API does: what is asked for, and what a person reads."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.commands import ledger
from coordinator.errors import CoordinatorError
from coordinator.rest_client import RestClient

ENTRY = {
    "id": "settle/reserved/q/1",
    "seq": 7,
    "kind": "settle",
    "job_id": "j",
    "worker_id": "w",
    "subject": "q",
    "reason": "12 tokens, 0.000 s in all",
    "at": 1_790_000_000.0,
    "postings": [
        {"account": "reserved/q", "uusd": -12, "balance_uusd": 88},
        {"account": "earned/q", "uusd": 12, "balance_uusd": 12},
    ],
}


async def test_what_is_asked_for() -> None:
    """Filters that were given, and no others; balances know no account filter."""
    asked: list[tuple[str, dict[str, str]]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path, dict(request.query)))
        return web.json_response({"entries": [], "next_before": None})

    server = web.Application()
    server.router.add_get("/api/v1/{rest:.*}", answer)
    async with TestServer(server) as running, RestClient(str(running.make_url("")).rstrip("/"), "token") as client:
        query = ledger.filters(job="j", worker=None, account="spent/j", limit=5)
        await ledger.entries(client, query)
        await ledger.balances(client, query)
    assert asked == [
        ("/api/v1/ledger", {"job": "j", "account": "spent/j", "limit": "5"}),
        ("/api/v1/ledger/balances", {"job": "j", "limit": "5"}),
    ]


def test_entries_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """A line a posting, to the micro-dollar; the entry's words once."""
    ledger.show_entries({"entries": [ENTRY], "next_before": 7})
    lines = capsys.readouterr().out.splitlines()
    (first,) = [line for line in lines if "reserved/q" in line]
    (second,) = [line for line in lines if "earned/q" in line]
    assert first.split()[0] == "7"
    assert "settle" in first
    assert "-0.000012" in first
    assert "0.000088" in first
    assert "12 tokens" in first
    assert "12 tokens" not in second
    assert any("before=7" in line for line in lines)


def test_balances_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Totals first, then each account."""
    account: dict[str, Any] = {"account": "earned/q", "kind": "earned", "job_id": "j", "worker_id": "w", "postings": 1, "uusd": 12}
    ledger.show_balances({"totals": {"earned": 12}, "accounts": [account]})
    out = capsys.readouterr().out
    assert "Totals" in out
    (line,) = [line for line in out.splitlines() if "earned/q" in line]
    assert line.split() == ["earned/q", "w", "0.000012", "1"]


def test_the_command_knows_its_options() -> None:
    """A limit beyond the API's is refused before anything is asked."""
    told = CliRunner().invoke(app, ["ledger", "--limit", "0"])
    assert told.exit_code == 2


async def test_a_payment_goes_on_record_to_the_micro_dollar(capsys: pytest.CaptureFixture[str]) -> None:
    """1.25 USD are 1,250,000 uUSD; what is no amount is refused before anything is asked."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        told = {"entry_id": "payout/paid/w/0", "worker_id": "w", "uusd": body["uusd"], "note": body["note"], "at": 1.0}
        return web.json_response({**told, "earned_uusd": 2_000_000, "paid_out_uusd": 1_250_000}, status=201)

    server = web.Application()
    server.router.add_post("/api/v1/ledger/payouts", answer)
    async with TestServer(server) as running, RestClient(str(running.make_url("")).rstrip("/"), "token") as client:
        ledger.show_payout(await ledger.pay(client, "w", "1.25", "transfer 7"))
        for wrong in ("-1", "nan", "much"):
            with pytest.raises(CoordinatorError, match="is not an amount of money"):
                await ledger.pay(client, "w", wrong, "")
    assert asked == [{"worker": "w", "uusd": 1_250_000, "note": "transfer 7"}]
    out = " ".join(capsys.readouterr().out.split())
    assert "1.250000 USD paid to worker w are on record as payout/paid/w/0" in out
    assert "0.750000 are left" in out


def test_pay_is_a_part_of_ledger() -> None:
    told = CliRunner().invoke(app, ["ledger", "pay", "--help"])
    assert (told.exit_code, "--note" in told.output) == (0, True)
