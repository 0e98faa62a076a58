"""The ledger over REST: paged entries, balances, budgets that change, what an author may see, and the audit of money."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.domain.model import Job, LedgerAccount, QuoteRow, WorkerState
from coordinator.service import ledger as service
from coordinator.service.accounting import begin
from coordinator.service.ledger import Books, fund
from coordinator.service.worker_account import account
from pricing import ledger
from pricing.ledger import Claim
from tests.integration.rest.conftest import NOW

LEDGER, JOBS = "/api/v1/ledger", "/api/v1/jobs"


async def spend(bench: Any, *, owed: int, paid: int, job_id: str = "j-1") -> None:
    """Reserve and settle for quote q of worker w-1."""

    async def action(tx: Any) -> None:
        job = await tx.get(Job, job_id)
        books = await Books.open(tx, job_id, ("reserved/q", "earned/q"))
        if job.config.budget.usd is None:
            given = -books.standing(ledger.Account.OUTSIDE, job_id)
            books.must(ledger.fund(books.balances, job_id, total=given + owed - paid, reason="the job has no budget"))
        else:
            fund(books, job)
        books.must(ledger.reserve(books.balances, job_id, "q", uusd=owed - paid, reason="two slots"), worker_id="w-1")
        books.must(ledger.settle(books.balances, Claim(job_id, "q"), owed=owed, paid=paid, reason="5 tokens"), worker_id="w-1")
        await books.save(tx, now=bench.clock.now())

    await bench.deps.store.write(action)


async def test_entries_come_in_pages_newest_first(bench: Any, seeded: Any) -> None:
    await bench.put(*seeded("someone"))
    for owed in (10, 25):
        await spend(bench, owed=owed, paid=0 if owed == 10 else 10)
    whole = await bench.ask("GET", f"{LEDGER}?job=j-1", role="viewer", status=200)
    assert [entry["kind"] for entry in whole["entries"]] == ["settle", "reserve", "fund"] * 2
    assert all(sum(p["uusd"] for p in entry["postings"]) == 0 for entry in whole["entries"])
    first = await bench.ask("GET", f"{LEDGER}?limit=4")
    rest = await bench.ask("GET", f"{LEDGER}?limit=4&before={first['next_before']}")
    assert first["entries"] + rest["entries"] == whole["entries"]
    assert rest["next_before"] is None
    of_worker = await bench.ask("GET", f"{LEDGER}?worker=w-1")
    assert {entry["kind"] for entry in of_worker["entries"]} == {"settle", "reserve"}
    of_account = await bench.ask("GET", f"{LEDGER}?account=earned/q&limit=1")
    assert [p["balance_uusd"] for e in of_account["entries"] for p in e["postings"] if p["account"] == "earned/q"] == [25]
    older = await bench.ask("GET", f"{LEDGER}?account=earned/q&limit=1&before={of_account['next_before']}")
    assert [p["balance_uusd"] for e in older["entries"] for p in e["postings"] if p["account"] == "earned/q"] == [10]
    assert (await bench.ask("GET", f"{LEDGER}?account=earned/none"))["entries"] == []
    assert (await bench.ask("GET", f"{LEDGER}?account=odd", status=422))["field"]


async def test_balances_and_the_job_view_tell_the_same(bench: Any, seeded: Any) -> None:
    await bench.put(*seeded("someone"))
    await spend(bench, owed=40, paid=0)
    told = await bench.ask("GET", f"{LEDGER}/balances?job=j-1", role="viewer")
    assert told["totals"] == {"outside": -40, "spent": 40, "debts": -40, "earned": 40}
    assert {a["account"]: a["uusd"] for a in told["accounts"]}["reserved/q"] == 0
    assert (await bench.ask("GET", f"{JOBS}/j-1"))["spent_uusd"] == 40
    assert (await bench.ask("GET", "/api/v1/workers/w-1"))["earned_uusd"] == 40
    assert (await bench.ask("GET", f"{LEDGER}/balances?worker=w-1"))["totals"] == {"earned": 40}


async def test_an_author_sees_only_money_of_own_jobs(bench: Any, seeded: Any) -> None:
    await bench.put(*seeded("someone"))
    await spend(bench, owed=40, paid=0)
    assert (await bench.ask("GET", f"{LEDGER}?job=j-1", role="author", status=200))["entries"] == []
    assert (await bench.ask("GET", LEDGER, role="author"))["entries"] == []
    assert (await bench.ask("GET", f"{LEDGER}/balances", role="author"))["accounts"] == []
    assert (await bench.ask("GET", f"{LEDGER}?account=spent/j-1", role="author", status=200))["entries"] == []


async def test_a_raised_budget_is_more_money_and_a_lowered_one_less(bench: Any, seeded: Any) -> None:
    """Never below what is spent and reserved."""
    await bench.put(*seeded("someone"))
    steps = (await bench.ask("GET", f"{JOBS}/j-1"))["planned_steps"]
    await bench.ask("PATCH", f"{JOBS}/j-1", json={"budget": {"usd": 1.0, "steps": steps}}, status=200)
    await spend(bench, owed=300_000, paid=0)

    async def funds() -> int:
        return (await bench.ask("GET", f"{LEDGER}/balances?job=j-1"))["totals"].get("funds", 0)

    assert await funds() == 700_000
    await bench.ask("PATCH", f"{JOBS}/j-1", json={"budget": {"usd": 2.0, "steps": steps}}, status=200)
    assert await funds() == 1_700_000
    await bench.ask("PATCH", f"{JOBS}/j-1", json={"budget": {"usd": 0.3, "steps": steps}}, status=200)
    assert await funds() == 0
    refused = await bench.ask("PATCH", f"{JOBS}/j-1", json={"budget": {"usd": 0.299999, "steps": steps}}, status=422)
    assert (refused["code"], refused["field"]) == ("budget_below_spent", "budget.usd")
    assert "0.3" in refused["fix"]


async def test_what_ended_jobs_of_a_token_hold_counts_against_its_limit(bench: Any, seeded: Any) -> None:
    """A limit of 1 USD, of which an ended job has spent 0.4: a new budget of 0.7 is refused, one of 0.6 is not."""
    owner = await bench.token("limited", "author", spend_limit_uusd=1_000_000)
    rows = seeded(owner)
    await bench.put(*rows)
    await spend(bench, owed=400_000, paid=0)
    await bench.ask("POST", f"{JOBS}/j-1/cancel", role="limited", status=200)
    body = {
        "name": "more",
        "model": "tiny",
        "environment": {"type": "digit_sort"},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
    }
    (bench.root / "tiny").mkdir(exist_ok=True)
    (bench.root / "tiny" / "config.json").write_text("{}")
    refused = await bench.ask("POST", JOBS, role="limited", json={**body, "budget": {"usd": 0.7, "steps": 3}}, status=403)
    assert refused["code"] == "spend_limit_passed"
    made = await bench.ask("POST", JOBS, role="limited", json={**body, "budget": {"usd": 0.6, "steps": 3}}, status=201)
    told = await bench.ask("GET", f"{LEDGER}/balances?job={made['id']}", role="limited")
    assert told["totals"] == {"outside": -600_000, "funds": 600_000}


async def test_a_mistake_is_compensated_once_with_a_reason(bench: Any, seeded: Any) -> None:
    """The entry stays; what it did is undone beside it."""
    await bench.put(*seeded("someone"))
    await spend(bench, owed=40, paid=0)
    (settled,) = [e for e in (await bench.ask("GET", LEDGER))["entries"] if e["kind"] == "settle"]

    async def undo(entry: str, reason: str) -> str:
        return await bench.deps.store.write(lambda tx: service.compensate(tx, entry, reason=reason, now=NOW))

    assert "does not exist" in await undo("settle/none/0", "typo")
    assert "without a reason" in await undo(settled["id"], " ")
    assert await undo(settled["id"], "the worker was paid by hand") == ""
    assert "compensated already" in await undo(settled["id"], "again")
    assert "compensates another" in await undo(f"compensate/{settled['id']}", "no, it was right")
    told = await bench.ask("GET", f"{LEDGER}/balances?job=j-1")
    assert told["totals"] == {"outside": -40, "reserved": 40}


async def test_the_audit_finds_money_that_is_not_there(bench: Any, seeded: Any) -> None:
    """Accounts that were changed beside the product are found by name."""
    await bench.put(*seeded("someone"))
    await spend(bench, owed=40, paid=0)
    audited = await bench.ask("GET", f"{JOBS}/j-1/audit")
    assert not [finding for finding in audited["findings"] if "uUSD" in finding]
    assert audited["counts"]["ledger_entries"] == 3
    row = await bench.deps.store.read(lambda r: r.get(LedgerAccount, "spent/j-1"))
    await bench.put(LedgerAccount(row.id, row.kind, row.job_id, row.worker_id, row.number, 39))
    audited = await bench.ask("GET", f"{JOBS}/j-1/audit")
    assert "account spent/j-1 is said to stand at 39 uUSD after 1 postings, its 1 postings make 40" in audited["findings"]
    assert not audited["ok"]


@pytest.mark.parametrize("usd", [None, 1.0])
async def test_money_is_reserved_before_the_first_lease(bench: Any, seeded: Any, usd: float | None) -> None:
    """0.1 USD a million tokens: two rounds of 4 slots at their longest, and a minute of waiting at 0.35 USD an hour."""
    job, *rest = seeded("someone")
    config = job.config.model_copy(update={"budget": job.config.budget.model_copy(update={"usd": usd})})
    job = Job(**{**{name: getattr(job, name) for name in job.__slots__}, "config": config})
    quote = QuoteRow("q", "j-1", "w-1", 1, "active", 100_000, 350_000, NOW, NOW + 3600, "cheap")
    await bench.put(job, *rest, quote)
    worker = next(row for row in rest if getattr(row, "state", None) is WorkerState.ACTIVE)
    meter = await bench.deps.store.write(lambda tx: begin(tx, bench.deps, job, quote, worker))
    most = 8 * config.sampling.max_new_tokens * 100_000 // 1_000_000 + 350_000 // 60
    told = await bench.ask("GET", f"{LEDGER}/balances?job=j-1")
    assert told["totals"]["reserved"] == most
    assert meter.leasable == (None if usd is None else 8)


async def test_a_payout_is_on_record_once_and_never_above_what_is_earned(bench: Any, seeded: Any) -> None:
    """40 earned. 30 are paid, the same request again changes nothing, 11 more are refused, and only an admin may."""
    await bench.put(*seeded("someone"))
    await spend(bench, owed=40, paid=0)
    payouts, key = f"{LEDGER}/payouts", {"Idempotency-Key": "transfer-7-of-may-2026"}
    body = {"worker": "w-1", "uusd": 30, "note": "transfer 7"}
    made = [await bench.ask("POST", payouts, headers=key, json=body, status=201) for _ in range(2)]
    assert made[0] == made[1]
    assert (made[0]["earned_uusd"], made[0]["paid_out_uusd"], made[0]["note"]) == (40, 30, "transfer 7")
    refused = await bench.ask("POST", payouts, json={**body, "uusd": 11}, status=409)
    assert (refused["code"], refused["field"]) == ("payout_above_earnings", "uusd")
    assert "40 are earned, 30 are paid out" in refused["detail"]
    await bench.ask("POST", payouts, json={**body, "worker": "w-none"}, status=404)
    for wrong in (0, -5, 1.5):
        assert (await bench.ask("POST", payouts, json={**body, "uusd": wrong}, status=422))["field"] == "uusd"
    await bench.ask("POST", payouts, role="author", json=body, status=403)
    worker = await bench.ask("GET", "/api/v1/workers/w-1")
    assert (worker["earned_uusd"], worker["paid_out_uusd"]) == (40, 30)
    (entry,) = [e for e in (await bench.ask("GET", f"{LEDGER}?worker=w-1"))["entries"] if e["kind"] == "payout"]
    assert sum(p["uusd"] for p in entry["postings"]) == 0
    await bench.put(QuoteRow("q", "j-1", "w-1", 1, "active", 1_000_000, 0, 0.0, 1e9, "cheap"))
    assert not [f for f in (await bench.ask("GET", f"{JOBS}/j-1/audit"))["findings"] if "uUSD" in f]
    await bench.put(LedgerAccount("earned/q", "earned", "j-1", "w-1", 1, 29))
    assert (
        "30 uUSD are paid out to worker w-1, 29 are earned in all jobs" in (await bench.ask("GET", f"{JOBS}/j-1/audit"))["findings"]
    )
    told = (await account(bench.deps, "w-1")).payouts
    assert [(one.uusd, one.note, one.entry_id) for one in told] == [(30, "transfer 7", entry["id"])]
