"""The ledger under any interleaving: budgets, prices, leases, looks that crash or come late. Law 7 holds after every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from coordinator.domain import accounting, paying
from coordinator.domain.accounting import Found, Purse
from coordinator.domain.model import Lease, LeaseState, Meter, QuoteRow
from coordinator.domain.paying import Held, Measured, Work
from pricing import ledger
from pricing.ledger import Account, Balance, Entry, Kind

JOB = "j"
WORK = Work(max_new_tokens=100, group_size=4, max_slots=8)
RATES = st.sampled_from([1_000_001, 3_000_000, 999_999, 7, 0, None])  # of 100 tokens: 100, 300, 99, 0, 0, 0 uUSD
TIGHT = [399, 400, 799, 800, 1_199, 1_200, 3_600]  # whole groups of 4 x 100 tokens, and 1 uUSD less


@dataclass
class Truth:
    """What really happened under one quote, kept apart from the code under test."""

    tokens: int = 0
    leases: list[Lease] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # slots of each lease that may still come
    seen_s: Fraction = Fraction(0)  # between looks, as far as it was reserved: what may be paid by time
    open_s: Fraction = Fraction(0)  # of that, until the quote ended
    looks: int = 0

    @property
    def open_slots(self) -> int:
        return sum(self.left)

    def lease(self, name: str, slots: int, *, now: float) -> None:
        made = Lease(f"{name}/{len(self.leases)}", JOB, "g", worker(name), 1, (0,), 0, "d", 3, 1e9, 1, LeaseState.LIVE, now)
        self.leases.append(replace(made, quote_id=name))
        self.left.append(slots)

    def settle(self, slots: int, *, now: float) -> None:
        """So many fewer may still come, of the oldest leases first; a lease ends with its last one."""
        for place, left in enumerate(self.left):
            gone = min(left, slots)
            self.left[place], slots = left - gone, slots - gone
            if gone == left > 0:
                self.leases[place] = replace(self.leases[place], state=LeaseState.DONE, closed_at=now)


def worker(quote: str) -> str:
    """Quotes `q1`, `q1+`, `q1++` follow each other."""
    return "w" + quote.rstrip("+")


@dataclass
class Store:
    """What a crash leaves: rows."""

    balances: dict[str, Balance] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    quotes: dict[str, QuoteRow] = field(default_factory=dict)
    meters: dict[str, Meter] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        assert entry.id not in self.entries, "an entry that exists is never posted again"
        after = ledger.posted(self.balances, entry)
        assert isinstance(after, dict), after
        self.balances.update(after)
        self.entries[entry.id] = entry

    def standing(self, kind: Account, owner: str) -> int:
        return ledger.standing(self.balances, kind, owner)


class Money(RuleBasedStateMachine):
    quotes = Bundle("quotes")

    @initialize(budget=st.one_of(st.sampled_from(TIGHT), st.integers(0, 12_000), st.integers(50_000, 400_000), st.none()))
    def begin(self, budget: int | None) -> None:
        self.store, self.truth = Store(), dict[str, Truth]()
        self.now = 1_000.0
        self.budget = budget
        self.fund()

    def fund(self) -> None:
        total = 0 if self.budget is None else self.budget
        made = ledger.fund(self.store.balances, JOB, total=total, reason="budget")
        if isinstance(made, Entry):
            self.store.add(made)

    @rule(target=quotes, rate=RATES, idle=st.sampled_from([0, 1, 360_000, 3_600_001]))
    def open_quote(self, rate: int | None, idle: int) -> str:
        """A price change is an ended quote and a new one."""
        name = f"q{len(self.store.quotes)}"
        return self.opened(name, rate, idle)

    def opened(self, name: str, rate: int | None, idle: int) -> str:
        self.store.quotes[name] = QuoteRow(name, JOB, worker(name), 1, "active", rate, idle, self.now, self.now + 1e6, "cheap")
        self.truth[name] = Truth()
        return name

    @rule(
        target=quotes, name=quotes, rate=RATES, idle=st.sampled_from([1, 360_000, 3_600_001]), seconds=st.sampled_from([0.0, 7.0])
    )
    def follow(self, name: str, rate: int | None, idle: int, seconds: float) -> str:
        """The worker is quoted anew, at once or later, with work of the quote before under way."""
        while f"{name}+" in self.store.quotes:
            name += "+"
        self.end_quote(name)
        self.now += seconds
        self.opened(f"{name}+", rate, idle)
        self.look(f"{name}+", lands=True, between=0, later=0.0, ends=False)
        self.lease(f"{name}+", WORK.group_size)
        return f"{name}+"

    @rule(name=quotes)
    def end_quote(self, name: str) -> None:
        quote = self.store.quotes[name]
        if quote.ended_at is None:
            self.store.quotes[name] = replace(quote, ended_at=self.now, ended_because="dear")

    @rule(name=quotes, slots=st.sampled_from([1, 4, 8, 16, 200]))
    def lease(self, name: str, slots: int) -> None:
        """The gate that `service.leasing` asks."""
        quote, meter = self.store.quotes[name], self.store.meters.get(name)
        if meter is not None and meter.leasable is not None:
            slots = min(slots, max(meter.leasable, 1))
        if quote.ended_at is None and meter is not None and not paying.can_lease(meter, slots=slots, now=self.now):
            self.store.meters[name] = paying.leased(meter, slots)
            self.truth[name].lease(name, slots, now=self.now)

    @rule(
        name=quotes,
        slots=st.sampled_from([1, 4, 8, 16, 200]),
        tokens=st.lists(st.integers(50, WORK.max_new_tokens), min_size=1, max_size=8),
    )
    def work(self, name: str, slots: int, tokens: list[int]) -> None:
        """A round as it goes nearly always."""
        self.look(name, lands=True, between=0, later=0.0, ends=False)
        self.lease(name, slots)
        self.accept(name, tokens)
        self.now += 11.0

    @rule(name=quotes, tokens=st.lists(st.integers(1, WORK.max_new_tokens), max_size=4))
    def finish(self, name: str, tokens: list[int]) -> None:
        """The quote ends while work is under way; it comes late, is paid, and only then the quote is closed."""
        self.end_quote(name)
        for _ in range(2):
            self.now += 0.5
            self.look(name, lands=True, between=0, later=0.0, ends=False)
            self.accept(name, tokens)

    @rule(name=quotes, tokens=st.lists(st.integers(1, WORK.max_new_tokens), max_size=8))
    def accept(self, name: str, tokens: list[int]) -> None:
        truth = self.truth[name]
        for length in tokens[: truth.open_slots]:
            truth.tokens += length
            truth.settle(1, now=self.now)

    @rule(name=quotes, slots=st.integers(0, 8))
    def lose(self, name: str, slots: int) -> None:
        """Leases that ended by the worker's fault, or whose wall deadline passed: nothing is owed for them."""
        self.truth[name].settle(slots, now=self.now)

    @rule(
        name=quotes,
        seconds=st.sampled_from([0.0006, 0.0037, 0.1119, 12.0]),
        later=st.sampled_from([0.0, 0.2]),
        times=st.integers(1, 9),
    )
    def look_often(self, name: str, seconds: float, later: float, times: int) -> None:
        """Parts of a millisecond add up; and what a budget covers runs dry."""
        for _ in range(times):
            self.now += seconds
            self.look(name, lands=True, between=0, later=later, ends=False)

    @rule(seconds=st.sampled_from([0.001, 12.0, 59.9, 61.0, 4_000.0]))
    def wait(self, seconds: float) -> None:
        """All of the time that is covered is paid: nothing costs more."""
        self.now += seconds

    @rule(budget=st.integers(0, 6_000))
    def change_budget(self, budget: int) -> None:
        """A PATCH; one below what is spent and reserved is refused before it comes here."""
        reserved = sum(self.store.standing(Account.RESERVED, name) for name in self.store.quotes)
        if self.budget is not None and budget >= self.store.standing(Account.SPENT, JOB) + reserved:
            self.budget = budget
            self.fund()

    def found(self, name: str) -> Found:
        """As `service.accounting` measures it from rows."""
        quote, meter, truth = self.store.quotes[name], self.store.meters.get(name), self.truth[name]
        if meter is None:
            return Found(name, "w", self.now, None, None, self.now, 0, Measured(0, 0, 0), WORK)
        paid_ms = meter.paid_ms + paying.new_ms(quote, meter, self.held(name), now=self.now, waits=True)
        seen = Measured(truth.tokens, paid_ms, truth.open_slots)
        return Found(name, "w", self.now, meter.looked_at, meter.leasable, self.now, 0, seen, WORK)

    def held(self, name: str) -> Held:
        own = [other for other in self.store.quotes if worker(other) == worker(name)]
        made_at = self.store.quotes[name].made_at
        return Held(
            tuple(lease for other in own for lease in self.truth[other].leases),
            frozenset(other for other in own if self.store.quotes[other].uusd_per_million_tokens is not None),
            min((self.store.quotes[x].made_at for x in own if x != name and self.store.quotes[x].made_at >= made_at), default=1e18),
        )

    @rule(
        name=quotes,
        lands=st.sampled_from([True, True, False]),
        between=st.integers(0, 8),
        later=st.sampled_from([0.0, 0.2, 20.0]),
        ends=st.booleans(),
        twice=st.sampled_from([False, False, True]),
    )
    def look(self, name: str, lands: bool, between: int, later: float, ends: bool, twice: bool = False) -> None:
        """Measured, then posted a little later; slots may be leased between the two, or the process dies before the commit."""
        one = self.found(name)
        if between:
            self.lease(name, between)
        self.now += later
        if ends:
            self.end_quote(name)
        if twice:  # somebody else looked meanwhile
            self.look(name, lands=True, between=0, later=0.0, ends=False)
            self.lease(name, between)
        quote, meter = self.store.quotes[name], self.store.meters.get(name)
        if not accounting.is_current(one, meter) or not lands:
            return
        looked = accounting.look(Purse(JOB, self.budget), quote, meter, one, self.store.balances)
        for entry in looked.entries:
            self.store.add(entry)
        self.store.meters[name] = looked.meter
        if meter is not None:
            ended_at = one.at if quote.ended_at is None else quote.ended_at
            truth, until = self.truth[name], min(one.at, meter.covered_until)
            truth.open_s += max(Fraction(min(until, ended_at)) - Fraction(meter.looked_at), Fraction(0))
            truth.seen_s += max(Fraction(until) - Fraction(meter.looked_at), Fraction(0))
            truth.looks += meter.covered_until < one.at  # a gap: what comes after it is cut anew
        if looked.ended_because:
            assert self.budget is not None, "a job without a budget never lacks money"
            self.store.quotes[name] = replace(quote, ended_at=self.now, ended_because=looked.ended_because)
        if self.budget is None:
            self.fund()

    @rule(name=quotes, between=st.sampled_from([4, 16, 200]), later=st.sampled_from([0.0, 0.2]), ends=st.booleans())
    def race(self, name: str, between: int, later: float, ends: bool) -> None:
        """All that may be leased is leased between measuring and posting, and again after it."""
        self.look(name, lands=True, between=0, later=0.0, ends=False)
        self.now += 11.0
        self.look(name, lands=True, between=between, later=later, ends=ends)
        self.lease(name, 200)

    @rule(data=st.data())
    def compensate(self, data: st.DataObject) -> None:
        """A repair is an entry; where its money is needed elsewhere by now, it is refused."""
        releases = [entry for entry in self.store.entries.values() if entry.kind is Kind.FUND]
        if releases and self.budget is None:
            entry = data.draw(st.sampled_from(releases))
            undo = ledger.compensate(entry, reason="posted twice by hand")
            if isinstance(undo, Entry) and undo.id not in self.store.entries:
                after = ledger.posted(self.store.balances, undo)
                if isinstance(after, dict):
                    self.store.add(undo)

    @invariant()
    def the_books_balance(self) -> None:
        assert sum(balance.uusd for balance in self.store.balances.values()) == 0
        for account, balance in self.store.balances.items():
            below = account.startswith(("outside", "debts"))
            assert balance.uusd <= 0 if below else balance.uusd >= 0, (account, balance)
        moves = [move for entry in self.store.entries.values() for move in entry.moves]
        for account, balance in self.store.balances.items():
            own = [move.uusd for move in moves if move.account == account]
            assert (len(own), sum(own)) == (balance.number, balance.uusd)

    @invariant()
    def no_budget_is_passed(self) -> None:
        spent = self.store.standing(Account.SPENT, JOB)
        assert (
            spent
            == -self.store.standing(Account.DEBTS, JOB)
            == sum(self.store.standing(Account.EARNED, q) for q in self.store.quotes)
        )
        if self.budget is not None:
            reserved = sum(self.store.standing(Account.RESERVED, name) for name in self.store.quotes)
            assert spent + reserved <= self.budget

    @invariant()
    def what_is_owed_is_reserved(self) -> None:
        """Even if every slot under way came at its longest, now."""
        for name, truth in self.truth.items():
            meter = self.store.meters.get(name)
            if meter is None:
                assert not truth.tokens
                continue
            cover = meter.posted_uusd + self.store.standing(Account.RESERVED, name)
            most = truth.tokens + truth.open_slots * WORK.max_new_tokens
            if self.budget is not None:
                assert paying.owed_uusd(self.store.quotes[name], tokens=most, paid_ms=self.found(name).seen.paid_ms) <= cover

    @invariant()
    def what_is_earned_is_the_floor_of_what_is_owed(self) -> None:
        """Once a quote is closed: exact arithmetic in whole micro-dollars, no more than two roundings below the true amount."""
        for name, meter in self.store.meters.items():
            earned = self.store.standing(Account.EARNED, name)
            assert earned == meter.posted_uusd
            if meter.closed_at is not None:
                quote, truth = self.store.quotes[name], self.truth[name]
                by_tokens = truth.tokens * (quote.uusd_per_million_tokens or 0) // 1_000_000
                by_time = quote.uusd_per_idle_hour * meter.paid_ms // 3_600_000
                assert by_tokens + by_time - 1 <= earned <= by_tokens + by_time
                assert self.store.standing(Account.RESERVED, name) == 0

    @invariant()
    def time_is_paid_whole_and_once(self) -> None:
        """No more than was reserved, all of it while a worker that waits has no work, and no moment by two of its quotes.

        A millisecond is lost or won at each end of what was looked at without a gap.
        """
        for name, truth in self.truth.items():
            meter, quote = self.store.meters.get(name), self.store.quotes[name]
            if meter is None:
                continue
            most, least = float(truth.seen_s) * 1000, float(truth.open_s) * 1000
            assert meter.paid_ms < most + truth.looks + 1
            alone = not truth.leases and not name.endswith("+") and f"{name}+" not in self.truth
            if meter.closed_at is not None:
                assert quote.ended_at is not None
                assert meter.closed_at >= quote.ended_at, "no time is left out"
            if alone:
                assert least - truth.looks - 1 < meter.paid_ms < least + truth.looks + 1
        for first in [name for name in self.truth if not name.endswith("+")]:
            names = [name for name in self.truth if worker(name) == worker(first)]
            paid = sum(self.store.meters[name].paid_ms for name in names if name in self.store.meters)
            rated = [name for name in names if self.store.quotes[name].uusd_per_million_tokens is not None]
            spans = sorted(
                (one.issued_at, self.now if one.closed_at is None else one.closed_at)
                for name in rated
                for one in self.truth[name].leases
            )
            busy, reached = 0.0, 0.0
            for begin, end in spans:
                busy += max(end - max(begin, reached), 0.0)
                reached = max(reached, end)
            looked = max((m.looked_at for m in (self.store.meters.get(n) for n in names) if m is not None), default=self.now)
            if looked >= self.now:
                ends = sum(self.truth[name].looks + 1 for name in names) + 2 * len(spans)
                assert paid + 1000 * busy <= 1000 * (self.now - self.store.quotes[first].made_at) + ends, (
                    paid,
                    busy,
                    self.now,
                    ends,
                    names,
                    spans,
                )


TestMoney = Money.TestCase
TestMoney.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
