"""One request and one answer on a control stream, cut out of bytes as they come.

A frame is its length (4 bytes, little-endian) and that many bytes. The length is refused before anything is kept; a stream that ends
before the length is reached is a failure, never a short message. An answer's frame starts with one byte: 0 and the answer, or 1 and the
reason of a refusal in words.
"""

from __future__ import annotations

from p2p.errors import ControlRefused

MAX_MESSAGE = 60_000  # bytes of a request, an answer or a published value: under 64 KB with all that is wrapped around it
_LENGTH = 4
_OK = b"\x00"
_REFUSED = b"\x01"
_SHOWN = 500


def check_size(what: str, payload: bytes) -> None:
    """Return if `payload` may be sent; raise ControlRefused if it is too large."""
    if len(payload) > MAX_MESSAGE:
        raise ControlRefused(
            f"{what} holds {len(payload)} bytes, above the limit of {MAX_MESSAGE}: send less, or use the bulk plane"
        )


def frame(payload: bytes) -> bytes:
    """The bytes that carry `payload`. Raises ControlRefused when it is too large."""
    check_size("the message", payload)
    return len(payload).to_bytes(_LENGTH, "little") + payload


def answer(payload: bytes) -> bytes:
    """The frame of an answer. Raises ControlRefused when it is too large."""
    check_size("the answer", payload)
    return (len(payload) + 1).to_bytes(_LENGTH, "little") + _OK + payload


def refusal(reason: str) -> bytes:
    """The frame that says why there is no answer."""
    text = _REFUSED + reason[:_SHOWN].encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def read_answer(body: bytes) -> bytes:
    """What an answer's frame carries. Raises ControlRefused with the other side's words, or when it is neither."""
    if body[:1] == _OK:
        return body[1:]
    if body[:1] == _REFUSED:
        raise ControlRefused(f"the peer refused: {printable(body[1:].decode(errors='replace'))}")
    raise ControlRefused(f"the answer starts with {body[:1]!r}, which is neither 0 (answer) nor 1 (refusal)")


def printable(words: str) -> str:
    """Words from a stranger, fit for a log line."""
    return "".join(character if character.isprintable() else "?" for character in words[:_SHOWN])


class FrameReader:
    """Takes bytes as they come, until one frame is whole."""

    def __init__(self, *, most: int = MAX_MESSAGE + 1) -> None:
        self._most = most
        self._taken = bytearray()
        self._length: int | None = None

    def wanted(self) -> int:
        """How many bytes are still missing, as far as known: never read more than this."""
        return (_LENGTH if self._length is None else self._length) - len(self._taken)

    def take(self, data: bytes) -> bytes | None:
        """Add what came; the frame's content once it is whole. Raises ControlRefused: end of stream, or a length above the limit."""
        if not data:
            missing = "its length" if self._length is None else f"{self.wanted()} of {self._length} bytes"
            raise ControlRefused(f"the stream ended before the message: {missing} missing")
        if len(data) > self.wanted():
            raise ControlRefused(f"{len(data)} bytes came where {self.wanted()} were due")
        self._taken += data
        if self._length is None and len(self._taken) == _LENGTH:
            self._start(int.from_bytes(self._taken, "little"))
        return bytes(self._taken) if self._length == len(self._taken) else None

    def _start(self, length: int) -> None:
        if length > self._most:
            raise ControlRefused(f"a message of {length} bytes is announced, above the limit of {self._most}")
        self._length = length
        self._taken.clear()
