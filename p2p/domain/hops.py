"""An edge apart from its manifest: what a receiver needs of a version that it only passes through on its way to another.

A hop names its base digest, its result digest and the layout that both share, so that a path is checked end to end before a byte is
fetched. The tensors themselves are in the manifest of the path's end. Canonical JSON, signed as text; see PROTOCOL.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from p2p.domain import strict_json as js
from p2p.domain.lineage import Way
from p2p.domain.manifest import DIGEST, JOB, MAX_TOTAL_BYTES, Edge, Manifest, Piece, most_edge_bytes, plain_edge, read_edge
from p2p.errors import ManifestError

FORMAT = "echo2-hop-1"
MAX_TEXT = 64 << 20  # characters: a keyframe's pieces
_KEYS = frozenset({"format", "job_id", "version", "digest", "layout", "edge"})


@dataclass(frozen=True, slots=True)
class Hop:
    """One edge and the version that it leads to."""

    job_id: str
    version: int
    digest: str
    layout: str
    edge: Edge

    @property
    def way(self) -> Way:
        """The hop as planning sees it."""
        edge = self.edge
        name = f"{edge.encoding} {edge.base_digest} {self.digest}"
        return Way(
            id=blake3(name.encode()).hexdigest(),
            digest=self.digest,
            version=self.version,
            encoding=edge.encoding,
            base_digest=edge.base_digest,
            base_version=edge.base_version,
            nbytes=edge.size,
        )

    def to_json(self) -> str:
        """The canonical text, the one that is signed."""
        return js.canonical(
            {
                "format": FORMAT,
                "job_id": self.job_id,
                "version": self.version,
                "digest": self.digest,
                "layout": self.layout,
                "edge": plain_edge(self.edge),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Hop:
        """Read and check a hop. Raises ManifestError."""
        try:
            hop = _hop(js.parse(text, limit=MAX_TEXT))
            if hop.to_json() != text:
                raise js.JsonRefused("the text is not canonical JSON (sorted keys, no spaces, ASCII): send it exactly as signed")
        except js.JsonRefused as error:
            raise ManifestError(f"the hop is refused: {error}") from error
        return hop

    def check_fits(self, manifest: Manifest) -> None:
        """Return if the hop may lie on a path to the manifest's version; raise ManifestError if not."""
        place = f"the hop to version {self.version} ({self.digest[:8]})"
        if (self.job_id, self.layout) != (manifest.job_id, manifest.layout):
            raise ManifestError(f"{place} is of another job or layout than version {manifest.version}: take another path")
        if self.version > manifest.version:
            raise ManifestError(f"{place} leads beyond version {manifest.version}: take another path")
        if self.edge.size > most_edge_bytes(manifest.nbytes):
            raise ManifestError(
                f"{place} takes {self.edge.size} bytes, more than tensors of {manifest.nbytes} may: take another path"
            )


def hops_of(manifest: Manifest) -> tuple[Hop, ...]:
    """The manifest's own edges."""
    layout = manifest.layout
    return tuple(Hop(manifest.job_id, manifest.version, manifest.digest, layout, edge) for edge in manifest.edges)


def pieces_named(text: str) -> tuple[Piece, ...]:
    """Every piece that a manifest's or a hop's text names. Raises ManifestError."""
    if f'"format":"{FORMAT}"' in text:
        return Hop.from_json(text).edge.pieces
    return tuple(Manifest.from_json(text).all_pieces())


def _hop(value: object) -> Hop:
    fields = js.record(value, "hop", _KEYS)
    if fields["format"] != FORMAT:
        js.refuse("format", fields["format"], repr(FORMAT))
    version = js.integer(fields["version"], "version", least=0, most=2**53)
    return Hop(
        job_id=js.text(fields["job_id"], "job_id", JOB),
        version=version,
        digest=js.text(fields["digest"], "digest", DIGEST),
        layout=js.text(fields["layout"], "layout", DIGEST),
        edge=read_edge(fields["edge"], "edge", version, MAX_TOTAL_BYTES),
    )
