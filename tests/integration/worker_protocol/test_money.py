"""Pay over the real protocol: reserved before it is leased, settled once, never beyond the budget (law 7)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from coordinator.domain.model import (
    Holding,
    Job,
    JobState,
    Lease,
    LeaseState,
    LedgerAccount,
    LedgerEntry,
    Meter,
    Posting,
    QuoteRow,
    Refusal,
    Rollout,
    RolloutState,
    Worker,
)
from coordinator.service import accounting
from coordinator.service.ledger import fund_job
from coordinator.wire.messages import Account, JoinRequest, Leave
from coordinator.wire.signing import is_receipt, public_hex
from tests.integration.worker_protocol.conftest import Stranger

CAP, GROUP = 8, 4
PER_TOKEN = 1_000_000  # uUSD a million tokens: 1 uUSD each, so a slot is at most 8 uUSD


class Modest(Stranger):
    """Asks for no money, so that any budget bears its first quote; `quoted` sets what it is paid."""

    def join_request(self, **changes: Any) -> JoinRequest:
        return super().join_request(price_uusd_per_hour=0, **changes)


@pytest.fixture
def stranger(coordinator: Any) -> Any:
    return lambda name="w1": Modest(coordinator, name)


@pytest.fixture
async def job(coordinator: Any, rows: Any) -> Job:
    """A job with a budget of 100 uUSD."""
    row = rows.job()
    row = replace(row, config=row.config.model_copy(update={"budget": row.config.budget.model_copy(update={"usd": 0.0001})}))
    await coordinator.put(row)
    return row


async def quoted(coordinator: Any, worker: Any, **changes: Any) -> QuoteRow:
    """The worker's open quote, on these terms; nothing was leased under it yet."""
    (row,) = await coordinator.rows(QuoteRow, worker_id=worker.id, ended_at=None)
    terms = {"uusd_per_million_tokens": PER_TOKEN, "uusd_per_idle_hour": 0} | changes
    row = replace(row, **terms)
    await coordinator.put(row)
    return row


async def standing(coordinator: Any, account: str) -> int:
    row = await coordinator.get(LedgerAccount, account)
    return 0 if row is None else row.uusd


async def look(coordinator: Any, *, after_s: float = 11.0) -> None:
    coordinator.clock.added += after_s
    await accounting.look(coordinator.deps)


async def the_books_hold(coordinator: Any) -> None:
    """Each entry sums to zero, accounts are their postings, nothing is on the wrong side of zero."""
    postings = await coordinator.rows(Posting)
    for entry in await coordinator.rows(LedgerEntry):
        assert sum(p.uusd for p in postings if p.entry_id == entry.id) == 0
    for account in await coordinator.rows(LedgerAccount):
        own = sorted((p for p in postings if p.account == account.id), key=lambda p: p.number)
        assert [p.number for p in own] == list(range(account.number))
        assert sum(p.uusd for p in own) == account.uusd == own[-1].balance_uusd
        assert account.uusd <= 0 if account.kind in ("outside", "debts") else account.uusd >= 0


