"""Frames of the bulk plane: what two peers say to each other on one connection. Pure: bytes to values and back.

A frame is a head of 16 bytes and `length` bytes of payload. The head is checked against the limits of its kind before anything is
allocated for the payload. Specified in PROTOCOL.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from p2p.domain.batches import MAX_TEXT
from p2p.domain.manifest import MAX_PIECES
from p2p.errors import FrameRefused

VERSION = 1
HEAD_BYTES = 16
PART_BYTES = 256 << 10  # the most payload of one DATA frame
SIGNATURE_BYTES = 64
DIGEST_BYTES = 32
CHALLENGE_BYTES = 32
MAX_HELLO = 8 << 10
MAX_REASON = 400
MAX_SKIPPED = 64 << 10
FIRST_SKIPPABLE = 128  # frames of this kind and above may be ignored by who does not know them

CHALLENGE, HELLO, WELCOME, RENEW = 1, 2, 3, 4
KNOWS, ASK, BATCH, FORGET = 5, 6, 7, 8
HAVE, REQUEST, CANCEL, DATA, ABSENT, ABORTED = 9, 10, 11, 12, 13, 14
PING, PONG, BYE = 15, 16, 17

FOLLOWS = 1  # flag of KNOWS: the batches that the other side lacks follow unasked
AGAIN = 1  # flag of REQUEST: the piece came unasked before, and is needed once more
SERVES = 1  # flag of HAVE: the sender answers requests
_RANGES, _BITMAP = 0, 1
_MAX_HAVE = 1 + 4 + MAX_PIECES // 8
_HEAD = struct.Struct("<BbHIII")
_RANGE = struct.Struct("<II")
_U32 = 2**32 - 1

_LENGTHS = {  # kind: (name, least, most bytes of payload)
    CHALLENGE: ("CHALLENGE", CHALLENGE_BYTES, CHALLENGE_BYTES),
    HELLO: ("HELLO", 1, MAX_HELLO),
    WELCOME: ("WELCOME", 0, 0),
    RENEW: ("RENEW", 1, MAX_HELLO),
    KNOWS: ("KNOWS", DIGEST_BYTES, DIGEST_BYTES),
    ASK: ("ASK", DIGEST_BYTES, DIGEST_BYTES),
    BATCH: ("BATCH", SIGNATURE_BYTES + 1, SIGNATURE_BYTES + MAX_TEXT),
    FORGET: ("FORGET", DIGEST_BYTES, DIGEST_BYTES),
    HAVE: ("HAVE", 0, _MAX_HAVE),
    REQUEST: ("REQUEST", 0, 0),
    CANCEL: ("CANCEL", 0, 0),
    DATA: ("DATA", 1, PART_BYTES),
    ABSENT: ("ABSENT", 0, 0),
    ABORTED: ("ABORTED", 0, 0),
    PING: ("PING", 0, 0),
    PONG: ("PONG", 0, 0),
    BYE: ("BYE", 0, MAX_REASON),
}


class Head(NamedTuple):
    """What a frame is. The meaning of `flag`, `transfer`, `a` and `b` is that of its kind."""

    kind: int
    flag: int
    transfer: int
    length: int
    a: int
    b: int


def name_of(kind: int) -> str:
    """The kind in words."""
    return _LENGTHS[kind][0] if kind in _LENGTHS else f"kind {kind}"


def read_head(data: bytes | bytearray | memoryview, at: int = 0) -> Head:
    """The head in the 16 bytes from `at`. Raises FrameRefused: a kind that may not be skipped, a length beyond the kind's limits."""
    head = Head(*_HEAD.unpack_from(data, at))
    limits = _LENGTHS.get(head.kind)
    if limits is None:
        if head.kind < FIRST_SKIPPABLE:
            raise FrameRefused(f"frame kind {head.kind} is unknown; kinds below {FIRST_SKIPPABLE} must be understood")
        limits = (f"kind {head.kind}", 0, MAX_SKIPPED)
    name, least, most = limits
    if not least <= head.length <= most:
        raise FrameRefused(f"a {name} frame has length {head.length}; it must be {least} to {most} bytes")
    return head


