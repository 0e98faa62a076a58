"""The laws, checked at every event on what changed, and in full now and then.

Incremental: grant rule, staleness and step of every batch, each group one legal way through its states, nobody is given work that is
not active with a version, money adds up. In full: every counter again from the rows. A broken law ends the simulation with its words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

from coordinator.domain.seal import Seal
from coordinator.domain.staleness import staleness
from simulator.laws import LawBroken

if TYPE_CHECKING:
    from simulator.fleet.board import Board
    from simulator.fleet.money import Purse
    from simulator.fleet.worker import FleetWorker


class State(IntEnum):
    """Of a group."""

    ISSUED = 1
    READY = 2
    SEALED = 3
    TRAINED = 4
    REJECTED = 5


MOVES = {
    (State.ISSUED, State.READY),
    (State.ISSUED, State.REJECTED),
    (State.READY, State.SEALED),
    (State.READY, State.REJECTED),
    (State.SEALED, State.TRAINED),
}


class Laws:
    """The checks; `checked` counts them."""

    def __init__(self, groups_per_step: int, bound: int) -> None:
        self.checked = 0
        self._per_step, self._bound = groups_per_step, bound
        self._states = bytearray()
        self.by_state: Counter[State] = Counter()
        self._next_step = 0

    def granted(self, step: int, unsettled: int, groups: int, version: int, worker: FleetWorker) -> None:
        """Law 1, at the gate."""
        self.checked += 1
        if step + (unsettled + groups - 1) // self._per_step > version + self._bound:
            raise LawBroken(f"step {step}: {groups} groups beside {unsettled} were granted to version {version}, S = {self._bound}")
        if not (worker.active and worker.known and worker.alive):
            raise LawBroken(f"step {step}: worker {worker.number} was granted work, and is not active and alive")

    def issued(self, number: int) -> None:
        """Law 2: numbers rise by one."""
        self.checked += 1
        if number != len(self._states):
            raise LawBroken(f"group {number} was issued after {len(self._states) - 1}")
        self._states.append(State.ISSUED)
        self.by_state[State.ISSUED] += 1

    def moved(self, number: int, before: State, after: State) -> None:
        """Law 2: one legal way through the states."""
        self.checked += 1
        if self._states[number] != before or (before, after) not in MOVES:
            raise LawBroken(f"group {number} went from {State(self._states[number]).name} to {after.name}")
        self._states[number] = after
        self.by_state[before] -= 1
        self.by_state[after] += 1

    def sealed(self, batch: Seal, oldest: Mapping[int, int], step: int) -> None:
        """Law 1: the learner's next step, B groups, each within the bound."""
        if step != self._next_step:
            raise LawBroken(f"a batch of step {step} was sealed, the next is {self._next_step}")
        self._next_step += 1
        ages: Counter[int] = Counter()
        for number, version in oldest.items():
            age = staleness(step, version)
            if age > self._bound:
                raise LawBroken(f"group {number} has staleness {age} in step {step}, S = {self._bound}")
            ages[age] += 1
            self.moved(number, State.READY, State.SEALED)
        if sum(ages.values()) != self._per_step or dict(ages) != batch.staleness:
            raise LawBroken(
                f"step {step} has {sum(ages.values())} groups of staleness {dict(ages)}, the seal says {batch.staleness}"
            )

    def nobody_starves(self, board: Board, waiting: Iterable[FleetWorker]) -> None:
        """No worker waits although the rule would grant its version a group."""
        self.checked += 1
        for worker in waiting:
            if board.would_grant(worker.version):
                raise LawBroken(
                    f"step {board.step}: worker {worker.number} waits with version {worker.version} and could be given work"
                )

    def in_full(self, board: Board, workers: Iterable[FleetWorker], purse: Purse, now: float) -> None:
        """Every counter from the rows again."""
        self.checked += 1
        counts, in_flight = board.counts, 0
        for worker in workers:
            in_flight += sum(len(lease.lengths) for lease in worker.leases)
            if worker.leases and not worker.known:
                raise LawBroken(f"worker {worker.number} is gone for the coordinator and has {len(worker.leases)} leases")
        ended = counts.accepted + counts.refused + counts.lost + counts.too_old + counts.never_began
        if counts.leased != ended + in_flight:
            raise LawBroken(f"{counts.leased} completions leased, {ended} ended and {in_flight} in flight at {now:.0f} s")
        settled = self.by_state[State.TRAINED] + self.by_state[State.REJECTED]
        if counts.issued_groups != settled + len(board.unsettled):
            raise LawBroken(f"{counts.issued_groups} groups issued, {settled} settled, {len(board.unsettled)} not, at {now:.0f} s")
        for group in board.open.values():
            leased = sum(len(lease.lengths) for lease in group.leases)
            if group.left != leased + len(group.missing):
                raise LawBroken(f"group {group.number} lacks {group.left}: {leased} leased and {len(group.missing)} missing")
        purse.check(workers, now)
