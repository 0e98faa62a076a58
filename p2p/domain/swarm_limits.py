"""The numbers of the swarm rule; the defaults are those it was measured with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwarmLimits:
    """Seconds, bytes and counts.

    The first group shapes the exchange between honest peers, the second ends what makes no progress, the third bounds what a
    peer can cost.
    """

    uploads: int = 8  # at once, to fill the uplink; one is the rule
    filled: float = 0.95  # share of the best uplink rate from which on it counts as filled
    pushes: int = 4  # under way to one peer: who takes them slowly does not get all of `uploads`
    window: int = 16  # requests in flight to one peer
    steal_age_s: float = 0.1
    steal_ratio: float = 1.5
    late_s: float = 2.0  # what its holder's figures do not explain by now is late
    tick_s: float = 0.1
    advert_s: float = 0.2  # a changed queue is told after so long
    settle_s: float = 1.0  # how long a returning seeder listens before it pushes

    no_progress_s: float = 30.0  # without any piece: give up
    request_s: float = 8.0  # without progress from one peer that was asked: ask others, and leave it alone for a while
    upload_s: float = 30.0  # for one piece to leave: whoever takes longer does not read
    silent_s: float = 3.0  # without a sign of life: treat as dead
    alive_s: float = 1.0  # a sign of life is given after so long
    stall_s: float = 1.0  # a gap between events from which on this node itself was asleep, and blames nobody

    absent_s: float = 2.0  # how long "I do not hold it" is believed
    ban_first_s: float = 1.0
    ban_most_s: float = 30.0
    forget_s: float = 30.0  # one strike is forgotten after so long without another
    drop_strikes: int = 4
    pieces: int = 1 << 16
    records: int = 1024  # peers whose strikes are remembered
    most_uplink: float = 1.25e9  # no peer is believed to be faster
    least_uplink: float = 1e3  # nor slower, so that its pieces have a finite time
