"""Law 7 on the ledger's rows: double entry, append-only, reserved before it is spent, and exactly what the work was worth."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from coordinator.domain.model import Job, Lease, LedgerAccount, LedgerEntry, Meter, Posting, QuoteRow, Refusal, Rollout, Turn
from pricing.money import usd_to_uusd
from simulator.faults.store import Change

if TYPE_CHECKING:
    from simulator.faults.world import World

MILLION = 1_000_000
HOUR_S = 3600.0
PATIENCE_S = 120.0  # from the last quote's end, for what is left to go back
NEGATIVE = ("outside", "debts")
MONEY = (LedgerEntry, Posting, LedgerAccount)


class Money:
    """Sums kept beside the ledger, from the postings alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables
        self._moves: dict[str, tuple[int, int]] = {}  # account -> moves so far, their sum
        self._closed_at: float | None = None
        budget = world.plan.budget_usd
        self._budget = 0 if budget is None else usd_to_uusd(budget)  # the most that was ever allowed

    def check(self, changes: list[Change]) -> None:
        """After a commit."""
        entries: Counter[str] = Counter()
        for kind, before, after in changes:
            if kind in MONEY:
                self._row(kind, before, after, entries)
            elif kind is Job and after is not None and after.config.budget.usd is not None:
                self._budget = max(self._budget, usd_to_uusd(after.config.budget.usd))
        for entry_id, total in entries.items():
            if total:
                self._broke(f"the postings of entry {entry_id} sum to {total} uUSD")
        if entries:
            self._limits()
        kinds = {change.kind for change in changes}
        if Rollout in kinds or Refusal in kinds or Meter in kinds or entries:
            self._covered()

    def _row(self, kind: type[Any], before: Any, after: Any, entries: Counter[str]) -> None:
        if kind is LedgerAccount:
            return
        if before is not None:
            self._broke(f"{kind.__name__} {before} was changed to {after}")
        elif kind is Posting:
            number, balance = self._moves.get(after.account, (0, 0))
            if after.number != number or after.balance_uusd != balance + after.uusd:
                self._broke(f"{after} follows {number} moves of {balance} uUSD in all")
            self._moves[after.account] = (number + 1, balance + after.uusd)
            entries[after.entry_id] += after.uusd

    def _limits(self) -> None:
        """No balance beyond its limit, and no job beyond its budget."""
        for account, (number, balance) in self._moves.items():
            kind = account.partition("/")[0]
            if (balance > 0) if kind in NEGATIVE else (balance < 0):
                self._broke(f"account {account} stands at {balance} uUSD")
            row = self._tables[LedgerAccount].get(account)
            if row is None or (row.number, row.uusd) != (number, balance):
                self._broke(f"account {account} says {row}, its postings give {number} moves and {balance} uUSD")
        if self._world.job.config.budget.usd is not None:
            used = sum(balance for account, (_, balance) in self._moves.items() if account.startswith(("spent/", "reserved/")))
            given = -sum(balance for account, (_, balance) in self._moves.items() if account.startswith("outside/"))
            if given > self._budget:
                self._broke(f"the job was given {given} uUSD, its budget is {self._budget}")
            if used > self._budget:
                self._broke(f"{used} uUSD are spent or reserved, the budget is {self._budget}")

    def _covered(self) -> None:
        """Work is worth no more than what is posted or reserved for it; and what is posted, no more than the work."""
        tokens = self._tokens()
        for quote in self._tables[QuoteRow].values():
            earned, reserved = (self._moves.get(f"{kind}/{quote.id}", (0, 0))[1] for kind in ("earned", "reserved"))
            worth = tokens[quote.id] * (quote.uusd_per_million_tokens or 0) // MILLION
            if worth > earned + reserved:
                self._broke(f"quote {quote.id}: work for {worth} uUSD is accepted, {earned} are posted and {reserved} reserved")
            meter = self._tables[Meter].get(quote.id)  # a lost worker's quote ends in hindsight; what was posted by then stays
            until = (
                self._world.host.clock.now() if quote.ended_at is None else max(quote.ended_at, meter.looked_at if meter else 0.0)
            )
            time = int(max(until - quote.made_at + self._world.host.clock.most_back_s, 0.0) / HOUR_S * quote.uusd_per_idle_hour) + 1
            if earned > worth + time:
                self._broke(f"quote {quote.id}: {earned} uUSD are posted for work of {worth} uUSD and at most {time} of time")

    def _tokens(self) -> Counter[str]:
        """Tokens that are owed for, by quote: accepted, or refused and paid."""
        tokens: Counter[str] = Counter()
        for row in self._tables[Rollout].values():
            if row.accepted_at is not None:
                lease: Lease = self._tables[Lease][row.lease_id]
                tokens[lease.quote_id or ""] += row.length
        for turn in self._tables[Turn].values():
            tokens[self._tables[Lease][turn.lease_id].quote_id or ""] += turn.length
        for refusal in self._tables[Refusal].values():
            if refusal.paid and refusal.quote_id is not None:
                tokens[refusal.quote_id] += refusal.tokens
        return tokens

    def is_settled(self) -> bool:
        """Whether every quote ended, everything owed is posted, and what is left went back, or had the time to."""
        meters = self._tables[Meter].values()
        if any(q.ended_at is None for q in self._tables[QuoteRow].values()) or any(m.closed_at is None for m in meters):
            self._closed_at = None
            return False
        now = self._world.loop.time()
        self._closed_at = now if self._closed_at is None else self._closed_at
        return not self._sums()["funds"] or now > self._closed_at + PATIENCE_S

    def _sums(self) -> Counter[str]:
        """What all accounts of a kind hold."""
        sums = Counter[str]()
        for account, (_, balance) in self._moves.items():
            sums[account.partition("/")[0]] += balance
        return sums

    def at_the_end(self) -> None:
        """Each token was paid once, nothing is left reserved, and what was given is spent: all else went back."""
        tokens = self._tokens()
        for quote in self._tables[QuoteRow].values():
            worth = tokens[quote.id] * (quote.uusd_per_million_tokens or 0) // MILLION
            earned, reserved = (self._moves.get(f"{kind}/{quote.id}", (0, 0))[1] for kind in ("earned", "reserved"))
            if earned < worth or reserved:
                self._broke(f"quote {quote.id} ended with {earned} uUSD of {worth} posted and {reserved} reserved")
        sums = self._sums()
        if sums["funds"] or not sums["earned"] == sums["spent"] == -sums["outside"]:
            self._broke(f"the books do not close: {dict(sums)}")

    def _broke(self, words: str) -> None:
        self._world.broke(f"law 7: {words}")
