"""What waits to be written on one connection: control frames first, then pieces, part by part. Guarded by the hub's lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from p2p.adapters.bulk.recent import Held
from p2p.domain import bulk_frames as frames
from p2p.domain.manifest import Piece

MOST_BURST = 256 << 10  # encrypted and given to the kernel at once
MOST_TURN = 1 << 20
LEAST_PART = 16 << 10
PART_S = 0.01  # a part takes about so long at the measured uplink: control frames wait for no more than one, or one turn
MOST_CONTROL = 4 << 20  # a peer that does not read for so long that this much waits is given up


@dataclass(slots=True)
class Upload:
    """A piece on its way out. `held` is there once it was found in memory, or read and verified."""

    transfer: str
    index: int
    piece: Piece
    number: int
    flag: int
    held: Held | None = None
    is_sought: bool = False  # it is being read
    offset: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Which piece of which transfer."""
        return self.transfer, self.index


@dataclass(slots=True)
class Outbox:
    """See the module."""

    control: deque[bytes] = field(default_factory=deque)
    control_bytes: int = 0
    uploads: deque[Upload] = field(default_factory=deque)

    def say(self, frame: bytes) -> None:
        """A control frame, after those before it."""
        self.control.append(frame)
        self.control_bytes += len(frame)

    def forget(self, transfer: str) -> list[Upload]:
        """Nothing more of this transfer; the uploads that will not happen."""
        dropped = [upload for upload in self.uploads if upload.transfer == transfer]
        for upload in dropped:
            self.uploads.remove(upload)
        return dropped

    def abort(self, key: tuple[str, int]) -> Upload | None:
        """Take an upload back; None if its last byte is written already or it never was here."""
        for upload in self.uploads:
            if upload.index == key[1] and upload.transfer == key[0]:
                self.uploads.remove(upload)
                return upload
        return None

    def take_control(self) -> bytes:
        """Control frames, as many as make one burst."""
        if self.control_bytes <= MOST_BURST:
            taken = b"".join(self.control)
            self.control.clear()
            self.control_bytes = 0
            return taken
        some: list[bytes] = []
        size = 0
        while self.control and size < MOST_BURST:
            some.append(self.control.popleft())
            size += len(some[-1])
        self.control_bytes -= size
        return b"".join(some)

    def is_ready(self) -> bool:
        """Whether the first upload's data is there."""
        return bool(self.uploads) and self.uploads[0].held is not None

    def take_part(self, most: int) -> tuple[Upload, memoryview, int, bool] | None:
        """(upload, its next bytes, where they begin, whether they are the last) of the first upload, if its data is there."""
        if not self.uploads:
            return None
        upload = self.uploads[0]
        if upload.held is None:
            return None
        begin = upload.offset
        part = memoryview(upload.held.data)[begin : begin + most]
        upload.offset += len(part)
        is_last = upload.offset == upload.piece.size
        if is_last:  # from here on it cannot be taken back
            self.uploads.popleft()
        return upload, part, begin, is_last


def part_bytes(uplink: float) -> int:
    """16 to 256 KiB, about 10 ms."""
    return max(1, min(round(uplink * PART_S / LEAST_PART), frames.PART_BYTES // LEAST_PART)) * LEAST_PART


def turn_bytes(uplink: float) -> int:
    """What one connection sends before another's turn comes, if the kernel takes it: about 10 ms, one burst to 1 MiB."""
    return max(LEAST_PART, min(int(uplink * PART_S), MOST_TURN))
