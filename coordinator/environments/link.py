"""Frames on the private socket between the data plane and a jailed child: u32 little-endian length, then one JSON object.

The length is checked before a byte of the body is read. The parent never trusts a frame: a child may run author code.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

FRAME_LIMIT_BYTES = 32 << 20
_LENGTH = struct.Struct("<I")


class LinkBroken(Exception):
    """The other end closed the link, or sent something that is not a frame."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A frame. Raises LinkBroken when it would exceed the limit."""
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode()
    if len(body) > FRAME_LIMIT_BYTES:
        raise LinkBroken(
            f"the message holds {len(body)} bytes, above the limit of {FRAME_LIMIT_BYTES}: send fewer completions at once"
        )
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """The JSON object of a frame's body. Raises LinkBroken."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise LinkBroken(f"the frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise LinkBroken(f"the frame holds {type(message).__name__}, not an object")
    return message


def checked_length(head: bytes, most: int = FRAME_LIMIT_BYTES) -> int:
    """The body length that a frame's head declares. Raises LinkBroken above the limit."""
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise LinkBroken(f"the frame declares {length} bytes, above the limit of {most}")
    return int(length)


async def receive(reader: asyncio.StreamReader, most: int = FRAME_LIMIT_BYTES) -> dict[str, Any]:
    """The next frame, of at most so many bytes, on the coordinator's side. Raises LinkBroken."""
    try:
        length = checked_length(await reader.readexactly(_LENGTH.size), most)
        return unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkBroken(f"the link closed: {error}") from error


class ChildLink:
    """The child's end: blocking, one request at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> dict[str, Any] | None:
        """The next request; None once the parent has closed the link. Raises LinkBroken on a bad frame."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        body = self._read(checked_length(head))
        return None if body is None else unpack(body)

    def send(self, message: Mapping[str, Any]) -> None:
        """Answer. Raises LinkBroken when the answer is too large, OSError when the parent is gone."""
        self._connection.sendall(pack(message))

    def _read(self, length: int) -> bytes | None:
        parts: list[bytes] = []
        while length > 0:
            part = self._connection.recv(min(length, 1 << 20))
            if not part:
                return None
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