async def test_a_budget_is_never_passed_and_its_end_pauses_the_job(coordinator: Any, stranger: Any, job: Job) -> None:
    """100 uUSD lease 12 slots of at most 8; each completion comes to 4, so 20 are made, and 20 uUSD buy no further group."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    leases = [await worker.lease() for _ in range(2)]
    assert await standing(coordinator, f"reserved/{quote.id}") == 100
    for lease in leases:
        await worker.submit(lease)
    await worker.submit(await worker.lease())
    assert "the job's money is reserved for 0 more completions" in (await worker.ask()).reason
    for made in (12, 16):  # (100 - 48) / 8 = 6 slots, then (100 - 64) / 8 = 4
        await look(coordinator)
        assert await standing(coordinator, f"spent/{job.id}") == 4 * made
        await worker.submit(await worker.lease())
        assert (await worker.ask()).reason
    await look(coordinator)
    row = await coordinator.get(Job, job.id)
    assert (row.state, "budget.usd" in row.reason) == (JobState.PAUSED, True)
    ended = await coordinator.get(QuoteRow, quote.id)
    assert ended.ended_because.startswith("budget_used_up: budget.usd is 0.0001")
    await look(coordinator)
    assert await standing(coordinator, f"spent/{job.id}") == await standing(coordinator, f"earned/{quote.id}") == 80
    assert await standing(coordinator, f"reserved/{quote.id}") == 0
    assert await standing(coordinator, f"funds/{job.id}") == 20
    assert (await coordinator.get(Meter, quote.id)).closed_at is not None
    await the_books_hold(coordinator)


@pytest.mark.parametrize("point", ["accounting.measured", "accounting.posted"])
async def test_a_look_that_dies_is_taken_again_and_posts_nothing_twice(
    coordinator: Any, stranger: Any, job: Job, point: str
) -> None:
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    await worker.submit(await worker.lease())

    def die(name: str) -> None:
        if name == point:
            raise RuntimeError(name)

    coordinator.on_reach = die
    with pytest.raises(RuntimeError):
        await look(coordinator)
    coordinator.on_reach = lambda _name: None
    await coordinator.restart()
    for _ in range(3):
        await look(coordinator)
    assert await standing(coordinator, f"earned/{quote.id}") == 16
    assert len([e for e in await coordinator.rows(LedgerEntry) if e.kind == "settle"]) == 1
    await the_books_hold(coordinator)


async def test_cancelled_work_is_paid_once_and_only_before_its_deadline(coordinator: Any, stranger: Any, job: Job) -> None:
    """Sent three times, and once after the deadline: 2 completions of 4 tokens are owed for."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    lease = await worker.lease()
    await worker.submit(lease, (0,))
    row = await coordinator.get(Lease, lease.lease_id)
    await coordinator.put(replace(row, state=LeaseState.CANCELLED, reason="job_paused: test", closed_at=coordinator.clock.now()))
    for _ in range(3):
        assert all(refused.paid for refused in (await worker.submit(lease, (1,))).refused)
    coordinator.clock.added += row.deadline - coordinator.clock.now() + 1
    assert not any(refused.paid for refused in (await worker.submit(lease, (2,))).refused)
    assert sum(r.tokens for r in await coordinator.rows(Refusal, worker_id=worker.id, paid=True)) == 4
    await look(coordinator)
    assert await standing(coordinator, f"earned/{quote.id}") == 8


def made_up(slot: int, tokens: int = CAP, **changes: Any) -> dict[str, Any]:
    """One completion that fills the cap; `changes` say what is wrong with it."""
    fields = {"token": 5, "logprob": -0.5, "version": 0, "stop_reason": "length", "generate_s": 1.0} | changes
    head = {"slot": slot, "length": tokens, "stop_reason": fields["stop_reason"], "generate_s": fields["generate_s"]}
    return {
        "token_ids": np.full(tokens, fields["token"], np.int32),
        "logprobs": np.full(tokens, fields["logprob"], np.float32),
        "versions": np.full(tokens, fields["version"], np.int32),
        "completions": [head],
    }


MADE_UP = [
    ({"tokens": 20}, "wrong_length"),
    ({"token": 10**6}, "outside_vocabulary"),
    ({"logprob": float("nan")}, "logprob_not_finite"),
    ({"logprob": 0.5}, "logprob_positive"),
    ({"stop_reason": "stop"}, "wrong_stop"),
    ({"tokens": 3}, "wrong_stop"),
    ({"version": 1}, "version_not_claimed"),
    ({"generate_s": 0.0}, "too_fast"),
]
ENDS = [LeaseState.DEAD, LeaseState.CANCELLED, LeaseState.LIVE]  # LIVE: its group closed the slot


async def unneeded(coordinator: Any, lease: Any, slot: int, state: LeaseState) -> None:
    """The coordinator has no use any more for the slot."""
    row = await coordinator.get(Lease, lease.lease_id)
    if state is LeaseState.LIVE:
        await coordinator.put(replace(await coordinator.get(Rollout, lease.group_id, slot), state=RolloutState.VOID))
    else:
        await coordinator.put(replace(row, state=state, reason="job_paused: test", closed_at=coordinator.clock.now()))


