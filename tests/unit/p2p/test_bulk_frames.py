"""Frames of the bulk plane against PROTOCOL.md section 6, and against strangers."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2p.domain import bulk_frames as frames
from p2p.domain.batches import MAX_TEXT
from p2p.domain.manifest import MAX_PIECES
from p2p.errors import FrameRefused

masks = st.one_of(
    st.integers(0, 2**200),
    st.sets(st.integers(0, MAX_PIECES - 1), max_size=40).map(lambda found: sum(1 << index for index in found)),
)


def head_of(kind: int, length: int = 0, *, flag: int = 0, transfer: int = 0, a: int = 0, b: int = 0) -> bytes:
    return struct.pack("<BbHIII", kind, flag, transfer, length, a, b)


def test_a_frame_byte_by_byte() -> None:
    assert frames.frame(frames.REQUEST, transfer=0x0201, a=0x06050403, b=7) == bytes(
        [10, 0, 1, 2, 0, 0, 0, 0, 3, 4, 5, 6, 7, 0, 0, 0]
    )
    assert frames.data_head(1, 2, 65536, 16384, -1) == bytes([12, 255, 1, 0, 0, 64, 0, 0, 2, 0, 0, 0, 0, 0, 1, 0])


def test_a_head_comes_back() -> None:
    assert frames.read_head(frames.data_head(9, 5, 16384, 65536, 1)) == frames.Head(frames.DATA, 1, 9, 65536, 5, 16384)
    assert frames.read_head(bytearray(frames.frame(frames.PING, a=1, b=2))) == frames.Head(frames.PING, 0, 0, 0, 1, 2)


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        (frames.CHALLENGE, 32, 32),
        (frames.HELLO, 1, 8192),
        (frames.WELCOME, 0, 0),
        (frames.RENEW, 1, 8192),
        (frames.KNOWS, 32, 32),
        (frames.ASK, 32, 32),
        (frames.BATCH, 65, 64 + MAX_TEXT),
        (frames.FORGET, 32, 32),
        (frames.HAVE, 0, 5 + MAX_PIECES // 8),
        (frames.REQUEST, 0, 0),
        (frames.CANCEL, 0, 0),
        (frames.DATA, 1, 262144),
        (frames.ABSENT, 0, 0),
        (frames.ABORTED, 0, 0),
        (frames.PING, 0, 0),
        (frames.PONG, 0, 0),
        (frames.BYE, 0, 400),
    ],
)
def test_lengths_are_limited_by_kind(kind: int, least: int, most: int) -> None:
    for length in {least, most}:
        assert frames.read_head(head_of(kind, length)).length == length
    for length in {least - 1, most + 1, 2**32 - 1} - {-1}:
        with pytest.raises(FrameRefused, match=f"a {frames.name_of(kind)} frame has length {length}; it must be {least} to {most}"):
            frames.read_head(head_of(kind, length))


def test_unknown_kinds_are_refused_below_128_and_skipped_above() -> None:
    with pytest.raises(FrameRefused, match="frame kind 18 is unknown"):
        frames.read_head(head_of(18))
    with pytest.raises(FrameRefused, match="frame kind 0 is unknown"):
        frames.read_head(head_of(0))
    assert frames.read_head(head_of(128, 65536)).kind == 128
    with pytest.raises(FrameRefused, match="kind 200 frame has length 65537"):
        frames.read_head(head_of(200, 65537))
    assert frames.name_of(200) == "kind 200"


@given(st.binary(min_size=16, max_size=16))
def test_any_16_bytes_are_a_head_or_are_refused(data: bytes) -> None:
    try:
        head = frames.read_head(data)
    except FrameRefused:
        return
    assert frames.frame(head.kind, b"\0" * head.length, transfer=head.transfer, flag=head.flag, a=head.a, b=head.b)[:16] == data


@given(masks)
@example(0)
@example(1 << (MAX_PIECES - 1))
@example((1 << MAX_PIECES) - 1)
def test_masks_come_back_and_are_short(mask: int) -> None:
    packed = frames.pack_mask(mask)
    assert frames.unpack_mask(packed) == mask
    assert frames.unpack_mask(bytearray(packed)) == mask
    span = mask.bit_length() - ((mask & -mask).bit_length() - 1) if mask else 0
    assert len(packed) <= 5 + (span + 7) // 8
    assert len(packed) <= 1 + 8 * len(list(frames.runs(mask)))


@given(masks)
def test_runs_are_the_set(mask: int) -> None:
    assert sum(((1 << count) - 1) << first for first, count in frames.runs(mask)) == mask


def test_one_piece_of_many_takes_six_bytes() -> None:
    assert frames.pack_mask(1 << 1000) == bytes([1]) + struct.pack("<I", 1000) + b"\x01"
    assert frames.pack_mask(((1 << 500) - 1) << 16) == bytes([0]) + struct.pack("<II", 16, 500)


def ranges(*pairs: tuple[int, int]) -> bytes:
    return bytes([0]) + b"".join(struct.pack("<II", *pair) for pair in pairs)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\x02", "form is 2"),
        (b"\x00", "take 0 bytes"),
        (ranges((0, 1))[:-1], "take 7 bytes"),
        (ranges((5, 0)), "not empty"),
        (ranges((5, 3), (7, 1)), "must be increasing"),
        (ranges((9, 1), (3, 1)), "must be increasing"),
        (ranges((0, MAX_PIECES + 1)), f"names piece {MAX_PIECES}"),
        (ranges((2**32 - 1, 2**32 - 1)), "greatest index"),
        (b"\x01\0\0\0\0", "cut short"),
        (b"\x01" + struct.pack("<I", MAX_PIECES) + b"\x01", f"names piece {MAX_PIECES}"),
        (b"\x01" + struct.pack("<I", 2**32 - 1) + b"\xff" * 8, "greatest index"),
    ],
)
def test_other_masks_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(FrameRefused, match=words):
        frames.unpack_mask(payload)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_mask_or_are_refused(payload: bytes) -> None:
    try:
        mask = frames.unpack_mask(payload)
    except FrameRefused:
        return
    assert mask < 1 << MAX_PIECES


def test_have_carries_queue_uplink_and_service() -> None:
    frame = frames.have(3, 0b101, queue=7, uplink=6.25e6, serves=True)
    head = frames.read_head(frame)
    assert (head.kind, head.transfer, head.a, head.b, head.flag) == (frames.HAVE, 3, 7, 6_250_000, frames.SERVES)
    assert frames.unpack_mask(frame[16:]) == 0b101
    most = frames.read_head(frames.have(3, 0, queue=2**40, uplink=1e12, serves=False))
    assert (most.a, most.b, most.flag, most.length) == (2**32 - 1, 2**32 - 1, 0, 0)
    assert frames.read_head(frames.have(3, 0, queue=0, uplink=-5.0, serves=False)).b == 0


def test_batches_come_back() -> None:
    frame = frames.batch(2, '{"a":1}', "ab" * 64)
    assert frames.read_head(frame) == frames.Head(frames.BATCH, 0, 2, 64 + 7, 0, 0)
    assert frames.read_batch(bytearray(frame[16:])) == ('{"a":1}', "ab" * 64)
    with pytest.raises(FrameRefused, match="not ASCII"):
        frames.read_batch(b"\0" * 64 + "é".encode())


def test_reasons_are_cut_and_made_printable() -> None:
    frame = frames.bye("x" * 1000)
    assert frames.read_head(frame).length == 400
    assert frames.reason_of(b"gone\x1b[31m\xff") == "gone?[31m\ufffd"
