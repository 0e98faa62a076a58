"""How long to wait for peers before pieces are asked of the coordinator."""

from __future__ import annotations

ASKED_S = 1.0  # the coordinator is still asked for peers
DIALLED_S = 2.0  # connections are still being made
SIGN_S = 3.0  # a connection is there; nothing of the transfer came yet
STALL_S = 15.0  # pieces came: a slow link may take its time for the next one


def first_wait_s(*, links: int, dialled: int, met_s_ago: float | None) -> float:
    """Seconds for the first sign of a transfer. `links` are open; `dialled` peers were named `met_s_ago`, None: nobody yet."""
    if links:
        return SIGN_S
    if met_s_ago is None:
        return ASKED_S
    return max(0.0, DIALLED_S - met_s_ago) if dialled else 0.0


class Patience:
    """Ends `first_s` from now, unless a connection or a sign of the transfer prolongs it."""

    def __init__(self, now: float, first_s: float) -> None:
        self._deadline = now + first_s
        self._was_opened = False

    @property
    def deadline(self) -> float:
        """When to give up, unless there is progress before."""
        return self._deadline

    def opened(self, now: float) -> None:
        """A connection to a peer is up. Only the first one counts: peers that come and go all the time bring nothing."""
        if not self._was_opened:
            self._was_opened = True
            self._deadline = max(self._deadline, now + SIGN_S)

    def progress(self, now: float) -> None:
        """A piece, or news of one, came."""
        self._deadline = max(self._deadline, now + STALL_S)
