"""Which transitions of the product's tables were fired, and how often.

A move in the code is counted where the table is read; a row that changes its state without asking is counted when only one event
of the table leads there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, cast

from coordinator.domain import model, states

Fired = tuple[str, str, str]  # table, state, event
TABLES: dict[str, tuple[type[Any], dict[Any, dict[str, Any]]]] = {
    "job": (model.Job, cast(Any, states.JOB)),
    "worker": (model.Worker, cast(Any, states.WORKER)),
    "lease": (model.Lease, cast(Any, states.LEASE)),
    "group": (model.Group, cast(Any, states.GROUP)),
    "rollout": (model.Rollout, cast(Any, states.ROLLOUT)),
    "batch": (model.Batch, cast(Any, states.BATCH)),
    "publication": (model.Publication, cast(Any, states.PUBLICATION)),
}
BY_KIND = {kind: (name, table) for name, (kind, table) in TABLES.items()}
PHASES = (
    ("joining", "joined"),
    ("joining", "stopped"),
    ("joined", "joining"),
    ("joined", "leaving"),
    ("joined", "stopped"),
    ("leaving", "stopped"),
)
# Transitions that no path of the product fires today, and why the table has them all the same.
UNREACHABLE: Mapping[Fired, str] = {
    ("job", "starting", "learner_lost"): "the driver starts a lost learner anew without leaving the state",
    ("job", "running", "learner_lost"): "the driver starts a lost learner anew without leaving the state",
    ("job", "finishing", "learner_lost"): "the driver starts a lost learner anew without leaving the state",
    ("lease", "live", "rolled_back"): "the service ends leases of a lost digest with `died`",
    ("group", "sealed", "unsealed"): "a sealed batch is kept and trained by the next learner",
    ("worker", "active", "version_confirmed"): "a confirmation moves standby workers only",
    ("worker", "draining", "version_confirmed"): "a confirmation moves standby workers only",
    ("worker", "quarantined", "version_confirmed"): "a confirmation from quarantine is refused",
    ("worker", "quarantined", "lost"): "silence in quarantine is not watched: its timer ends it",
}


class _Counting(dict[str, StrEnum]):
    """One state's row of a table that counts what is asked of it."""

    def __init__(self, row: Mapping[str, Any], tally: Counter[Fired], place: tuple[str, str]) -> None:
        super().__init__(row)
        self._tally = tally
        self._place = place

    def __getitem__(self, event: str) -> StrEnum:
        after = super().__getitem__(event)
        self._tally[(*self._place, event)] += 1
        return after


class Coverage:
    """Counts over one run or many."""

    def __init__(self) -> None:
        self.fired: Counter[Fired] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While this is open, moves are counted."""
        plain = {name: dict(table) for name, (_, table) in TABLES.items()}
        try:
            for name, (_, table) in TABLES.items():
                for state, row in plain[name].items():
                    table[state] = _Counting(row, self.fired, (name, state.value))
            yield
        finally:
            for name, (_, table) in TABLES.items():
                table.update(plain[name])

    def row_moved(self, kind: type[Any], before: StrEnum, after: StrEnum) -> bool:
        """A row's state changed; whether its table allows that."""
        name, table = BY_KIND[kind]
        events = [event for event, state in table[before].items() if state is after]
        if len(events) == 1 and kind is model.Group and events[0] in ("closed", "rejected"):
            self.fired[name, before.value, events[0]] += 1
        return bool(events)

    def phase(self, before: str, after: str) -> None:
        """A worker's session went from one phase to another."""
        if before != after:
            self.fired["session", before, f"to {after}"] += 1

    def add(self, other: Coverage) -> None:
        """Take over what another one counted."""
        self.fired.update(other.fired)


def every() -> list[Fired]:
    """All transitions of all tables, in their order."""
    rows = [(name, state.value, event) for name, (_, table) in TABLES.items() for state, row in table.items() for event in row]
    return [*rows, *(("session", before, f"to {after}") for before, after in PHASES)]


def missing(coverage: Coverage) -> list[Fired]:
    """Reachable transitions that never fired."""
    return [one for one in every() if one not in UNREACHABLE and not coverage.fired[one]]


def report(coverage: Coverage) -> str:
    """Every transition with its count, as Markdown."""
    lines = ["| table | state | event | fired |", "|---|---|---|---|"]
    for one in every():
        count = coverage.fired[one]
        said = f"never: {UNREACHABLE[one]}" if one in UNREACHABLE and not count else str(count)
        lines.append(f"| {' | '.join(one)} | {said} |")
    return "\n".join(lines)
