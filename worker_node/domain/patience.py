"""How long to wait for peers before pieces are asked of the coordinator."""

from __future__ import annotations


class Patience:
    """Short until the first sign of the transfer, longer once pieces come: a slow link may take its time for a piece."""

    def __init__(self, now: float, *, first_s: float = 3.0, stall_s: float = 15.0) -> None:
        self._deadline = now + first_s
        self._stall_s = stall_s

    @property
    def deadline(self) -> float:
        """When to give up, unless there is progress before."""
        return self._deadline

    def progress(self, now: float) -> None:
        """A piece, or news of one, came."""
        self._deadline = max(self._deadline, now + self._stall_s)
