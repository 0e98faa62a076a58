"""Frames: what goes in comes out, and nothing else is taken for a frame."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.wire.frames import HEAD_LIMIT_BYTES, FrameError, declared_bytes, decode_frame, encode_frame


def pack(plain: bytes, *, declare: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=declare).compress(plain)


@given(head=st.binary(max_size=200), tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
@settings(max_examples=50, deadline=None)
def test_a_frame_comes_back_as_it_was_sent(head: bytes, tokens: list[int]) -> None:
    sent = {"token_ids": np.array(tokens, np.int32), "logprobs": np.linspace(-9, 0, len(tokens), dtype=np.float32)}
    back, arrays = decode_frame(encode_frame(head, sent))
    assert back == head
    assert {name: array.tolist() for name, array in arrays.items()} == {name: array.tolist() for name, array in sent.items()}
    assert {name: array.dtype for name, array in arrays.items()} == {"token_ids": np.int32, "logprobs": np.float32}


@given(data=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_or_decoded(data: bytes) -> None:
    for body in (data, pack(data)):
        with suppress(FrameError):
            head, arrays = decode_frame(body)
            assert len(head) <= len(data)
            assert isinstance(arrays, dict)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (pack(b"\0" * 2048), "content size of at most 1024"),
        (pack(b"\0" * 10, declare=False), "must declare"),
        (pack(b"\0" * 10) + b"more", "bytes follow"),
        (pack(b"\0" * 10) * 2, "bytes follow"),
        (pack(b"\0\0"), "at least 4"),
        (pack(struct.pack("<I", 99) + b"x"), "head length 99"),
        (pack(struct.pack("<I", 0) + b"not safetensors"), "not safetensors"),
        (b"plain", "zstd"),
        (b"", "zstd"),
    ],
)
def test_a_refusal_says_what_is_wrong(body: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        decode_frame(body, 1024)


def test_a_frame_that_holds_more_than_it_declares_is_refused() -> None:
    honest = bytearray(pack(b"a" * 300))
    size_at = honest.index(struct.pack("<H", 300 - 256))
    honest[size_at : size_at + 2] = struct.pack("<H", 10)
    with pytest.raises(FrameError):
        decode_frame(bytes(honest))


def test_a_head_above_the_limit_is_refused() -> None:
    with pytest.raises(FrameError, match="head length"):
        decode_frame(encode_frame(b"x" * (HEAD_LIMIT_BYTES + 1), {}))


def test_the_declared_size_is_read_without_decompressing() -> None:
    assert declared_bytes(pack(b"x" * 12345)) == 12345
    assert declared_bytes(pack(b"x" * 5, declare=False)) == 0
    assert declared_bytes(b"nonsense") == 0
