"""The ledger's rules: right amounts by hand, limits, refusals in words."""

from __future__ import annotations

import pytest

from pricing import ledger
from pricing.ledger import Account, Balance, Balances, Claim, Entry, Kind, Move, Outcome, Refused

CLAIM = Claim("j", "q")


def after(balances: Balances, *outcomes: Outcome) -> dict[str, Balance]:
    books = dict(balances)
    for outcome in outcomes:
        assert isinstance(outcome, Entry), outcome
        change = ledger.posted(books, outcome)
        assert isinstance(change, dict), change
        books |= change
    return books


def with_reserved(uusd: int = 100) -> dict[str, Balance]:
    books = after({}, ledger.fund({}, "j", total=1000, reason="budget"))
    return after(books, ledger.reserve(books, "j", "q", uusd=uusd, reason="slots"))


def refusal(outcome: Outcome) -> str:
    assert isinstance(outcome, Refused)
    return outcome.reason


def test_money_goes_from_outside_to_who_earned_it():
    books = with_reserved()
    books = after(books, ledger.settle(books, CLAIM, owed=30, paid=0, reason="work"))
    books = after(books, ledger.release(books, "j", "q", keep=20, reason="less is needed"))
    assert {account: balance.uusd for account, balance in books.items()} == {
        "outside/j": -1000,
        "funds/j": 950,
        "reserved/q": 20,
        "spent/j": 30,
        "debts/j": -30,
        "earned/q": 30,
    }
    assert books["reserved/q"].number == 3


def test_what_is_posted_already_is_not_posted_again():
    books = with_reserved()
    first = ledger.settle(books, CLAIM, owed=30, paid=0, reason="work")
    assert isinstance(first, Entry)
    again = ledger.settle(books, CLAIM, owed=30, paid=0, reason="work")
    assert isinstance(again, Entry)
    assert again.id == first.id, "from the same balances the same entry: the store refuses it"
    books = after(books, first)
    assert ledger.settle(books, CLAIM, owed=30, paid=30, reason="work") is None
    more = ledger.settle(books, CLAIM, owed=31, paid=30, reason="work")
    assert isinstance(more, Entry)
    assert more.id != first.id
    assert more.moves[-1] == Move("earned/q", 1)


def test_nothing_is_spent_that_was_not_reserved():
    books = with_reserved(10)
    assert "11 uUSD are due for q and 10 are reserved" in refusal(ledger.settle(books, CLAIM, owed=11, paid=0, reason="work"))
    assert "compensating" in refusal(ledger.settle(books, CLAIM, owed=1, paid=2, reason="work"))
    assert "the job has 990 uUSD left" in refusal(ledger.reserve(books, "j", "other", uusd=991, reason="slots"))
    assert "give 0 or more" in refusal(ledger.reserve(books, "j", "other", uusd=-1, reason="slots"))
    assert ledger.reserve(books, "j", "other", uusd=0, reason="slots") is None
    assert ledger.release(books, "j", "q", keep=10, reason="nothing") is None


@pytest.mark.parametrize(
    ("payee", "account"), [(Account.PROVIDER, "provider/q"), (Account.TRAFFIC, "traffic/j"), (Account.EARNED, "earned/q")]
)
def test_providers_and_traffic_accrue_by_the_same_rule(payee: Account, account: str):
    books = with_reserved()
    entry = ledger.settle(books, Claim("j", "q", payee), owed=5, paid=0, reason="an hour")
    assert isinstance(entry, Entry)
    assert entry.kind is (Kind.SETTLE if payee is Account.EARNED else Kind.ACCRUE)
    assert after(books, entry)[account].uusd == 5


def test_a_budget_goes_up_and_down_but_not_below_what_is_used():
    books = with_reserved(400)
    books = after(books, ledger.fund(books, "j", total=1500, reason="raised"))
    assert books["funds/j"].uusd == 1100
    books = after(books, ledger.fund(books, "j", total=100, reason="lowered"))
    assert (books["funds/j"].uusd, books["outside/j"].uusd) == (0, -400)
    assert ledger.fund(books, "j", total=100, reason="lowered") is None
    most = ledger.fund(books, "j", total=10**30, reason="without end")
    assert isinstance(most, Entry)
    assert after(books, most)["outside/j"].uusd == -ledger.MOST_UUSD


def test_an_entry_that_is_none_is_refused():
    def words(*moves: Move) -> str:
        made = ledger.posted({}, Entry("e", Kind.FUND, "j", "j", moves, "by hand"))
        assert isinstance(made, Refused)
        return made.reason

    assert "sum to 1 uUSD" in words(Move("outside/j", -1), Move("funds/j", 2))
    assert "each of its accounts once" in words(Move("funds/j", -1), Move("funds/j", 1))
    assert "each of its accounts once" in words()
    assert "funds/j would stand at -1 uUSD, below 0" in words(Move("funds/j", -1), Move("reserved/q", 1))
    assert "outside/j would stand at 1 uUSD, above 0" in words(Move("outside/j", 1), Move("debts/j", -1))
    most = 2 * ledger.MOST_UUSD
    assert "beyond what the ledger can hold" in words(Move("outside/j", -most), Move("funds/j", most))
    with pytest.raises(ValueError, match="odd"):
        words(Move("odd/j", 1), Move("funds/j", -1))


def test_a_compensation_undoes_an_entry_within_the_limits():
    books = with_reserved()
    entry = ledger.settle(books, CLAIM, owed=30, paid=0, reason="work")
    assert isinstance(entry, Entry)
    books = after(books, entry)
    undo = ledger.compensate(entry, reason="paid by hand")
    books = after(books, undo if isinstance(undo, Entry) else None)
    assert {name: balance.uusd for name, balance in books.items() if balance.uusd} == {
        "outside/j": -1000,
        "funds/j": 900,
        "reserved/q": 100,
    }
    assert isinstance(undo, Entry)
    assert "compensates another" in refusal(ledger.compensate(undo, reason="it was right"))
    assert "without a reason" in refusal(ledger.compensate(entry, reason="  "))


def test_a_payout_is_never_more_than_was_earned():
    """100 earned: 60 and 40 are paid, then nothing more."""
    books: dict[str, Balance] = {}
    first = ledger.payout(books, "w", uusd=60, earned=100, reason="transfer 7")
    books = after(books, first)
    assert "41 uUSD are more than w has to get: 100 are earned, 60 are paid out" in refusal(
        ledger.payout(books, "w", uusd=41, earned=100, reason="")
    )
    second = ledger.payout(books, "w", uusd=40, earned=100, reason="transfer 8")
    books = after(books, second)
    assert isinstance(first, Entry)
    assert isinstance(second, Entry)
    assert first.id != second.id
    assert {account: balance.uusd for account, balance in books.items()} == {"cash/w": -100, "paid/w": 100}
    for uusd in (0, -1):
        assert f"{uusd} uUSD cannot be paid out to w" in refusal(ledger.payout(books, "w", uusd=uusd, earned=200, reason=""))
    undone = after(books, ledger.compensate(second, reason="the transfer bounced"))
    assert ledger.standing(undone, Account.PAID, "w") == 60