def frame(kind: int, payload: bytes = b"", *, transfer: int = 0, flag: int = 0, a: int = 0, b: int = 0) -> bytes:
    """A whole frame."""
    return _HEAD.pack(kind, flag, transfer, len(payload), a, b) + payload


def data_head(transfer: int, piece: int, offset: int, length: int, flag: int) -> bytes:
    """The head of a DATA frame whose `length` bytes follow apart."""
    return _HEAD.pack(DATA, flag, transfer, length, piece, offset)


def bye(reason: str) -> bytes:
    """A BYE frame; the reason is cut to its limit."""
    return frame(BYE, reason.encode()[:MAX_REASON])


def reason_of(payload: bytes | bytearray) -> str:
    """The words of a BYE, made printable."""
    text = payload.decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def have(transfer: int, mask: int, *, queue: int, uplink: float, serves: bool) -> bytes:
    """A HAVE frame: bit i of `mask` for piece i; `uplink` in bytes a second."""
    return frame(
        HAVE,
        pack_mask(mask),
        transfer=transfer,
        flag=SERVES if serves else 0,
        a=min(queue, _U32),
        b=min(max(int(uplink), 0), _U32),
    )


def batch(transfer: int, text: str, signature: str) -> bytes:
    """A BATCH frame; `signature` in hex."""
    return frame(BATCH, bytes.fromhex(signature) + text.encode(), transfer=transfer)


def read_batch(payload: bytes | bytearray) -> tuple[str, str]:
    """Text and signature (hex) of a BATCH. Raises FrameRefused."""
    try:
        text = bytes(payload[SIGNATURE_BYTES:]).decode("ascii")
    except UnicodeDecodeError as error:
        raise FrameRefused(f"a BATCH frame's text is not ASCII: {error}") from error
    return text, bytes(payload[:SIGNATURE_BYTES]).hex()


def pack_mask(mask: int) -> bytes:
    """A set of pieces as ranges or as a bitmap, whichever is shorter; nothing for none."""
    if not mask:
        return b""
    first = (mask & -mask).bit_length() - 1
    bitmap = (mask >> first).to_bytes((mask.bit_length() - first + 7) // 8, "little")
    ranges = bytearray([_RANGES])
    for start, count in runs(mask):
        ranges += _RANGE.pack(start, count)
        if len(ranges) > len(bitmap) + 5:
            return bytes([_BITMAP]) + first.to_bytes(4, "little") + bitmap
    return bytes(ranges)


def unpack_mask(payload: bytes | bytearray) -> int:
    """The set that `pack_mask` wrote. Raises FrameRefused: cut short, not increasing, beyond the greatest piece index."""
    if not payload:
        return 0
    if payload[0] == _RANGES:
        return _unpack_ranges(payload[1:])
    if payload[0] != _BITMAP:
        raise FrameRefused(f"a HAVE frame's form is {payload[0]}; it must be {_RANGES} (ranges) or {_BITMAP} (bitmap)")
    if len(payload) < 6:
        raise FrameRefused(f"a HAVE bitmap of {len(payload)} bytes is cut short; it has at least 6")
    first = int.from_bytes(payload[1:5], "little")
    mask = int.from_bytes(payload[5:], "little")
    _check_index(first + mask.bit_length())
    return mask << first


def runs(mask: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of set bits, from the lowest."""
    at = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        count = (~mask & (mask + 1)).bit_length() - 1
        yield at + skipped, count
        mask >>= count
        at += skipped + count


def _unpack_ranges(body: bytes | bytearray) -> int:
    if not body or len(body) % _RANGE.size:
        raise FrameRefused(f"HAVE ranges take {len(body)} bytes; they must be a multiple of {_RANGE.size} and not none")
    mask, end = 0, 0
    for start, count in _RANGE.iter_unpack(body):
        if count == 0 or start < end:
            raise FrameRefused(f"HAVE range ({start}, {count}) after piece {end}: ranges must be increasing and not empty")
        end = start + count
        _check_index(end)
        mask |= ((1 << count) - 1) << start
    return mask


def _check_index(end: int) -> None:
    if end > MAX_PIECES:
        raise FrameRefused(f"a HAVE frame names piece {end - 1}; the greatest index is {MAX_PIECES - 1}")
