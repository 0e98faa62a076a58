"""Looking at weights delta files and directories without changing anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from types import MappingProxyType

from p2p.adapters.weights_file import DeltaFile, Watch, identity, open_delta, open_directory, unwatched
from p2p.codec.delta import read_records
from p2p.codec.frames import Blob
from p2p.codec.layout import Shard, shards, view
from p2p.codec.records import DENSE, FAST, FULL, GROUPED, HEADER, PACKED, PART, RAW, UNCHANGED, Record
from p2p.domain.manifest import Tensor
from p2p.errors import ApplyFailed, SwarmError, WeightsFileRefused

ENCODING = "delta"
MODE_NAMES: Mapping[int, str] = MappingProxyType(
    {RAW: "raw", PACKED: "packed", FULL: "full", UNCHANGED: "unchanged", FAST: "fast", GROUPED: "grouped", DENSE: "dense"}
)
WHOLE = frozenset({"raw", "packed", "full"})  # modes that carry a shard as it is


@dataclass(frozen=True, slots=True)
class Mode:
    """The shards of one mode: how many, their elements, the changes they name, and the bytes of their records."""

    shards: int
    elements: int
    changed: int
    nbytes: int

    def plus(self, elements: int, changed: int, nbytes: int) -> Mode:
        """With one more shard."""
        return Mode(self.shards + 1, self.elements + elements, self.changed + changed, self.nbytes + nbytes)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a weights delta file holds, from its head and the records of its stream."""

    delta: DeltaFile
    modes: Mapping[str, Mode]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.delta.nbytes

    @property
    def parameters(self) -> int:
        """Elements of the tensors in the stream; tied ones count once."""
        return sum(mode.elements for mode in self.modes.values())

    @property
    def changed(self) -> int:
        """Elements that differ from the base, in shards that are not carried whole."""
        return sum(mode.changed for mode in self.modes.values())

    @property
    def whole(self) -> int:
        """Elements in shards that are carried as they are."""
        return sum(mode.elements for name, mode in self.modes.items() if name in WHOLE)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensors in the stream."""
        return sum(tensor.nbytes for tensor in self.delta.layout.tensors)

    def largest(self, count: int) -> list[Tensor]:
        """The largest tensors."""
        return nlargest(count, self.delta.layout.tensors, key=lambda tensor: tensor.nbytes)


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome for one path. `base_digest` is None for a directory; `digest` is the version that it holds or makes."""

    path: Path
    digest: str | None
    base_digest: str | None
    problem: str | None


def check(path: Path, *, watch: Watch = unwatched) -> Checked:
    """Whether a weights delta file or a directory is whole; what is wrong is said in the result."""
    try:
        if path.is_dir():
            return Checked(path, identity(open_directory(path), f"hashing {path.name}", watch), None, None)
        delta = summarise(path, watch=watch).delta
        for _ in delta.small_files():
            pass
    except SwarmError as error:
        return Checked(path, None, None, str(error))
    except OSError as error:
        return Checked(path, None, None, f"{error.filename or path}: {error.strerror}")
    return Checked(path, delta.head.result_digest, delta.head.base_digest, None)


def summarise(path: Path, *, watch: Watch = unwatched) -> Summary:
    """Read a file through and count. Raises WeightsFileRefused, ApplyFailed (a record is not one), OSError."""
    delta = open_delta(path, watch=watch)
    if delta.head.encoding != ENCODING:
        raise WeightsFileRefused(
            f"{path} is encoded as {delta.head.encoding!r}; only {ENCODING!r} can be looked into: update this program"
        )
    plan = shards(delta.layout.tensors)
    modes: dict[str, Mode] = {}
    done = 0
    for place, shard, record in read_records(delta.stream(), plan):
        name = MODE_NAMES[record.mode]
        changed = changes_declared(shard, record, f"{path}, {place}")
        modes[name] = modes.get(name, Mode(0, 0, 0, 0)).plus(shard.elements, changed, HEADER.size + view(record.blob).nbytes)
        done += shard.nbytes
        watch("reading", done, sum(tensor.nbytes for tensor in delta.layout.tensors))
    return Summary(delta, dict(sorted(modes.items())))


def changes_declared(shard: Shard, record: Record, place: str) -> int:
    """How many elements a record says it changes; 0 for one that carries the shard whole. Raises ApplyFailed."""
    if record.mode in (RAW, PACKED, FULL, UNCHANGED):
        return 0
    blob = Blob(record.blob, place)
    count = covered = 0
    while blob.left:
        of_part, changed, length = blob.unpack(PART)
        blob.take(length)
        count, covered = count + changed, covered + of_part
    if covered != shard.elements or count > covered:
        raise ApplyFailed(f"{place} covers {covered} elements with {count} changes; {shard.elements} elements are due")
    return count
