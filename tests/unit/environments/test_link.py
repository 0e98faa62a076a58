"""Frames between the data plane and its children."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from coordinator.environments.link import FRAME_LIMIT_BYTES, ChildLink, LinkBroken, checked_length, pack, receive, unpack


async def read(data: bytes) -> dict[str, object]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await receive(reader)


async def test_a_message_survives_the_frame() -> None:
    """Text of any kind included."""
    message = {"id": "a", "text": "ünï\ud800\n", "ids": [1, 2]}
    assert await read(pack(message)) == message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "closed"),
        (pack({"a": 1})[:-1], "closed"),
        (struct.pack("<I", 3) + b"abc", "not JSON"),
        (struct.pack("<I", 2) + b"[]", "list, not an object"),
        (struct.pack("<I", 200_000) + b"[" * 200_000, "not JSON"),
        (struct.pack("<I", 2**32 - 1), "above the limit"),
    ],
)
async def test_what_is_not_a_frame_is_refused_in_words(data: bytes, words: str) -> None:
    """The length is checked before the body is read."""
    with pytest.raises(LinkBroken, match=words):
        await read(data)


def test_a_message_above_the_limit_is_not_sent() -> None:
    """Neither end can be made to hold more."""
    with pytest.raises(LinkBroken, match="send fewer"):
        pack({"text": "x" * FRAME_LIMIT_BYTES})
    assert checked_length(struct.pack("<I", FRAME_LIMIT_BYTES)) == FRAME_LIMIT_BYTES


def test_the_child_reads_requests_until_the_parent_closes() -> None:
    """None at the end of the link, also in the middle of a frame."""
    ours, theirs = socket.socketpair()
    link = ChildLink(theirs)
    ours.sendall(pack({"n": 1}) + pack({"n": 2}) + pack({"n": 3})[:-2])
    ours.shutdown(socket.SHUT_WR)
    assert [link.receive(), link.receive(), link.receive()] == [{"n": 1}, {"n": 2}, None]
    link.send({"ok": True})
    assert unpack(ours.recv(100)[4:]) == {"ok": True}
    ours.close()
    theirs.close()
