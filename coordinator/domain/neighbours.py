"""Who exchanges pieces with whom: a few neighbours for each worker, fast and slow ones mixed.

The choice is by rendezvous hash of the pair, so it is the same whoever asks, needs no memory, and a worker that comes or goes changes only
the neighbourhoods that it is in. Small swarms are fully connected. Workers dial those that they are given here and are dialled
by those that were given them, so half of the wanted number is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

NEIGHBOURS = 16  # more lock up pieces in queues, fewer leave peers stuck among slow ones


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker of a job. `uplink` is its last measured upload rate, bytes a second, 0 when not known."""

    worker_id: str
    uplink: float
    is_reachable: bool  # it listens


def neighbours(me: str, members: Sequence[Member], *, most: int = NEIGHBOURS) -> list[Member]:
    """The members that `me` should dial, fastest first: all that listen in a small swarm, else `most`/2 of them.

    Half of those are drawn from all, half from the faster half, so that nobody sits among slow ones only.
    """
    others = sorted((one for one in members if one.worker_id != me and one.is_reachable), key=_fastest_first)
    if len(others) <= most:
        return others
    some = _closest(me, others, most // 4)
    fast = _closest(me, [one for one in others[: len(others) // 2] if one not in some], most // 2 - len(some))
    return sorted((*some, *fast), key=_fastest_first)


def takes_from_seeder(me: str, members: Sequence[Member], *, most: int = NEIGHBOURS) -> bool:
    """Whether `me` is one of the `most` that the seeder feeds: in a large swarm the fastest of a fixed draw of 4·`most`."""
    if len(members) <= most:
        return True
    drawn = _closest("seeder", members, 4 * most)
    return me in {one.worker_id for one in sorted(drawn, key=_fastest_first)[:most]}


def _fastest_first(member: Member) -> tuple[float, str]:
    return -member.uplink, member.worker_id


def _closest(me: str, members: Sequence[Member], count: int) -> list[Member]:
    """The `count` members with the lowest hash of the pair."""
    return sorted(members, key=lambda one: _pair_hash(me, one.worker_id))[:count]


def _pair_hash(one: str, other: str) -> bytes:
    low, high = sorted((one, other))
    return blake2b(f"{low}\n{high}".encode(), digest_size=8).digest()
