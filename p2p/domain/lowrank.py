"""Low-rank edges: when one is made, and which edge of a version goes first. Pure; bytes are the price.

The weights of a job with adapters are its first version's and a sum of few outer products, whatever the learning rate and however
many steps lie between. So one edge from the first version leads to any other for the bytes of the factors: the way back for a worker that
was away, the way in for one that comes late, and the cheaper step where deltas grow beyond it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from p2p.domain import lineage
from p2p.domain.lineage import DELTA, LOWRANK, Way
from p2p.domain.manifest import Tensor
from p2p.errors import ManifestError

DTYPE = "BF16"  # of tensors that may have factors, and of the factors
FACTOR_BYTES = 2
MATRIX = 2  # dimensions
PAIR = 2  # publications that a delta lies between


@dataclass(frozen=True, slots=True)
class Adapters:
    """What a job's adapters are: their rank, and the last parts of the names of the layers that have one."""

    rank: int
    targets: tuple[str, ...]


def factor_bytes(tensors: Iterable[Tensor], adapters: Adapters) -> int | None:
    """Raw bytes of the factors of every target among the tensors: what a low-rank edge takes at most, but for its heads.

    None where no edge can carry them: there is no target, or one is smaller than its factors, or no bf16 matrix.
    """
    targets = [one for one in tensors if is_target(one, adapters.targets)]
    if not targets or not all(fits(one, adapters.rank) for one in targets):
        return None
    return FACTOR_BYTES * adapters.rank * sum(sum(one.shape) for one in targets)


def fits(tensor: Tensor, rank: int) -> bool:
    """Whether a tensor may have factors of that rank in an edge: a bf16 matrix that is no smaller than they are."""
    if tensor.dtype != DTYPE or len(tensor.shape) != MATRIX:
        return False
    return FACTOR_BYTES * rank * sum(tensor.shape) <= tensor.nbytes


def is_target(tensor: Tensor, targets: Collection[str]) -> bool:
    """Whether the tensor is the weight of a layer of that name."""
    layer, _, kind = tensor.name.rpartition(".")
    return kind == "weight" and layer.rpartition(".")[2] in targets


def expected_bytes(ways: Iterable[Way], *, most: int) -> int:
    """What the next low-rank edge takes: what the newest did; before there is one, the raw factors."""
    known = [way for way in ways if way.encoding == LOWRANK]
    return max(known, key=lambda way: way.version).nbytes if known else most


def goes_first(order: Sequence[str], ways: Iterable[Way], *, nbytes: int) -> bool:
    """Whether the next version is announced with its low-rank edge of `nbytes`, and its delta follows, rather than the other way round.

    Everyone waits for the edge that goes first. The newest delta tells what the next one will take; without one, the delta goes first.
    `order`: digests of all publications that were not rolled back, oldest first.
    """
    place = {digest: number for number, digest in enumerate(order)}
    singles = [way for way in ways if way.encoding == DELTA and _is_single(way, place)]
    return bool(singles) and nbytes < max(singles, key=lambda way: place[way.digest]).nbytes


def is_due(order: Sequence[str], ways: Sequence[Way], *, base: str, nbytes: int) -> bool:
    """Whether the newest version should get a low-rank edge of `nbytes` from `base`: it has none, and it beats what leads there now."""
    newest = order[-1]
    if newest == base or any(way.encoding == LOWRANK and way.digest == newest for way in ways):
        return False
    try:
        return nbytes < lineage.cost(lineage.path(ways, newest, held=frozenset({base})))
    except ManifestError:
        return True


def lacks_single(order: Sequence[str], ways: Iterable[Way]) -> bool:
    """Whether the newest version has a low-rank edge and no delta from the one before it, for those who do not hold the first."""
    if len(order) < PAIR or not order[-2]:
        return False
    reached = {(way.encoding, way.base_digest) for way in ways if way.digest == order[-1]}
    return any(encoding == LOWRANK for encoding, _ in reached) and (DELTA, order[-2]) not in reached


def _is_single(way: Way, place: dict[str, int]) -> bool:
    """Whether the way leads from one publication to the next."""
    return way.base_digest in place and way.digest in place and place[way.digest] - place[way.base_digest] == 1