@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize(("changes", "code"), MADE_UP)
async def test_nobody_is_paid_for_what_it_made_up_because_it_is_not_needed_any_more(
    coordinator: Any, stranger: Any, job: Job, state: LeaseState, changes: dict[str, Any], code: str
) -> None:
    """The worker's own fault, with a strike; sound work for the same slot is paid after it."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    lease = await worker.lease()
    await unneeded(coordinator, lease, 1, state)
    (refused,) = (await worker.submit(lease, (1,), **made_up(1, **changes))).refused
    assert (refused.code, refused.blame, refused.paid) == (code, "worker", False)
    assert (await coordinator.get(Worker, worker.id)).strikes == 1
    (refused,) = (await worker.submit(lease, (1,), **made_up(1))).refused
    assert (refused.code, refused.paid) == (PAID_AS[state], True)
    await look(coordinator)
    assert await standing(coordinator, f"earned/{quote.id}") == CAP


PAID_AS = {LeaseState.DEAD: "lease_dead_by_version", LeaseState.CANCELLED: "lease_closed", LeaseState.LIVE: "slot_closed"}


async def test_a_slot_that_was_never_leased_is_not_paid(coordinator: Any, stranger: Any, job: Job) -> None:
    worker = await stranger().ready()
    await quoted(coordinator, worker)
    lease = await worker.lease()
    await unneeded(coordinator, lease, 1, LeaseState.CANCELLED)
    assert not (await worker.submit(lease, (7,), **made_up(7))).refused[0].paid


@pytest.mark.parametrize("state", [LeaseState.DEAD, LeaseState.CANCELLED])
async def test_work_is_paid_although_the_proof_of_its_version_was_forgotten(
    coordinator: Any, stranger: Any, job: Job, state: LeaseState
) -> None:
    """The grant asked for that proof."""
    worker = await stranger().ready()
    await quoted(coordinator, worker)
    lease = await worker.lease()
    await unneeded(coordinator, lease, 1, state)
    await coordinator.deps.store.write(lambda tx: tx.delete(Holding, worker_id=worker.id))
    assert (await worker.submit(lease, (1,), **made_up(1))).refused[0].paid


ENDED = [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED]


@pytest.mark.parametrize("state", ENDED)
async def test_what_an_ended_job_has_left_goes_back_though_nobody_ever_worked_for_it(
    coordinator: Any, job: Job, state: JobState
) -> None:
    """It ended while no coordinator looked. Looked at again, nothing is posted twice; a live job keeps what it has."""
    other = replace(job, id="j-live")
    await coordinator.put(other)
    for row in (job, other):
        await coordinator.deps.store.write(partial(fund_job, job=row, now=1.0))
    assert await standing(coordinator, f"funds/{job.id}") == 100
    await coordinator.put(replace(job, state=state, reason="no learner starts"))
    await coordinator.restart()
    for _ in range(2):
        await look(coordinator)
    assert await standing(coordinator, f"funds/{job.id}") == await standing(coordinator, f"outside/{job.id}") == 0
    assert await standing(coordinator, "funds/j-live") == 100
    assert len(await coordinator.rows(LedgerEntry, job_id=job.id)) == 2
    await the_books_hold(coordinator)


async def test_what_a_job_has_left_that_is_cancelled_in_a_pause_goes_back(coordinator: Any, stranger: Any, job: Job) -> None:
    """Its quotes were closed before: 16 uUSD of 100 are earned."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    await worker.submit(await worker.lease())
    await coordinator.put(replace(quote, ended_at=coordinator.clock.now(), ended_because="the job is paused"))
    for _ in range(2):
        await look(coordinator)
    assert (await coordinator.get(Meter, quote.id)).closed_at is not None
    assert await standing(coordinator, f"funds/{job.id}") == 84
    await coordinator.put(replace(await coordinator.get(Job, job.id), state=JobState.CANCELLED, reason="by its owner"))
    await look(coordinator)
    assert await standing(coordinator, f"funds/{job.id}") == 0
    assert await standing(coordinator, f"outside/{job.id}") == -16
    await the_books_hold(coordinator)


