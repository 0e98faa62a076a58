"""Who exchanges pieces with whom: a few neighbours for each worker, fast and slow ones mixed.

The choice is by rendezvous hash of the pair, so it is the same whoever asks, needs no memory, and a worker that comes or goes changes only
the neighbourhoods that it is in. Small swarms are fully connected. Workers dial those that they are given here and are dialled
by those that were given them, so half of the wanted number is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from heapq import nsmallest

from p2p.domain.tickets import SEEDER

NEIGHBOURS = 16  # more lock up pieces in queues, fewer leave peers stuck among slow ones
MOST_UPLINK = 1.25e9  # bytes a second, 10 Gbit/s: workers claim their rates, and no claim above this buys a better place
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker of a job. `uplink` is its last measured upload rate, bytes a second, 0 when not known."""

    worker_id: str
    uplink: float
    is_reachable: bool  # it listens


class Swarm:
    """The neighbourhoods of one set of members. `salt` names the job: another job's draws are others."""

    def __init__(self, members: Sequence[Member], *, salt: str = "", most: int = NEIGHBOURS) -> None:
        self._most = most
        self._salt = salt
        self._draws = {one.worker_id: _draw(salt, one.worker_id) for one in members}
        self._is_small = len(members) <= most
        self._listening = sorted((one for one in members if one.is_reachable), key=self._fastest_first)
        self._faster = self._listening[: len(self._listening) // 2]
        self._fed = self._seeder_feeds(members)

    def neighbours(self, me: str) -> list[Member]:
        """The members that `me` should dial, fastest first: all that listen in a small swarm, else `most`/2 of them.

        Half of those are drawn from all, half from the faster half, so that nobody sits among slow ones only.
        """
        others = [one for one in self._listening if one.worker_id != me]
        if len(others) <= self._most:
            return others
        some = self._closest(me, others, self._most // 4)
        taken = {me, *(one.worker_id for one in some)}
        faster = (one for one in self._faster if one.worker_id not in taken)
        fast = self._closest(me, faster, self._most // 2 - len(some))
        return sorted((*some, *fast), key=self._fastest_first)

    def takes_from_seeder(self, me: str) -> bool:
        """Whether the seeder feeds `me`: everyone in a small swarm, `most` of a large one, and whoever has no neighbour at all."""
        return self._is_small or me in self._fed or all(one.worker_id == me for one in self._listening)

    def _seeder_feeds(self, members: Sequence[Member]) -> frozenset[str]:
        """Half by hash alone, which no claim changes; half are the fastest of a fixed draw."""
        drawn = self._closest(SEEDER, members, 4 * self._most)
        half = self._most // 2
        fast = sorted(drawn[half:], key=self._fastest_first)[: self._most - half]
        return frozenset(one.worker_id for one in (*drawn[:half], *fast))

    def _closest(self, me: str, members: Iterable[Member], count: int) -> list[Member]:
        """The `count` members with the lowest hash of the pair, lowest first."""
        mine, draws = _draw(self._salt, me), self._draws
        return nsmallest(count, members, key=lambda one: _mixed(mine ^ draws[one.worker_id]))

    def _fastest_first(self, member: Member) -> tuple[int, int]:
        """By power of two of the rate, so that a measurement that changes a little reshuffles nobody."""
        return -int(min(member.uplink, MOST_UPLINK)).bit_length(), self._draws[member.worker_id]


def neighbours(me: str, members: Sequence[Member], *, salt: str = "", most: int = NEIGHBOURS) -> list[Member]:
    """`Swarm.neighbours` of one member."""
    return Swarm(members, salt=salt, most=most).neighbours(me)


def takes_from_seeder(me: str, members: Sequence[Member], *, salt: str = "", most: int = NEIGHBOURS) -> bool:
    """`Swarm.takes_from_seeder` of one member."""
    return Swarm(members, salt=salt, most=most).takes_from_seeder(me)


@lru_cache(maxsize=1 << 16)
def _draw(salt: str, worker_id: str) -> int:
    """A member's own 64 bits."""
    return int.from_bytes(blake2b(f"{salt}\n{worker_id}".encode(), digest_size=8).digest())


def _mixed(bits: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection, so that the hash of a pair is the mixed XOR of two draws."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
