"""One request and one answer on a libp2p stream: framed, bounded, one task that writes and one that reads, everything drained at once."""

from __future__ import annotations

import trio
from libp2p.abc import INetStream
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamError

from p2p.domain.control_frames import FrameReader, frame, read_answer
from p2p.errors import ControlRefused, ControlUnreachable

LOST = (StreamError, IOException, RawConnError, trio.BrokenResourceError, trio.ClosedResourceError)
WRITE_S = 5.0
_CLOSE_S = 2.0


async def ask(stream: INetStream, payload: bytes) -> bytes:
    """Send a request, read its answer. Raises ControlRefused, ControlUnreachable. The stream is done with afterwards."""
    try:
        await write(stream, frame(payload))
        return read_answer(await read_frame(stream))
    except LOST as error:
        raise ControlUnreachable(f"the stream broke before the answer: {error!r}") from error
    finally:
        await finish(stream)


async def write(stream: INetStream, data: bytes) -> None:
    """Write all of it, whatever deadline passes meanwhile: half a frame would spoil every stream of the connection.

    A message fits yamux's first window, so this waits for the socket only. Raises ControlUnreachable after WRITE_S.
    """
    with shielded(WRITE_S) as scope:
        await stream.write(data)
    if scope.cancelled_caught:
        raise ControlUnreachable(f"the connection took no data for {WRITE_S:g} s")


async def read_frame(stream: INetStream) -> bytes:
    """The next frame's content. Raises ControlRefused: above the limit, or cut short."""
    reader = FrameReader()
    while True:
        try:
            data = await stream.read(reader.wanted())
        except StreamError as error:
            raise ControlRefused(f"the stream ended before the message: {error!r}") from error
        body = reader.take(data)
        if body is not None:
            return body


async def finish(stream: INetStream) -> None:
    """Give the stream back, whatever became of it."""
    with shielded(_CLOSE_S):
        try:
            await stream.reset()
        except Exception:
            return  # it is gone already, in whatever way libp2p found


def shielded(seconds: float) -> trio.CancelScope:
    """Whatever is cancelled around it, the body has this long."""
    return trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)


async def close_after(stream: INetStream) -> None:
    """End the writing side, so that what was written still arrives."""
    with shielded(_CLOSE_S):
        try:
            await stream.close()
        except Exception:
            return
