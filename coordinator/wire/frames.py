"""The binary body of `submit` and its kin: one JSON head and named arrays, in a size-limited zstd frame.

Layout before compression: u32 little-endian head length, head (UTF-8 JSON), then a safetensors buffer with the arrays.
The zstd frame must declare its content size; the declared size is checked against the limit *before* and counted
*during* decompression, so that neither a lying header nor a bomb costs more than the limit.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

HEAD_LIMIT_BYTES = 1 << 20
FRAME_LIMIT_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The peer's bytes are not a frame; the message says what is wrong and what is allowed."""


def encode_frame(head: bytes, arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Pack a JSON head and C-contiguous arrays."""
    body = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(_LENGTH.pack(len(head)) + head + body)


def declared_bytes(data: bytes) -> int:
    """What the frame says it holds decompressed; 0 when it says nothing readable (`decode_frame` then refuses it)."""
    try:
        return max(int(zstandard.frame_content_size(data)), 0)
    except zstandard.ZstdError:
        return 0


def decode_frame(data: bytes, limit: int = FRAME_LIMIT_BYTES) -> tuple[bytes, dict[str, NDArray[np.generic]]]:
    """Unpack a frame of at most `limit` bytes decompressed. Raises FrameError."""
    plain = _decompress(data, limit)
    if len(plain) < _LENGTH.size:
        raise FrameError(f"frame holds {len(plain)} bytes; at least {_LENGTH.size} are needed for the head length")
    (head_length,) = _LENGTH.unpack_from(plain)
    if head_length > min(HEAD_LIMIT_BYTES, len(plain) - _LENGTH.size):
        raise FrameError(f"head length {head_length} exceeds the frame or the limit of {HEAD_LIMIT_BYTES} bytes")
    head = plain[_LENGTH.size : _LENGTH.size + head_length]
    try:
        return head, load(plain[_LENGTH.size + head_length :])
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise FrameError(f"the frame's body is not safetensors: {error}") from error


def _decompress(data: bytes, limit: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0 or declared > limit:
            raise FrameError(f"the zstd frame must declare a content size of at most {limit} bytes, it declares {declared}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=min(1 << 27, max(limit, 1 << 10))).decompressobj(
            read_across_frames=False
        )
        plain: bytes = decompressor.decompress(data)
    except zstandard.ZstdError as error:
        raise FrameError(f"not a zstd frame: {error}") from error
    if len(plain) != declared or decompressor.unused_data:
        raise FrameError(f"the zstd frame declares {declared} bytes and holds {len(plain)}, or bytes follow it")
    return plain
