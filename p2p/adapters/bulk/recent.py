"""Pieces in memory: those that are being written, and those used last, so that what just came is passed on without a disk.

Guarded by the hub's lock. Memory is used again: new memory costs more than all that is done with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST_BYTES = 16 << 20
MOST_UNWRITTEN = 8 << 20
SPARE = 4


@dataclass(slots=True)
class Held:
    """A verified piece. `users`: uploads that read it now."""

    data: bytearray
    is_written: bool
    users: int = 0


class Recent:
    """See the module. What is not written yet is kept whatever it takes; whoever adds it bounds that."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._held: OrderedDict[str, Held] = OrderedDict()  # by digest, the latest used last
        self._bytes = 0
        self._unwritten = 0
        self._spare: list[bytearray] = []

    def add(self, digest: str, data: bytearray, *, is_written: bool) -> Held:
        """A piece, verified; what stands for it from now on. One that is here already stays as it is."""
        held = self._held.get(digest)
        if held is not None:
            self.spare(data)
            return held
        held = self._held[digest] = Held(data, is_written)
        self._bytes += len(data)
        self._unwritten += 0 if is_written else len(data)
        self._shrink()
        return held

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that nothing more should come."""
        return self._unwritten > MOST_UNWRITTEN

    def written(self, digest: str) -> None:
        """The piece is on disk: it may go when others need its room."""
        held = self._held.get(digest)
        if held is not None and not held.is_written:
            held.is_written = True
            self._unwritten -= len(held.data)
            self._shrink()

    def drop(self, digest: str) -> None:
        """The piece is not needed in memory any more, or could not be written. One that an upload reads, or that waits, stays."""
        held = self._held.get(digest)
        if held is not None and held.users == 0 and held.is_written:
            del self._held[digest]
            self._bytes -= len(held.data)
            self.spare(held.data)

    def lend(self, digest: str) -> Held | None:
        """The piece for an upload, which gives it back; None if it is not here."""
        held = self._held.get(digest)
        if held is not None:
            held.users += 1
            self._held.move_to_end(digest)
        return held

    def take(self, size: int) -> bytearray:
        """Room for a piece."""
        for place, buffer in enumerate(self._spare):
            if len(buffer) == size:
                return self._spare.pop(place)
        self._spare = self._spare[1:]
        return bytearray(size)

    def spare(self, buffer: bytearray) -> None:
        """A buffer that nobody reads or writes any more."""
        if len(self._spare) < SPARE:
            self._spare.append(buffer)

    def _shrink(self) -> None:
        """Let the piece go that was not used for longest, if there are too many."""
        while self._bytes > self._most:
            digest = next((digest for digest, held in self._held.items() if held.is_written), None)
            if digest is None:
                return
            held = self._held.pop(digest)
            self._bytes -= len(held.data)
            if held.users == 0:
                self.spare(held.data)
