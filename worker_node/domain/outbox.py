"""What one step of the machine orders, and what it notes for the owner."""

from __future__ import annotations

from worker_node.domain.instructions import Instruction
from worker_node.domain.report import KEPT_NOTES, Note


class Outbox:
    """Instructions in the order they are to be carried out, and the newest notes."""

    def __init__(self) -> None:
        self.notes: tuple[Note, ...] = ()
        self._orders: list[Instruction] = []

    def order(self, *instructions: Instruction) -> None:
        """Have something done."""
        self._orders += instructions

    def note(self, now: float, code: str, reason: str, blame: str) -> None:
        """Keep something that did not go as it should."""
        self.notes = (*self.notes[1 - KEPT_NOTES :], Note(now, code, reason, blame))

    def take(self) -> list[Instruction]:
        """What was ordered since the last call."""
        orders, self._orders = self._orders, []
        return orders
