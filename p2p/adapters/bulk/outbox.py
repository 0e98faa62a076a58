"""What waits to be written on one connection. Control frames go first, adverts are coalesced, pieces leave part by part.

Guarded by the hub's lock; the connection's thread takes from it what it writes next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from p2p.domain import bulk_frames as frames
from p2p.domain.manifest import Piece

COALESCE_S = 0.02
ADVERTS_PER_S = 200.0  # of a node, over all its links: with many neighbours each hears of several pieces at once
MOST_BURST = 256 << 10
LEAST_PART = 16 << 10
PART_S = 0.01  # a part takes about so long at the measured uplink: control frames wait for no more than one
MOST_CONTROL = 4 << 20  # a peer that does not read for so long that this much waits is given up


@dataclass(slots=True)
class Upload:
    """A piece on its way out. `data` is there once it was read and verified."""

    transfer: str
    index: int
    piece: Piece
    number: int
    flag: int
    data: memoryview | None = None
    offset: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Which piece of which transfer."""
        return self.transfer, self.index


@dataclass(slots=True)
class Advert:
    """What is new here for the other side, of one transfer."""

    number: int
    pieces: int = 0
    queue: int = 0
    serves: bool = True
    is_due: bool = False
    told_at: float = float("-inf")


@dataclass(slots=True)
class Outbox:
    """See the module."""

    control: deque[bytes] = field(default_factory=deque)
    control_bytes: int = 0
    adverts: dict[str, Advert] = field(default_factory=dict)
    uploads: deque[Upload] = field(default_factory=deque)

    def say(self, frame: bytes) -> None:
        """A control frame, after those before it."""
        self.control.append(frame)
        self.control_bytes += len(frame)

    def advertise(self, transfer: str, number: int, pieces: int, queue: int, serves: bool) -> None:
        """Add to what will be told next."""
        advert = self.adverts.setdefault(transfer, Advert(number))
        advert.pieces |= pieces
        advert.queue, advert.serves, advert.is_due = queue, serves, True

    def forget(self, transfer: str) -> list[Upload]:
        """Nothing more of this transfer; the uploads that will not happen."""
        self.adverts.pop(transfer, None)
        dropped = [upload for upload in self.uploads if upload.transfer == transfer]
        for upload in dropped:
            self.uploads.remove(upload)
        return dropped

    def abort(self, key: tuple[str, int]) -> Upload | None:
        """Take an upload back; None if its last byte is written already or it never was here."""
        for upload in self.uploads:
            if upload.key == key:
                self.uploads.remove(upload)
                return upload
        return None

    def due(self, pause_s: float) -> float | None:
        """When the next advert may be told (time.monotonic), `pause_s` after the last one; None if there is none."""
        return min((advert.told_at + pause_s for advert in self.adverts.values() if advert.is_due), default=None)

    def take_control(self, uplink: float, now: float, pause_s: float) -> list[bytes]:
        """Control frames, then the adverts that are due; all of them when a piece goes out now, since they ride along for nothing."""
        taken: list[bytes] = []
        size = 0
        while self.control and size < MOST_BURST:
            taken.append(self.control.popleft())
            size += len(taken[-1])
        self.control_bytes -= size
        if self.control:
            return taken
        for advert in self.adverts.values():
            if advert.is_due and (self.uploads or now >= advert.told_at + pause_s):
                taken.append(frames.have(advert.number, advert.pieces, queue=advert.queue, uplink=uplink, serves=advert.serves))
                advert.pieces, advert.is_due, advert.told_at = 0, False, now
        return taken

    def take_part(self, most: int) -> tuple[Upload, memoryview, int, bool] | None:
        """(upload, its next bytes, where they begin, whether they are the last) of the first upload, if its data is there."""
        if not self.uploads or self.uploads[0].data is None:
            return None
        upload = self.uploads[0]
        assert upload.data is not None
        begin = upload.offset
        part = upload.data[begin : begin + most]
        upload.offset += len(part)
        is_last = upload.offset == len(upload.data)
        if is_last:  # from here on it cannot be taken back
            self.uploads.popleft()
        return upload, part, begin, is_last


def pause_s(links: int) -> float:
    """Between two adverts of a transfer on one of so many links."""
    return max(COALESCE_S, links / ADVERTS_PER_S)


def part_bytes(uplink: float) -> int:
    """16 to 256 KiB, about 10 ms."""
    return max(LEAST_PART, min(int(uplink * PART_S) // LEAST_PART * LEAST_PART, frames.PART_BYTES))


def burst_bytes(uplink: float) -> int:
    """What is encrypted and given to the kernel at once: about 10 ms, at least one part, at most 256 KiB."""
    return max(LEAST_PART, min(int(uplink * PART_S), MOST_BURST))
