"""Which edge leads to a version for the fewest bytes."""

from __future__ import annotations

from p2p.domain.manifest import KEYFRAMES, Edge, Manifest
from p2p.errors import ManifestError

READABLE = frozenset(KEYFRAMES)


def cheapest(manifest: Manifest, *, held: frozenset[str], readable: frozenset[str] = READABLE) -> Edge:
    """The smallest edge that a receiver can use: in an encoding it can read, from nothing or from a version it holds whole.

    `held` are digests of such versions. Equal sizes go to the first by encoding name. Raises ManifestError if no edge is usable.
    """
    usable = [
        edge for edge in manifest.edges if edge.encoding in readable and (edge.base_digest is None or edge.base_digest in held)
    ]
    if not usable:
        offered = sorted({edge.encoding for edge in manifest.edges})
        raise ManifestError(
            f"version {manifest.version} offers no edge that this receiver can use: offered {offered}, "
            f"readable {sorted(readable)}, {len(held)} versions held; update the worker or ask for a keyframe"
        )
    return min(usable, key=lambda edge: (edge.size, edge.encoding))
