"""Who behaved badly, how badly, and for how long it is remembered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from p2p.domain.swarm_limits import SwarmLimits


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    struck_at: float = 0.0
    banned_until: float = float("-inf")


class Blame:
    """Strikes by peer. A ban doubles with each strike and one strike is forgotten per `forget_s`; the oldest records go first."""

    def __init__(self, limits: SwarmLimits) -> None:
        self._limits = limits
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def strikes(self, peer: str, now: float) -> int:
        """Strikes not forgotten yet."""
        record = self._records.get(peer)
        if record is None:
            return 0
        return max(0, record.strikes - int((now - record.struck_at) / self._limits.forget_s))

    def strike(self, peer: str, weight: int, now: float) -> float:
        """Add strikes; until when the peer is best left alone."""
        limits = self._limits
        strikes = min(self.strikes(peer, now) + weight, 16)
        record = self._record(peer)
        record.strikes, record.struck_at = strikes, now
        return now + min(limits.ban_first_s * 2.0 ** (strikes - 1), limits.ban_most_s, limits.no_progress_s / 4)

    def ban(self, peer: str, until: float) -> None:
        """Take no connection of the peer before `until`."""
        self._record(peer).banned_until = until

    def banned_until(self, peer: str) -> float:
        """When a connection of the peer is taken again; long ago if it was never banned."""
        record = self._records.get(peer)
        return float("-inf") if record is None else record.banned_until

    def _record(self, peer: str) -> _Record:
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > self._limits.records:
            self._records.popitem(last=False)
        return record
