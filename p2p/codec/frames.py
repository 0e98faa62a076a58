"""zstd frames, and a reader of blobs, with every size compared before anything is allocated."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from p2p.codec.layout import Bytes, Chunk, view
from p2p.errors import ApplyFailed

# Match finding turned down to almost nothing: what is left is the Huffman stage, which is all that planes of numbers need.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)
_GENERIC_LEVEL = 1


def huffman(data: Bytes) -> bytes:
    """One frame; for planes of numbers and exponents."""
    return zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress(view(np.ascontiguousarray(data)))


def packed(data: Bytes) -> bytes:
    """One frame; for bytes of any kind."""
    return zstandard.ZstdCompressor(level=_GENERIC_LEVEL, write_content_size=True).compress(view(data))


def unpack(frame: bytes | memoryview, expected: int, place: str) -> Bytes:
    """The plain bytes of one frame of exactly `expected` bytes, read-only. Raises ApplyFailed."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != expected:
            raise ApplyFailed(f"{place} holds a zstd frame of {declared} bytes; {expected} are due")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ApplyFailed(f"{place} does not decompress: {error}") from error
    if len(plain) != expected:
        raise ApplyFailed(f"{place} decompresses to {len(plain)} bytes; {expected} are due")
    return np.frombuffer(plain, np.uint8)


class Blob:
    """Reads a blob from its front; never beyond its end."""

    def __init__(self, data: Chunk, place: str) -> None:
        self._data = view(data)
        self.place = place

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return self._data.nbytes

    def take(self, length: int) -> memoryview:
        """The next bytes. Raises ApplyFailed if there are fewer."""
        if length > self.left:
            raise ApplyFailed(f"{self.place} ends {length - self.left} bytes short")
        taken, self._data = self._data[:length], self._data[length:]
        return taken

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        """The next fields."""
        return form.unpack(self.take(form.size))

    def frame(self, length: int, expected: int) -> Bytes:
        """The next `length` bytes, a zstd frame of `expected` plain bytes."""
        return unpack(self.take(length), expected, self.place)

    def finish(self) -> None:
        """Raise ApplyFailed if anything is left."""
        if self.left:
            raise ApplyFailed(f"{self.place} holds {self.left} bytes too many")
