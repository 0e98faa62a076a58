"""Laws 1, 2 and 4 for slots that an environment continues: each turn settled once, and a record that is only ever added to.

What an environment places is recomputed here from the record alone, as the simulated environment is a function of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coordinator.domain.model import Group, Rollout, RolloutState, Turn
from coordinator.service.batches import tokens_of
from coordinator.service.ports import Continued, PlayedTurn
from coordinator.wire import messages as wire
from coordinator.wire.frames import decode_frame
from simulator.faults.parts import NEW_TOKENS, SimPlane

if TYPE_CHECKING:
    from simulator.faults.world import World


class Turns:
    """Looks at new turns, at what workers are given to go on with, and at what the learner reads of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables
        self._plane = SimPlane(world.plan)

    def turn(self, before: Turn | None, turn: Turn) -> None:
        """A new turn is what its lease brought, then what the environment says to the whole record."""
        place = f"{turn.group_id} slot {turn.slot} turn {turn.turn}"
        if before is not None:
            self._broke(f"law 2: {place} was changed: {before} became {turn}")
            return
        group: Group = self._tables[Group][turn.group_id]
        row: Rollout = self._tables[Rollout][turn.group_id, turn.slot]
        if row.turn != turn.turn + 1 or row.state not in (RolloutState.OPEN, RolloutState.VOID) or row.accepted_at is not None:
            self._broke(f"law 2: {place} is over and its slot is {row}")
        earlier = self.before(turn)
        if [one.turn for one in earlier] != list(range(turn.turn)):
            self._broke(f"law 2: {place} follows turns {[one.turn for one in earlier]}")
        stored = self._world.host.blobs.get(turn.blob)
        ids = () if stored is None else tuple(tokens_of(decode_frame(stored[0])[1], turn)[0].tolist())
        if turn.token_ids[: turn.length] != ids or not ids:
            self._broke(f"law 4: {place} holds tokens {turn.token_ids[: turn.length]}, its blob holds {ids}")
        placed = turn.token_ids[turn.length :]
        record = [PlayedTurn(one.token_ids[: one.length], one.stop_reason, one.token_ids[one.length :]) for one in earlier]
        said = self._plane.played("train", group.prompt_index, group.prompt_ids, [*record, PlayedTurn(ids, turn.stop_reason)])
        if row.state is RolloutState.VOID and not placed:
            return
        if not isinstance(said, Continued) or said.token_ids != placed:
            self._broke(f"law 2: {place} goes on with {placed}, its environment says {said}")
        if row.preceding != sum(len(one.token_ids) for one in (*earlier, turn)) or row.preceding >= NEW_TOKENS:
            self._broke(f"law 2: {place} is followed by a turn after {row.preceding} tokens")

    def before(self, turn: Turn) -> list[Turn]:
        """The earlier turns of its slot, in order."""
        return self.of(turn.group_id, turn.slot, turn.turn)

    def of(self, group_id: str, slot: int, until: int) -> list[Turn]:
        """The turns of a slot before turn `until`, in order."""
        found = [self._tables[Turn].get((group_id, slot, number)) for number in range(until)]
        return [turn for turn in found if turn is not None]

    def granted(self, lease: wire.Lease) -> None:
        """A worker goes on from exactly the record: nothing is left out, added or encoded again."""
        row: Rollout = self._tables[Rollout][lease.group_id, lease.slots[0]]
        if row.lease_id != lease.lease_id or row.state is not RolloutState.LEASED:
            return  # the reply came late
        record = [token for turn in self.of(lease.group_id, row.slot, row.turn) for token in turn.token_ids]
        if list(lease.prompt_ids) != [*self._tables[Group][lease.group_id].prompt_ids, *record]:
            self._broke(f"law 2: {lease.lease_id} for turn {row.turn} begins with {lease.prompt_ids}, the record is {record}")
        if row.turn and len(lease.slots) > 1:
            self._broke(f"law 2: {lease.lease_id} holds turn {row.turn} of slots {lease.slots}")
        if len(record) + lease.sampling.max_new_tokens > NEW_TOKENS:
            self._broke(
                f"{lease.lease_id} may bring {lease.sampling.max_new_tokens} tokens after {len(record)}, above {NEW_TOKENS}"
            )

    def trained(self, step: int, groups: tuple[int, ...], sampled: NDArray[np.bool_] | None, token_ids: NDArray[np.int32]) -> None:
        """The learner trains on what was sampled, and on nothing that an environment placed."""
        if self._world.plan.turns == 1:
            if sampled is not None:
                self._broke(f"the batch of step {step} says which tokens were sampled, and the job takes one turn")
            return
        mask: list[bool] = []
        ids: list[int] = []
        for number in groups:
            rows = [r for r in self._tables[Rollout].values() if r.group_number == number and r.blob is not None]
            for row in sorted(rows, key=lambda one: one.slot):
                for turn in self.of(row.group_id, row.slot, row.turn):
                    mask += [place < turn.length for place in range(len(turn.token_ids))]
                    ids += turn.token_ids
                mask += [True] * row.length
                ids += tokens_of(decode_frame(self._world.host.blobs[row.blob or ""][0])[1], row)[0].tolist()
        if sampled is None or sampled.tolist() != mask or token_ids.tolist() != ids:
            self._broke(f"law 1: step {step} trains on other tokens than were sampled, or on tokens of the environment")

    def _broke(self, words: str) -> None:
        self._world.broke(words)
