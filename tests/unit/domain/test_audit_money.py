"""The audit of money: rows that the product makes are clean, and each thing that can be wrong is found by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.domain.audit_money import Money, audit_money
from coordinator.domain.model import (
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
)
from coordinator.wire.job import JobConfig
from pricing import ledger
from pricing.ledger import Balance, Claim, Entry

CONFIG = JobConfig.model_validate(
    {
        "name": "toy",
        "model": "toy",
        "environment": {"type": "digit_sort"},
        "algorithm": {"group_size": 2, "groups_per_step": 1},
        "budget": {"steps": 3, "usd": 0.001},
    }
)
JOB = Job("j", "toy", "o", CONFIG, JobState.RUNNING, "", 0.0, 0.0, "/m")
QUOTE = QuoteRow("q", "j", "w", 1, "active", 1_000_000, 0, 0.0, 1e9, "cheap", 50.0, "dear")
METER = Meter("q", "j", "w", 60.0, 60.0, 12, 12, 0, 12, 60.0, 60.0, 0, 0, closed_at=60.0)
LEASES = [
    Lease("l", "j", "g", "w", 1, (0, 1), 0, "d", 3, 99.0, 1, LeaseState.CANCELLED, 1.0, "job_paused: test", 9.0, "q"),
    Lease("old", "j", "g", "w", 1, (0,), 0, "d", 3, 99.0, 1, LeaseState.DONE, 1.0, "", 9.0),
]
ROLLOUTS = [
    Rollout("g", 0, "j", 0, RolloutState.SCORED, "l", "w", length=7, accepted_at=5.0),
    Rollout("g", 1, "j", 0, RolloutState.OPEN),
    Rollout("h", 0, "j", 1, RolloutState.SCORED, "old", "w", length=9, accepted_at=5.0),
]
REFUSALS = [
    Refusal("paid/l/1", "w", "j", "l", "g", 1, "lease_closed", "cancelled", "job", True, 5, 10.0, "q"),
    Refusal("x", "w", "j", "l", "g", 1, "lease_closed", "again", "job", False, 5, 11.0),
    Refusal("y", "w", "j", "l", "g", 0, "policy_rolled_back", "paid as accepted", "coordinator", True, 7, 11.0),
]


def rows(*, undone: bool = False) -> Money:
    """A budget of 1000 uUSD, 100 reserved, 12 settled, the rest released."""
    books: dict[str, Balance] = {}
    entries: list[Entry] = []
    claim = Claim("j", "q")
    steps: list[Any] = [
        lambda: ledger.fund(books, "j", total=1000, reason="budget"),
        lambda: ledger.reserve(books, "j", "q", uusd=100, reason="slots"),
        lambda: ledger.settle(books, claim, owed=12, paid=0, reason="12 tokens"),
        lambda: ledger.release(books, "j", "q", keep=0, reason="dear"),
    ]
    if undone:
        steps.append(lambda: ledger.compensate(entries[2], reason="paid by hand"))
    postings = []
    for step in steps:
        entry = step()
        change = ledger.posted(books, entry)
        assert isinstance(change, dict)
        books.update(change)
        entries.append(entry)
        postings += [
            Posting(m.account, change[m.account].number - 1, entry.id, m.uusd, change[m.account].uusd) for m in entry.moves
        ]
    kept = [LedgerEntry(e.id, n, e.kind, e.job, "w", e.subject, e.reason, 1.0) for n, e in enumerate(entries)]
    accounts = [LedgerAccount(a, a.partition("/")[0], "j", "w", b.number, b.uusd) for a, b in books.items()]
    return Money(JOB, [QUOTE], [METER], kept, postings, accounts, {"w": 12})


def findings(money: Money, **changes: Any) -> str:
    given = {"rollouts": ROLLOUTS, "leases": LEASES, "refusals": REFUSALS} | changes
    return "\n".join(audit_money(money, given["rollouts"], given["leases"], given["refusals"]))


def account(money: Money, id_: str, **changes: Any) -> Money:
    return replace(money, accounts=[replace(a, **changes) if a.id == id_ else a for a in money.accounts])


def posting(money: Money, id_: str, place: int, **changes: Any) -> Money:
    hit = [replace(p, **changes) if (p.account, p.number) == (id_, place) else p for p in money.postings]
    return replace(money, postings=hit)


def paid_out(uusd: int) -> Money:
    """With a payout to w."""
    money = rows()
    postings = [Posting("cash/w", 0, "payout/paid/w/0", -uusd, -uusd), Posting("paid/w", 0, "payout/paid/w/0", uusd, uusd)]
    accounts = [LedgerAccount("cash/w", "cash", "", "w", 1, -uusd), LedgerAccount("paid/w", "paid", "", "w", 1, uusd)]
    return replace(
        money,
        entries=[*money.entries, LedgerEntry("payout/paid/w/0", 9, "payout", "", "w", "w", "by bank", 2.0)],
        postings=[*money.postings, *postings],
        accounts=[*money.accounts, *accounts],
    )


def test_a_worker_is_paid_out_no_more_than_it_earned_in_all_jobs():
    assert findings(paid_out(12)) == ""
    assert findings(paid_out(13)) == "13 uUSD are paid out to worker w, 12 are earned in all jobs"
    assert findings(replace(paid_out(13), earned={"w": 20})) == "", "8 in another job"
    assert "13 uUSD are paid out to worker w, 0 are earned" in findings(replace(paid_out(13), earned={"v": 20}))


def test_what_the_product_writes_is_clean():
    assert findings(rows()) == ""
    assert findings(replace(rows(), meters=[replace(METER, tokens=9, posted_uusd=12, closed_at=None)])) != ""
    open_ = replace(
        rows(), job=replace(JOB, config=CONFIG.model_copy(update={"budget": CONFIG.budget.model_copy(update={"usd": None})}))
    )
    assert findings(open_) == "", "without a budget nothing can be passed"


def test_a_compensated_entry_is_counted_on_both_sides():
    """The money is back in the reservation: it is told until it is released, and nothing else."""
    assert findings(rows(undone=True)) == "quote q is closed and 12 uUSD stay reserved for it"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (posting(rows(), "earned/q", 0, uusd=13), "the postings of entry settle/reserved/q/1 sum to 1 uUSD"),
        (posting(rows(), "earned/q", 0, balance_uusd=13), "posting 0 of account earned/q says 13 uUSD, its postings make 12"),
        (posting(rows(), "funds/j", 1, number=7), "posting 7 of account funds/j says 900 uUSD"),
        (
            posting(rows(), "spent/j", 0, uusd=-12),
            "account spent/j stood at -12 uUSD after entry settle/reserved/q/1, beyond its limit",
        ),
        (posting(rows(), "debts/j", 0, uusd=12), "account debts/j stood at 12 uUSD"),
        (
            account(rows(), "spent/j", uusd=11),
            "account spent/j is said to stand at 11 uUSD after 1 postings, its 1 postings make 12",
        ),
        (account(rows(), "spent/j", uusd=11), "11 uUSD are spent, 12 are earned, and the debts are -12"),
        (account(rows(), "spent/j", uusd=1001), "1001 uUSD are spent and 0 reserved, budget.usd is 0.001"),
        (account(rows(), "spent/j", number=2), "after 2 postings"),
        (account(rows(), "earned/q", uusd=11), "11 uUSD are posted for quote q, its meter says 12"),
        (account(rows(), "reserved/q", uusd=3), "quote q is closed and 3 uUSD stay reserved for it"),
        (replace(rows(), accounts=rows().accounts[1:]), "account outside/j has no row, its 1 postings make -1000"),
        (
            replace(rows(), entries=[*rows().entries, LedgerEntry("lost", 9, "fund", "j", "", "j", "", 1.0)]),
            "entry lost has no postings",
        ),
        (replace(rows(), quotes=[]), "the meter of quote q has no quote"),
        (replace(rows(), meters=[replace(METER, tokens=11)]), "12 uUSD are posted for quote q, 11 are owed"),
        (
            replace(rows(), meters=[replace(METER, tokens=13)]),
            "13 tokens are owed for under quote q, its rollouts and paid refusals have 12",
        ),
        (replace(rows(), meters=[]), "work was leased under quote q, which nothing measures"),
    ],
)
def test_what_is_wrong_is_named(broken: Money, words: str):
    assert words in findings(broken)


def test_a_rollout_that_was_not_paid_or_paid_twice_is_found():
    assert "12 tokens are owed for under quote q, its rollouts and paid refusals have 5" in findings(rows(), rollouts=ROLLOUTS[1:])
    more = [*ROLLOUTS, Rollout("g", 2, "j", 0, RolloutState.SCORED, "l", "w", length=3, accepted_at=5.0)]
    assert "12 tokens are owed for under quote q, its rollouts and paid refusals have 15" in findings(rows(), rollouts=more)
    lasting = replace(rows(), meters=[replace(METER, closed_at=None)])
    assert findings(lasting, rollouts=more) == "", "while the quote lasts, the next look finds them"