async def test_one_quote_that_cannot_be_settled_does_not_keep_the_others_waiting(
    coordinator: Any, stranger: Any, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that was changed beside the product: more is owed than was ever reserved."""
    budget = job.config.budget.model_copy(update={"usd": 1.0})
    await coordinator.put(replace(job, config=job.config.model_copy(update={"budget": budget})))
    one, other = await stranger("one").ready(), await stranger("other").ready()
    quotes = [await quoted(coordinator, worker) for worker in (one, other)]
    leases = [await worker.lease() for worker in (one, other)]
    for worker, lease in zip((one, other), leases, strict=True):
        await worker.submit(lease)
    meter = await coordinator.get(Meter, quotes[0].id)
    await coordinator.put(replace(meter, tokens_before=10_000))
    await look(coordinator)
    assert [await standing(coordinator, f"earned/{quote.id}") for quote in quotes] == [0, 16]
    assert "quote_not_settled" in capsys.readouterr().out


async def test_without_a_rate_time_with_a_lease_is_paid_and_the_account_proves_it(coordinator: Any, stranger: Any) -> None:
    """3.6 USD an hour is 1 uUSD a millisecond."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, uusd_per_million_tokens=None, uusd_per_idle_hour=3_600_000)
    await worker.lease()
    began = (await coordinator.get(Meter, quote.id)).looked_at
    await look(coordinator, after_s=20.0)
    meter = await coordinator.get(Meter, quote.id)
    worked_ms = int(meter.looked_at * 1000) - int(began * 1000)
    assert worked_ms - 100 <= meter.paid_ms <= worked_ms, "but for the moment between reserving and leasing"
    account = (await worker.call("account", b"{}")).read(Account)
    (line,) = account.quotes
    assert meter.paid_ms - 1 <= line.owed_uusd <= meter.paid_ms
    assert account.earned_uusd == line.posted_uusd == line.owed_uusd
    key = public_hex(coordinator.key)
    assert is_receipt(key, worker.id, line)
    assert not is_receipt(key, worker.id, line.model_copy(update={"posted_uusd": line.posted_uusd + 1}))
    assert not is_receipt(key, "w-other", line)


async def test_a_coordinator_that_stood_still_pays_no_time_that_it_had_not_reserved(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, uusd_per_million_tokens=None, uusd_per_idle_hour=3_600_000)
    await worker.lease()
    await look(coordinator, after_s=3_000.0)
    assert 59_900 <= (await coordinator.get(Meter, quote.id)).paid_ms <= 60_000
    await the_books_hold(coordinator)


async def test_waiting_is_paid_only_while_the_worker_asks(coordinator: Any, stranger: Any) -> None:
    """With a rate, time counts when nothing is leased; who has not asked for 45 s does not wait."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, uusd_per_idle_hour=3_600_000)
    await worker.submit(await worker.lease())
    await look(coordinator, after_s=5.0)
    waited = (await coordinator.get(Meter, quote.id)).paid_ms
    assert 4_800 <= waited <= 5_100
    await look(coordinator, after_s=50.0)
    assert (await coordinator.get(Meter, quote.id)).paid_ms == waited


async def test_leaving_keeps_what_was_earned(coordinator: Any, stranger: Any) -> None:
    """A job without a budget is given what it needs; everything is posted all the same."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    await worker.submit(await worker.lease())
    await look(coordinator)
    account = (await worker.send("leave", Leave(session_epoch=worker.epoch, reason="bedtime"))).read(Account)
    assert account.earned_uusd == 16
    await coordinator.put(replace(quote, ended_at=coordinator.clock.now(), ended_because="it left"))
    await look(coordinator)
    await look(coordinator)
    assert await standing(coordinator, f"outside/{quote.job_id}") == -16
    assert (await coordinator.get(Worker, worker.id)).state == "gone"
    await the_books_hold(coordinator)


BY_TIME = {"uusd_per_million_tokens": None, "uusd_per_idle_hour": 3_600_000}  # 1 uUSD a millisecond


async def followed(coordinator: Any, quote: QuoteRow, **terms: Any) -> QuoteRow:
    """The quote ends now, and another one of the worker's begins."""
    now = coordinator.clock.now()
    after = replace(quote, id=f"{quote.id}+", made_at=now, **terms)
    await coordinator.put(replace(quote, ended_at=now, ended_because="its rate is measured"), after)
    await accounting.look(coordinator.deps)
    return after


async def test_time_of_work_under_way_is_paid_when_a_quote_by_the_token_follows(coordinator: Any, stranger: Any) -> None:
    """A lease of a quote by time: 10 s before the next quote, 10 s after it. Both pay their part, and nothing is paid twice."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, **BY_TIME)
    await worker.lease()
    await look(coordinator, after_s=10.0)
    after = await followed(coordinator, quote, uusd_per_million_tokens=PER_TOKEN)
    await look(coordinator, after_s=50.0)
    paid = [(await coordinator.get(Meter, one.id)).paid_ms for one in (quote, after)]
    assert 9_900 <= paid[0] <= 10_500
    assert 49_500 <= paid[1] <= 50_500
    await the_books_hold(coordinator)


async def test_waiting_is_not_paid_while_work_of_the_quote_before_is_paid_by_the_token(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, uusd_per_idle_hour=3_600_000)
    await worker.lease()
    await look(coordinator, after_s=6.0)
    after = await followed(coordinator, quote)
    coordinator.clock.added += 6.0
    coordinator.deps.presence.asks(worker.id, quote.job_id, 0, at=coordinator.clock.now())
    await look(coordinator, after_s=0.0)
    assert (await coordinator.get(Meter, after.id)).paid_ms == 0
    lease = await coordinator.rows(Lease, worker_id=worker.id)
    await coordinator.put(replace(lease[0], state=LeaseState.EXPIRED, closed_at=coordinator.clock.now()))
    await look(coordinator, after_s=6.0)
    assert 5_900 <= (await coordinator.get(Meter, after.id)).paid_ms <= 6_200


async def test_time_of_work_under_way_is_paid_as_far_as_it_is_reserved_when_nothing_follows(
    coordinator: Any, stranger: Any
) -> None:
    """The job has 100 USD; the last look before the end reserved for 60 s."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, **BY_TIME)
    lease = await worker.lease()
    row = await coordinator.get(Job, quote.job_id)
    budget = row.config.budget.model_copy(update={"usd": 100.0})
    await coordinator.put(replace(row, config=row.config.model_copy(update={"budget": budget})))
    await look(coordinator, after_s=10.0)
    await coordinator.put(replace(quote, ended_at=coordinator.clock.now(), ended_because="another does it for less"))
    await look(coordinator, after_s=20.0)
    assert 29_900 <= (await coordinator.get(Meter, quote.id)).paid_ms <= 30_500
    assert await standing(coordinator, f"reserved/{quote.id}") > 39_000
    await look(coordinator, after_s=200.0)
    assert 69_900 <= (await coordinator.get(Meter, quote.id)).paid_ms <= 70_500
    await worker.submit(lease)
    await look(coordinator)
    assert (await coordinator.get(Meter, quote.id)).closed_at is not None
    assert await standing(coordinator, f"reserved/{quote.id}") == 0
    await the_books_hold(coordinator)


async def test_a_refusal_in_the_last_moment_is_paid_although_a_look_came_before_its_commit(coordinator: Any, stranger: Any) -> None:
    """The rows are written a second after the deadline, by a submission that came in time."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker)
    lease = await worker.lease()
    await look(coordinator)
    row = await coordinator.get(Lease, lease.lease_id)
    ends = {"state": LeaseState.CANCELLED, "reason": "job_paused: test", "closed_at": coordinator.clock.now()}
    await coordinator.put(replace(row, **ends), replace(quote, ended_at=coordinator.clock.now(), ended_because="the job is paused"))
    coordinator.clock.added += row.deadline - coordinator.clock.now() + 0.5
    await look(coordinator, after_s=0.0)
    late = Refusal(
        "r", worker.id, quote.job_id, row.id, row.group_id, 0, "lease_closed", "", "job", True, 8, row.deadline, quote.id
    )
    await coordinator.put(late)
    await look(coordinator)
    assert await standing(coordinator, f"earned/{quote.id}") == 8
    await look(coordinator, after_s=40.0)
    assert (await coordinator.get(Meter, quote.id)).closed_at is not None


async def test_who_asks_so_that_nobody_can_answer_does_not_wait(coordinator: Any, stranger: Any) -> None:
    """Weights that were never confirmed, or older ones than the worker holds: there is work, and it avoids it."""
    worker = await stranger().ready()
    quote = await quoted(coordinator, worker, uusd_per_idle_hour=3_600_000)
    await worker.submit(await worker.lease())
    await look(coordinator, after_s=50.0)
    paid = (await coordinator.get(Meter, quote.id)).paid_ms
    assert "not published" in (await worker.ask(7)).reason
    await look(coordinator, after_s=6.0)
    assert (await coordinator.get(Meter, quote.id)).paid_ms == paid


async def test_a_price_beyond_the_budget_does_not_stop_the_job_for_others(coordinator: Any, stranger: Any, job: Job) -> None:
    """10,000 USD an hour, the highest price that can be asked; the job has 100 uUSD, and nobody else works yet."""
    dear = await stranger("dear").ready()
    quote = await quoted(coordinator, dear, uusd_per_idle_hour=10**10)
    assert "does not suffice" in (await dear.ask()).reason
    assert (await coordinator.get(QuoteRow, quote.id)).ended_because.startswith("budget_used_up")
    assert (await coordinator.get(Job, job.id)).state == JobState.RUNNING
    cheap = await stranger("cheap").ready()
    await quoted(coordinator, cheap)
    await cheap.submit(await cheap.lease())
    await the_books_hold(coordinator)
