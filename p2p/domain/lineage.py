"""The graph of versions and edges: the cheapest way to a version, which edges to make, and which to keep.

Bytes are the price. An edge leads from a base (or from nothing: a keyframe) to a version; versions are known by their digests only.
Why these numbers: k missed versions cost about k^0.68 singles when squashed into one edge, so an edge over eight versions is half of
its chain, and a full snapshot is only for a receiver that has no base at all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from p2p.domain.manifest import KEYFRAMES
from p2p.errors import ManifestError

DELTA = "delta"
LOWRANK = "lowrank"  # from the first version of a job with adapters: see `lowrank`
READABLE = frozenset({*KEYFRAMES, DELTA, LOWRANK})
NONE: frozenset[str] = frozenset()

EIGHT = 8  # every eighth publication gets an edge over eight
CUMULATIVE = 64  # every 64th one against the base
SINGLES_KEPT = 64
EIGHTS_KEPT = 8
CUMULATIVES_KEPT = 2
LOWRANKS_KEPT = 2
REBASE_AFTER = 500  # publications
REBASE_BYTES_A_PARAMETER = 0.25


@dataclass(frozen=True, slots=True)
class Way:
    """An edge as planning sees it: its ends and its price. `id` names it among all edges of a job."""

    id: str
    digest: str
    version: int
    encoding: str
    base_digest: str | None
    base_version: int | None
    nbytes: int


# (doubted parts, bytes, ways), ids, digest reached, ways taken
_Step = tuple[tuple[int, int, int], tuple[str, ...], str, tuple[Way, ...]]
_NOTHING = ""  # where a receiver begins that holds nothing: no digest is empty


@dataclass(frozen=True, slots=True)
class Due:
    """Edges that the newest publication should have and has not."""

    keyframe: bool = False
    bases: tuple[str, ...] = ()  # digests to encode deltas against


def path(
    ways: Iterable[Way],
    target: str,
    *,
    held: frozenset[str],
    readable: frozenset[str] = READABLE,
    doubted: frozenset[str] = NONE,
) -> tuple[Way, ...]:
    """The ways to fetch and apply one after another to come to `target` (a digest) for the fewest bytes; none if it is held.

    It begins at one of the `held` digests or with a keyframe. `doubted` are ids of ways and digests of held versions that were part
    of a path that failed: one is taken only if no path does with fewer of them. Raises ManifestError if no path is known.
    """
    leads = _usable(ways, readable)
    # The price is doubted parts, bytes, ways; ids settle what is left, so that both ends of a wire choose alike.
    frontier: list[_Step] = [((int(digest in doubted), 0, 0), (), digest, ()) for digest in held]
    frontier.append(((0, 0, 0), (), _NOTHING, ()))
    heapq.heapify(frontier)
    reached: set[str] = set()
    while frontier:
        (doubts, nbytes, count), ids, place, taken = heapq.heappop(frontier)
        if place == target:
            return taken
        if place in reached:
            continue
        reached.add(place)
        for way in leads[place]:
            price = (doubts + (way.id in doubted), nbytes + way.nbytes, count + 1)
            heapq.heappush(frontier, (price, (*ids, way.id), way.digest, (*taken, way)))
    raise ManifestError(
        f"no path is known to the version with digest {target[:12]}: {len(held)} versions held, "
        f"readable {sorted(readable)}; update the worker or ask for a keyframe"
    )


def cost(ways: Iterable[Way]) -> int:
    """Bytes of a path."""
    return sum(way.nbytes for way in ways)


def should_jump(*, left: int, jump: int) -> bool:
    """Whether to give up a running fetch with `left` bytes to go for a newer version that costs `jump` bytes from what is held."""
    return jump < left


def due(order: Sequence[str], ways: Sequence[Way], *, parameters: int) -> Due:
    """What the newest publication should still get. `order`: digests of all publications that were not rolled back, oldest first."""
    if not order:
        return Due()
    newest, last = order[-1], len(order) - 1
    reached = {way.base_digest for way in ways if way.digest == newest}
    base = current_base(order, ways)
    if base is None or _needs_new_base(order, ways, base, parameters=parameters):
        return Due(keyframe=None not in reached)
    wanted = [order[last - EIGHT]] if last % EIGHT == 0 and last >= EIGHT else []
    since = last - order.index(base)
    if since and since % CUMULATIVE == 0:
        wanted.append(base)
    return Due(bases=tuple(digest for digest in dict.fromkeys(wanted) if digest not in reached))


def current_base(order: Sequence[str], ways: Iterable[Way]) -> str | None:
    """The newest publication with a keyframe: what joiners begin with."""
    keyframes = {way.digest for way in ways if way.base_digest is None}
    return next((digest for digest in reversed(order) if digest in keyframes), None)


def anchors(order: Sequence[str], ways: Iterable[Way]) -> frozenset[str]:
    """Publications whose bits are needed to make edges to come: the newest, the last eighth one, the base."""
    if not order:
        return NONE
    base = current_base(order, ways)
    eighth = order[(len(order) - 1) // EIGHT * EIGHT]
    return frozenset({order[-1], eighth, *([] if base is None else [base])})


def retained(order: Sequence[str], ways: Sequence[Way], *, held: frozenset[str], in_use: frozenset[str] = NONE) -> frozenset[str]:
    """Ids of the ways to keep: the newest of each kind, and whatever leads from a `held` version, or from nothing, to the newest.

    `in_use` are ids of ways that somebody fetches now. A digest that is not in `order` was rolled back: the ways that go over it stay as
    long as the newest version is reached by them, those that lead away from it as long as singles do (receivers may still hold it).
    """
    if not order:
        return NONE
    place = {digest: number for number, digest in enumerate(order)}
    public = [way for way in ways if way.digest in place]
    known = [way for way in public if way.base_digest is None or way.base_digest in place]
    kinds: Mapping[str, list[Way]] = defaultdict(list)
    for way in sorted(known, key=lambda way: place[way.digest]):
        kinds[_kind(way, place)].append(way)
    last = len(order) - 1
    from_lost = [way for way in public if way.base_digest is not None and way.base_digest not in place]
    kept = [way for way in [*kinds["single"], *from_lost] if place[way.digest] > last - SINGLES_KEPT]
    kept += kinds["eight"][-EIGHTS_KEPT:] + kinds["cumulative"][-CUMULATIVES_KEPT:] + kinds[LOWRANK][-LOWRANKS_KEPT:]
    kept += _routes(ways, order[-1], held)
    base = current_base(order, known)
    ids = {way.id for way in kept} | {way.id for way in kinds["keyframe"] if way.digest == base}
    return frozenset(ids | (in_use & {way.id for way in ways}))


def _usable(ways: Iterable[Way], readable: frozenset[str]) -> Mapping[str, list[Way]]:
    """Ways in a readable encoding, by where they begin."""
    leads: dict[str, list[Way]] = defaultdict(list)
    for way in ways:
        if way.encoding in readable:
            leads[way.base_digest or _NOTHING].append(way)
    return leads


def _kind(way: Way, place: Mapping[str, int]) -> str:
    if way.base_digest is None:
        return "keyframe"
    if way.encoding == LOWRANK:
        return LOWRANK
    span = place[way.digest] - place[way.base_digest]
    return "single" if span <= 1 else "eight" if span <= EIGHT else "cumulative"


def _routes(ways: Sequence[Way], newest: str, held: frozenset[str]) -> list[Way]:
    """What the receivers that hold one version each, or nothing, would take to the newest."""
    found: list[Way] = []
    for start in [NONE, *(frozenset({digest}) for digest in sorted(held))]:
        try:
            found += path(ways, newest, held=start)
        except ManifestError:
            continue  # none leads there: this receiver needs what the next publication brings
    return found


def _needs_new_base(order: Sequence[str], ways: Sequence[Way], base: str, *, parameters: int) -> bool:
    """Whether joiners had better begin at the newest version: deltas against the base grew too large, or do not lead there."""
    since = len(order) - 1 - order.index(base)
    if any((way.encoding, way.base_digest, way.digest) == (LOWRANK, base, order[-1]) for way in ways):
        return False  # it is as large after a thousand steps as after one
    if since >= REBASE_AFTER:
        return True
    direct = [way.nbytes for way in ways if way.base_digest == base and way.digest == order[-1]]
    if direct and since >= EIGHT and min(direct) > REBASE_BYTES_A_PARAMETER * parameters:
        return True
    try:
        route = path(ways, order[-1], held=frozenset({base}))
    except ManifestError:
        return True
    return cost(route) > min(way.nbytes for way in ways if way.digest == base and way.base_digest is None)
