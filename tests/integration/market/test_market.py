"""The market on rows: whoever is active holds an open quote, the cheapest that suffice are, and each change has its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.domain.model import (
    Event,
    Holding,
    Job,
    JobState,
    LedgerAccount,
    LedgerEntry,
    Posting,
    QuoteRow,
    Refusal,
    Worker,
    WorkerSession,
    WorkerState,
)
from coordinator.service.ledger import spent_since
from coordinator.service.market import Market, welcome
from coordinator.service.market_board import UNDECIDED
from coordinator.wire.job import BudgetConfig
from pricing import ledger
from pricing.ledger import Account

JOB = "j1"


async def test_everyone_is_quoted_by_time_until_the_learner_is_measured(scene: Any) -> None:
    await scene.job()
    await scene.worker("a", 0.2)
    await scene.worker("b", 9.0)
    await scene.worker("new", 0.1, state=WorkerState.STANDBY)
    assert scene.why_not("a") == UNDECIDED
    quotes = await scene.look()
    assert set(quotes) == {"a", "b"}
    assert all(quote.uusd_per_million_tokens is None for quote in quotes.values())
    assert (quotes["a"].uusd_per_idle_hour, quotes["a"].role) == (200_000, "active")
    assert "no version yet" in scene.why_not("new")
    told = await scene.rows(Event, job_id=JOB, kind="worker_activated")
    assert {event.data["worker"] for event in told} == {"a", "b"}


async def test_then_the_cheapest_that_suffice_stay(scene: Any) -> None:
    """8 a second are needed. a and b bring 5 + 4; c alone would bring 9 for more."""
    await scene.job()
    for name, usd in (("a", 0.2), ("b", 0.3), ("c", 0.9)):
        await scene.worker(name, usd)
    assert set(await scene.look()) == {"a", "b", "c"}
    await scene.steps(6)
    for name, rate in (("a", 5.0), ("b", 4.0), ("c", 9.0)):
        await scene.work(name, rate)
    quotes = await scene.look(1.0)
    assert set(quotes) == {"a", "b", "c"}  # looked at a moment ago: rates are read again after DECIDE_S
    quotes = await scene.look(5.0)
    assert set(quotes) == {"a", "b"}
    assert "place 3 of 3" in scene.why_not("c")
    # 0.2 USD an hour at 5 completions of 20 tokens a second: 0.2 / 3600 / 100 * 1e6 USD per million.
    assert quotes["a"].uusd_per_million_tokens == pytest.approx(0.2 / 3600 / 100 * 1e12, rel=0.02)
    assert await scene.metric("market/required_rate") == pytest.approx(8.0)
    assert await scene.metric("market/offered_rate") == pytest.approx(9.0, rel=0.1)
    assert await scene.metric("market/active") == 2
    assert await scene.metric("market/usd_per_hour") == pytest.approx(0.5)
    assert await scene.metric("market/measured_idle") == pytest.approx(0.1 / 2.1)
    assert await scene.metric("market/predicted_idle") < 0.05
    (gone,) = await scene.rows(Event, job_id=JOB, kind="worker_deactivated")
    assert (gone.data["worker"], "your all-in price is" in gone.data["reason"]) == ("c", True)


async def chosen(scene: Any) -> None:
    """a and b are active, c waits."""
    await scene.job()
    for name, usd in (("a", 0.2), ("b", 0.3), ("c", 0.9)):
        await scene.worker(name, usd)
    await scene.look()
    await scene.steps(6)
    for name, rate in (("a", 5.0), ("b", 4.0), ("c", 9.0)):
        await scene.work(name, rate)
    assert set(await scene.look()) == {"a", "b"}


async def test_who_is_lost_is_replaced_and_its_quote_ends_with_its_session(scene: Any) -> None:
    await chosen(scene)
    row, session = await scene.get(Worker, "b"), await scene.get(WorkerSession, "b", 1)
    lost_at = scene.clock.time + 1
    await scene.put(replace(row, state=WorkerState.GONE, reason="lost: not heard for 7 s"), replace(session, ended_at=lost_at))
    assert "c" in await scene.look(3.0)  # a change is looked at at once
    (quote,) = [one for one in await scene.rows(QuoteRow, worker_id="b") if "gone" in one.ended_because]
    assert (quote.ended_at, quote.ended_because) == (lost_at, "the worker is gone: lost: not heard for 7 s")


async def test_who_raises_its_price_is_dropped(scene: Any) -> None:
    await chosen(scene)
    await scene.put(replace(await scene.get(Worker, "a"), price_uusd_per_hour=2_000_000))
    quotes = await scene.look(1.0)
    assert set(quotes) == {"c"}
    assert "your all-in price is" in scene.why_not("a")


async def test_who_raises_it_a_little_stays_at_the_new_price_without_a_gap(scene: Any) -> None:
    await chosen(scene)
    await scene.put(replace(await scene.get(Worker, "a"), price_uusd_per_hour=210_000))
    quotes = await scene.look(1.0)
    assert quotes["a"].uusd_per_idle_hour == 210_000
    (before,) = [one for one in await scene.rows(QuoteRow, worker_id="a") if "price moved" in one.ended_because]
    assert before.ended_at == quotes["a"].made_at


async def test_quotes_are_renewed_before_they_expire(scene: Any) -> None:
    await scene.job()
    await scene.worker("a", 0.2)
    first = (await scene.look())["a"]
    second = (await scene.look(55.0))["a"]
    assert second.made_at == (await scene.get(QuoteRow, first.id)).ended_at < first.expires_at
    assert second.expires_at > first.expires_at


async def test_a_paused_job_has_no_quotes_and_a_resumed_one_has_them_again(scene: Any) -> None:
    await scene.job()
    await scene.worker("a", 0.2)
    await scene.look()
    job = await scene.get(Job, JOB)
    paused_at = scene.clock.time + 2
    await scene.put(replace(job, state=JobState.PAUSED, state_since=paused_at))
    assert await scene.look(4.0) == {}
    (quote,) = await scene.rows(QuoteRow)
    assert (quote.ended_at, quote.ended_because) == (paused_at, "job priced is paused")
    await scene.put(job)
    assert set(await scene.look(1.0)) == {"a"}


async def test_a_new_session_is_quoted_anew(scene: Any) -> None:
    await scene.job()
    await scene.worker("a", 0.2)
    await scene.look()
    row, session = await scene.get(Worker, "a"), await scene.get(WorkerSession, "a", 1)
    again_at = scene.clock.time + 1
    await scene.put(
        replace(row, session_epoch=2), replace(session, ended_at=again_at), replace(session, epoch=2, started_at=again_at)
    )
    quotes = await scene.look(2.0)
    assert quotes["a"].session_epoch == 2
    old = next(one for one in await scene.rows(QuoteRow) if one.session_epoch == 1)
    assert (old.ended_at, old.ended_because) == (again_at, "its session ended")


async def test_who_falls_behind_keeps_its_quote_for_a_while_but_not_that_of_an_older_session(scene: Any) -> None:
    await scene.job()
    await scene.worker("a", 0.2)
    quote = (await scene.look())["a"]
    row = await scene.get(Worker, "a")
    await scene.put(replace(row, state=WorkerState.STANDBY, state_since=scene.clock.time))
    assert (await scene.look(6.0))["a"].id == quote.id
    await scene.put(replace(row, state=WorkerState.STANDBY, state_since=scene.clock.time, session_epoch=2))
    assert await scene.look(6.0) == {}
    assert "no version yet" in scene.why_not("a")


async def test_free_workers_are_active_and_activation_all_takes_everyone(scene: Any) -> None:
    await scene.job(workers={"activation": "all"})
    await scene.worker("free", 0.0)
    await scene.worker("dear", 5.0)
    await scene.steps(6)
    for name in ("free", "dear"):
        await scene.work(name, 9.0)
    quotes = await scene.look()
    assert set(quotes) == {"free", "dear"}
    assert quotes["free"].uusd_per_idle_hour == 0


async def test_the_budget_an_hour_bounds_who_is_tried(scene: Any) -> None:
    await scene.job(budget={"steps": 100, "usd_per_hour": 0.5})
    for name, usd in (("a", 0.2), ("b", 0.25), ("c", 0.3)):
        await scene.worker(name, usd)
    assert set(await scene.look()) == {"a", "b"}
    assert "does not fit into the budget" in scene.why_not("c")


async def test_who_cannot_be_paid_is_not_quoted_again_at_once(scene: Any) -> None:
    """The accounts end a quote for which no money is left: the market waits before it tries again, unless the job was resumed."""
    await scene.job(budget={"steps": 10_000, "usd": 1.0})
    await scene.worker("a", 0.2)
    quote = (await scene.look())["a"]
    ended = replace(quote, ended_at=scene.clock.time, ended_because="budget_used_up: 0.01 USD are lacking")
    await scene.put(ended)
    assert await scene.look(5.0) == {}
    assert scene.why_not("a") == "standby: budget_used_up: 0.01 USD are lacking"
    assert set(await scene.look(30.0)) == {"a"}
    for row in await scene.rows(QuoteRow, ended_at=None):
        await scene.put(replace(row, ended_at=scene.clock.time, ended_because="budget_used_up: again"))
    assert await scene.look(5.0) == {}
    await scene.put(replace(await scene.get(Job, JOB), state_since=scene.clock.time))
    assert set(await scene.look(6.0)) == {"a"}


async def test_late_work_lowers_the_share_that_counts(scene: Any) -> None:
    """Half of what b makes is refused as too late: its rate counts half, and c is needed beside it."""
    await scene.job()
    for name, usd in (("b", 0.3), ("c", 0.9)):
        await scene.worker(name, usd)
    await scene.look()
    await scene.steps(6)
    await scene.work("b", 9.0)
    await scene.work("c", 9.0)
    now = scene.clock.time
    late = [Refusal(f"r{n}", "b", JOB, "l", "g", 0, "lease_expired", "late", "worker", False, 9, now - 1) for n in range(540)]
    await scene.put(*late)
    assert "c" in await scene.look()


async def test_a_restart_decides_the_same(scene: Any) -> None:
    await chosen(scene)
    before = {name: quote.id for name, quote in (await scene.look()).items()}
    scene.market, scene.deps.market.shown = Market(), {}
    assert {name: quote.id for name, quote in (await scene.look()).items()} == before
    assert "place 3 of 3" in scene.why_not("c")


async def test_nothing_is_decided_while_nothing_changed(scene: Any) -> None:
    await scene.job()
    await scene.worker("a", 0.2)
    await scene.look()
    decided = scene.market.decided_at
    await scene.look(1.0)
    assert scene.market.decided_at == decided
    await scene.worker("b", 0.2)
    await scene.look(1.0)
    assert scene.market.decided_at == scene.clock.time


async def spend(scene: Any, uusd: int) -> None:
    await scene.put(LedgerAccount(ledger.name(Account.SPENT, JOB), Account.SPENT.value, JOB, "", 1, uusd))


async def test_a_budget_that_pays_nobody_pauses_the_job_in_words(scene: Any) -> None:
    """0.5 USD/h for 120 s are 0.0167 USD."""
    await scene.job(budget={"steps": 1000, "usd": 1.0})
    await scene.worker("a", 0.5)
    await spend(scene, 990_000)
    assert await scene.look() == {}
    (job,) = await scene.rows(Job, id=JOB)
    assert job.state is JobState.PAUSED
    assert "0.01 USD are left of the budget of 1.0 USD" in job.reason
    assert "raise it and resume" in job.reason


async def test_a_strangers_price_pauses_no_job(scene: Any) -> None:
    await scene.job(budget={"steps": 1000, "usd": 10.0})
    await scene.worker("stranger", 10_000.0)
    assert await scene.look() == {}
    assert (await scene.get(Job, JOB)).state is JobState.RUNNING
    assert "more than a tenth of the budget of 10 USD" in scene.why_not("stranger")


async def greet(scene: Any, name: str) -> bool:
    """Whether the worker is quoted as it confirms its first version."""
    job, worker = await scene.get(Job, JOB), await scene.get(Worker, name)
    await scene.deps.store.write(lambda tx: welcome(tx, job, worker, now=scene.clock.time))
    return bool(await scene.rows(QuoteRow, worker_id=name, session_epoch=worker.session_epoch))


@pytest.mark.parametrize(
    ("usd", "spent", "is_quoted"), [(30.0, 0, True), (30.1, 0, False), (30.0, 9_000_000, True), (30.0, 9_000_001, False)]
)
async def test_a_first_quote_is_within_a_tenth_of_the_budget_and_what_is_left(
    scene: Any, usd: float, spent: int, is_quoted: bool
) -> None:
    """30 USD/h for 120 s are 1 USD, of 10."""
    await scene.job(budget={"steps": 1000, "usd": 10.0})
    await scene.worker("a", usd)
    await spend(scene, spent)
    assert await greet(scene, "a") is is_quoted


async def test_first_quotes_together_are_within_what_the_budget_leaves(scene: Any) -> None:
    """0.2 USD/h are left beside the first one; and without a budget any price is taken."""
    await scene.job(budget={"steps": 1000, "usd_per_hour": 0.5})
    await scene.worker("a", 0.3)
    await scene.worker("b", 0.3)
    await scene.worker("free", 0.0)
    assert [await greet(scene, name) for name in ("a", "b", "free")] == [True, False, True]
    await scene.put(replace(await scene.get(Job, JOB), config=(await other(scene)).config))
    assert await greet(scene, "b")


async def other(scene: Any) -> Job:
    """The job without a limit an hour."""
    job: Job = await scene.get(Job, JOB)
    return replace(job, config=job.config.model_copy(update={"budget": BudgetConfig(steps=1000)}))


@pytest.mark.parametrize("activation", ["all", "market"])
async def test_coming_back_for_ever_is_not_paid_for_ever(scene: Any, activation: str) -> None:
    """A worker that makes nothing rejoins every 60 s for an hour. 120 s are paid at once, and again after 120, 240, 480, 960 s."""
    await scene.job(workers={"activation": activation})
    await scene.worker("idle", 0.2)
    session = await scene.get(WorkerSession, "idle", 1)
    for _ in range(60):
        row, now = await scene.get(Worker, "idle"), scene.clock.time
        await scene.put(replace(session, epoch=row.session_epoch, started_at=now - 60, ended_at=now))
        await scene.put(replace(row, session_epoch=row.session_epoch + 1), replace(session, epoch=row.session_epoch + 1))
        await greet(scene, "idle")
        for _ in range(12):
            await scene.look(5.0)
    quotes = await scene.rows(QuoteRow, worker_id="idle")
    assert all(quote.uusd_per_million_tokens is None for quote in quotes)
    paid = sum((scene.clock.time if quote.ended_at is None else quote.ended_at) - quote.made_at for quote in quotes)
    assert 5 * 120 <= paid <= 5 * 130
    assert "nothing of its work was accepted" in scene.why_not("idle")


async def test_who_was_lightly_loaded_is_paid_by_its_rate_at_full_load(scene: Any) -> None:
    """One of four slots makes 25 tokens a second: 100 with all of them. 0.36 USD/h are 1 USD per million then, not 4."""
    await scene.job()
    await scene.worker("a", 0.36)
    await scene.look()
    await scene.steps(6)
    await scene.work("a", 1.25, at_once=1)
    quotes = await scene.look()
    assert quotes["a"].uusd_per_million_tokens == pytest.approx(1_000_000, rel=0.01)


async def test_a_second_job_gets_its_share_of_a_pool_that_is_too_small(scene: Any) -> None:
    """Two workers of 5 a second, of which the first job needs 8: one goes to the second job, which nobody measured yet."""
    await scene.job()
    for name, usd in (("a", 0.2), ("b", 0.3)):
        await scene.worker(name, usd)
        await scene.work(name, 5.0)
        await scene.put(Holding(name, JOB, 4, "d", (), scene.clock.time))
    await scene.steps(5)
    assert {worker: quote.job_id for worker, quote in (await scene.look()).items()} == {"a": JOB, "b": JOB}
    first = await scene.get(Job, JOB)
    await scene.put(replace(first, id="j2", committed_steps=0, config=first.config.model_copy(update={"name": "second"})))
    quotes = await scene.look(after_s=60.0)
    assert {worker: quote.job_id for worker, quote in quotes.items()} == {"a": JOB, "b": "j2"}
    shown = scene.deps.market.shown
    assert [[one.holds for one in shown[job].market.bidders] for job in (JOB, "j2")] == [[True, True], [False, False]]


async def test_what_was_spent_in_the_last_hour_counts(scene: Any) -> None:
    """1 USD/h: 0.5 were spent long ago and 1.05 in the last hour, so that 0.5 USD/h may be asked for now; an hour later all of it."""
    await scene.job(budget={"steps": 10_000, "usd_per_hour": 1.0})
    for name, usd in (("a", 0.45), ("b", 0.5)):
        await scene.worker(name, usd)
        await scene.work(name, 5.0)
    await scene.steps(5)
    assert set(await scene.look()) == {"a", "b"}
    now = scene.clock.time
    spent = [(now - 4000, 500_000), (now - 3000, 900_000), (now - 10, 150_000)]
    total = 0
    for number, (at, uusd) in enumerate(spent):
        total += uusd
        entry = f"settle/q/{number}"
        await scene.put(
            LedgerEntry(entry, number, "settle", JOB, "a", "q", "", at), Posting(f"spent/{JOB}", number, entry, uusd, total)
        )
    await scene.put(LedgerAccount(f"spent/{JOB}", Account.SPENT, JOB, "", len(spent), total))
    assert [await scene.deps.store.read(lambda r, s=s: spent_since(r, JOB, now - s)) for s in (5000, 3600, 2000, 5)] == [
        1_550_000,
        1_050_000,
        150_000,
        0,
    ]
    assert set(await scene.look()) == {"a"}
    assert "the budget allows 0.5000 USD/h" in scene.why_not("b")
    scene.clock.time += 3600
    for name in ("a", "b"):
        await scene.work(name, 5.0)
    assert set(await scene.look()) == {"a", "b"}


async def test_who_spent_nothing_spent_nothing_in_the_last_hour(scene: Any) -> None:
    assert await scene.deps.store.read(lambda r: spent_since(r, "nobody", 0.0)) == 0
