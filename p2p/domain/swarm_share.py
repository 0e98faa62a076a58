"""Several transfers on one uplink: whose next upload goes first.

Two versions can be on their way at once. Halves of both help nobody: each would arrive when the second could have, had they gone one
after the other. So the older goes first, because whoever fetches it is nearer to its end; it makes room once nobody wants it any more.
A transfer that was passed over for `patience_s` gets one upload, so that no peer can hold back a version by asking for old ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contender:
    """A transfer whose policy wants to send. `since`: when it last sent, or first wanted to. Seconds."""

    transfer: str
    version: int
    since: float
    is_skipped: bool = False  # a newer version is out, and nobody that is connected is known to want this one


def next_transfer(contenders: Iterable[Contender], now: float, patience_s: float = 2.0) -> str | None:
    """Whose turn it is; None if nobody wants to send."""

    def urgency(one: Contender) -> tuple[bool, bool, float, int, str]:
        is_overdue = not one.is_skipped and now - one.since >= patience_s
        return one.is_skipped, not is_overdue, one.since if is_overdue else 0.0, one.version, one.transfer

    first = min(contenders, key=urgency, default=None)
    return None if first is None else first.transfer
