"""What the control plane says: small canonical-JSON documents with strict readers, the same over libp2p and over HTTPS.

PROTOCOL.md, "Control plane", specifies each. A document names its kind; a reader takes exactly one kind, refuses unknown keys, any
spelling but the canonical one, and whatever is above a limit. Announcements and batches carry the coordinator's signature and are passed on only with it;
a have-map is its holder's word, which the transport proves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p.domain import strict_json as js
from p2p.domain.batches import Batch
from p2p.domain.control_frames import MAX_MESSAGE
from p2p.domain.manifest import DIGEST, JOB, MAX_PIECES
from p2p.domain.signing import check_batch
from p2p.errors import BatchRefused, ControlRefused

ANNOUNCEMENT_PREFIX = b"echo2-announcement\n"
PEERS = "/echo2/peers/1"  # the protocol of a PeersRequest
MAX_RANGES = 2048
MAX_PEERS = 64
MAX_RATE = 1 << 40  # bytes a second
MAX_VERSION = 2**53

_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_HOST = re.compile(r"[0-9A-Fa-f.:]{2,45}")
_TICKET = re.compile(r"[A-Za-z0-9_.=-]{1,4096}")
_ANY = re.compile(r"[\x20-\x7e\n]*")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A version of a job exists: its digest, and BLAKE3 (hex) of its manifest's text. `signature` is the coordinator's, over the rest."""

    job_id: str
    version: int
    digest: str
    manifest: str
    signature: str = ""

    def signed(self, key: Ed25519PrivateKey) -> Announcement:
        """The same with the signature of `key`."""
        return Announcement(self.job_id, self.version, self.digest, self.manifest, key.sign(self._message()).hex())

    def check(self, public_key: str) -> None:
        """Return if the coordinator's key (hex) signed this; raise ControlRefused if not."""
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(self.signature), self._message())
        except (InvalidSignature, ValueError) as error:
            raise ControlRefused(
                f"the announcement of {self.job_id} version {self.version} is not signed by key {public_key[:16]}...: it is dropped"
            ) from error

    def to_bytes(self) -> bytes:
        return _write("announcement", asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Announcement:
        """Raises ControlRefused. The signature is not checked here."""
        return _read(data, "announcement", {"job_id", "version", "digest", "manifest", "signature"}, _announcement)

    def _message(self) -> bytes:
        body = {"digest": self.digest, "job_id": self.job_id, "manifest": self.manifest, "version": self.version}
        return ANNOUNCEMENT_PREFIX + js.canonical(body).encode()


@dataclass(frozen=True, slots=True)
class SignedBatch:
    """A piece batch as text with the coordinator's signature (hex): see `batches.py` for what it says."""

    text: str
    signature: str

    def check(self, public_key: str) -> None:
        """Return if the coordinator's key (hex) signed this; raise ControlRefused if not."""
        try:
            check_batch(public_key, self.text, self.signature)
        except BatchRefused as error:
            raise ControlRefused(str(error)) from error

    def to_bytes(self) -> bytes:
        return _write("batch", asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedBatch:
        """Raises ControlRefused. Neither signature nor text is checked here."""
        return _read(data, "batch", {"text", "signature"}, _signed_batch)


@dataclass(frozen=True, slots=True)
class HaveMap:
    """A coarse word on what `holder` (Ed25519 key, hex) holds of a transfer of `count` known pieces.

    `ranges` are (first piece, number of pieces), ascending, apart from each other. `uplink` is its measured upload rate, bytes a second.
    """

    holder: str
    transfer: str
    count: int
    ranges: tuple[tuple[int, int], ...]
    uplink: int

    @property
    def pieces(self) -> int:
        """The mask: bit i for piece i."""
        return sum(((1 << length) - 1) << first for first, length in self.ranges)

    def to_bytes(self) -> bytes:
        return _write("have-map", asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> HaveMap:
        """Raises ControlRefused."""
        return _read(data, "have-map", {"holder", "transfer", "count", "ranges", "uplink"}, _have_map)


@dataclass(frozen=True, slots=True)
class PeersRequest:
    """Which peers may I fetch this job's pieces from? Asked of the coordinator, which knows the asker from the transport."""

    job_id: str

    def to_bytes(self) -> bytes:
        return _write("peers-request", asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> PeersRequest:
        """Raises ControlRefused."""
        return _read(data, "peers-request", {"job_id"}, lambda fields: PeersRequest(js.text(fields["job_id"], "job_id", JOB)))


@dataclass(frozen=True, slots=True)
class Place:
    """An address literal and a port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A peer to fetch from: who, where its bulk and control planes listen (None: it does not listen), its certificate, rate, and a ticket."""

    worker_id: str
    key: str
    bulk: Place | None
    certificate_sha256: str
    control: Place | None
    uplink: int
    ticket: str


@dataclass(frozen=True, slots=True)
class PeersReply:
    """The coordinator's answer to a PeersRequest."""

    peers: tuple[Neighbour, ...]

    def to_bytes(self) -> bytes:
        return _write("peers", asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> PeersReply:
        """Raises ControlRefused."""
        return _read(data, "peers", {"peers"}, _peers)


def topic_of(job_id: str, what: str) -> str:
    """The topic for `what` ("versions", "batches", "haves") of a job."""
    return f"{job_id}/{what}"


def may_say(topic: str, author: str, payload: bytes, *, coordinator: str) -> bool:
    """Whether a published document may be delivered and passed on under the topic.

    It is of the topic's kind, and either signed by the coordinator (its key, hex) for the topic's job, or its author's own have-map. The one
    judgement for gossip and for the board. An old announcement may come again at any time: take only what is newer.
    """
    job_id, _, what = topic.rpartition("/")
    try:
        match what:
            case "versions":
                announcement = Announcement.from_bytes(payload)
                announcement.check(coordinator)
                return announcement.job_id == job_id
            case "batches":
                document = SignedBatch.from_bytes(payload)
                document.check(coordinator)
                return Batch.from_json(document.text).job_id == job_id
            case "haves":
                return HaveMap.from_bytes(payload).holder == author
    except (ControlRefused, BatchRefused):
        return False
    return False


def ranges_of(pieces: int, *, most: int = MAX_RANGES) -> tuple[tuple[int, int], ...]:
    """The runs of ones in a mask, ascending. Above `most` runs the shortest are left out: a have-map may understate, never overstate."""
    runs, first = [], 0
    while pieces:
        skip = (pieces & -pieces).bit_length() - 1
        pieces >>= skip
        length = (~pieces & (pieces + 1)).bit_length() - 1
        pieces >>= length
        runs.append((first + skip, length))
        first += skip + length
    kept = sorted(runs, key=lambda run: (-run[1], run[0]))[:most]
    return tuple(sorted(kept))


def _write(kind: str, fields: dict[str, Any]) -> bytes:
    data = js.canonical({"kind": kind, **fields}).encode()
    if len(data) > MAX_MESSAGE:
        raise ControlRefused(f"the {kind} holds {len(data)} bytes, above the limit of {MAX_MESSAGE}: say less in one message")
    return data


def _read(data: bytes, kind: str, keys: set[str], read: Callable[[dict[str, Any]], T]) -> T:
    try:
        text = data.decode("ascii")
        value = js.parse(text, limit=MAX_MESSAGE)
        fields = js.record(value, kind, frozenset(keys | {"kind"}))
        js.text(fields["kind"], "kind", re.compile(kind))
        found = read(fields)
    except (js.JsonRefused, UnicodeDecodeError) as error:
        raise ControlRefused(f"the {kind} is refused: {error}") from error
    if js.canonical(value) != text:
        raise ControlRefused(f"the {kind} is refused: it is not canonical JSON (sorted keys, no spaces, ASCII)")
    return found


def _announcement(fields: dict[str, Any]) -> Announcement:
    return Announcement(
        job_id=js.text(fields["job_id"], "job_id", JOB),
        version=js.integer(fields["version"], "version", least=0, most=MAX_VERSION),
        digest=js.text(fields["digest"], "digest", DIGEST),
        manifest=js.text(fields["manifest"], "manifest", DIGEST),
        signature=js.text(fields["signature"], "signature", _SIGNATURE),
    )


def _signed_batch(fields: dict[str, Any]) -> SignedBatch:
    return SignedBatch(js.text(fields["text"], "text", _ANY), js.text(fields["signature"], "signature", _SIGNATURE))


def _have_map(fields: dict[str, Any]) -> HaveMap:
    count = js.integer(fields["count"], "count", least=0, most=MAX_PIECES)
    return HaveMap(
        holder=js.text(fields["holder"], "holder", _KEY),
        transfer=js.text(fields["transfer"], "transfer", DIGEST),
        count=count,
        ranges=_ranges(js.array(fields["ranges"], "ranges", most=MAX_RANGES), count),
        uplink=js.integer(fields["uplink"], "uplink", least=0, most=MAX_RATE),
    )


def _ranges(values: list[Any], count: int) -> tuple[tuple[int, int], ...]:
    ranges, free = [], 0
    for index, value in enumerate(values):
        place = f"ranges[{index}]"
        pair = js.array(value, place, most=2)
        if len(pair) != 2:
            js.refuse(place, value, "[first piece, number of pieces]")
        first = js.integer(pair[0], f"{place}[0]", least=free, most=count)
        length = js.integer(pair[1], f"{place}[1]", least=1, most=count - first)
        free = first + length + 1  # runs that touch are one run
        ranges.append((first, length))
    return tuple(ranges)


def _peers(fields: dict[str, Any]) -> PeersReply:
    return PeersReply(js.each(js.array(fields["peers"], "peers", most=MAX_PEERS), "peers", _neighbour))


def _neighbour(value: object, place: str) -> Neighbour:
    keys = frozenset({"worker_id", "key", "bulk", "certificate_sha256", "control", "uplink", "ticket"})
    fields = js.record(value, place, keys)
    return Neighbour(
        worker_id=js.text(fields["worker_id"], f"{place}.worker_id", JOB),
        key=js.text(fields["key"], f"{place}.key", _KEY),
        bulk=_place(fields["bulk"], f"{place}.bulk"),
        certificate_sha256=js.text(fields["certificate_sha256"], f"{place}.certificate_sha256", DIGEST),
        control=_place(fields["control"], f"{place}.control"),
        uplink=js.integer(fields["uplink"], f"{place}.uplink", least=0, most=MAX_RATE),
        ticket=js.text(fields["ticket"], f"{place}.ticket", _TICKET),
    )


def _place(value: object, place: str) -> Place | None:
    if value is None:
        return None
    fields = js.record(value, place, frozenset({"host", "port"}))
    return Place(js.text(fields["host"], f"{place}.host", _HOST), js.integer(fields["port"], f"{place}.port", least=1, most=65535))
