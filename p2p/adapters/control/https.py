"""`HttpsControl`: the same messages through the coordinator's HTTPS, for those who have no libp2p or no way through.

It needs one thing: `post(path, body) -> reply`, which the worker's signed client provides; so the coordinator knows who speaks. Paths and
bodies are in `control_board.py` and PROTOCOL.md, "Control plane". Only the coordinator can be asked this way; what is published goes over
its board, which is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from blake3 import blake3

from p2p.adapters.control.ports import Handler, Receiver, Validator
from p2p.domain.control import Seen
from p2p.domain.control_board import Ask, Page, Poll, Posted, Publication, page_from_bytes
from p2p.domain.control_frames import MAX_MESSAGE, check_size
from p2p.errors import ControlDown, ControlError, ControlRefused, ControlTimeout, ControlUnreachable

PATHS = PUBLISH, POLL, REQUEST = "control/publish", "control/poll", "control/request"
POLL_S = 3.0
_POST_S = 20.0

Post = Callable[[str, bytes], Awaitable[bytes]]


class HttpsControl:
    """The control plane over the coordinator's HTTPS.

    `coordinator` is its public key (hex), the only peer that can be asked. `post` may raise anything: it becomes a ControlError.
    """

    def __init__(self, post: Post, *, coordinator: str, poll_s: float = POLL_S) -> None:
        self._post = post
        self._coordinator = coordinator
        self._poll_s = poll_s
        self._topics: dict[str, tuple[Receiver, Validator]] = {}
        self._seen = Seen()
        self._after = 0
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._last_failed = False

    @property
    def is_usable(self) -> bool:
        """Whether the last call got through."""
        return not self._last_failed

    async def start(self) -> None:
        """Begin to poll what is subscribed."""
        if self._task is None:
            self._task = asyncio.create_task(self._poll_for_ever())

    async def close(self) -> None:
        """Stop polling."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def poll_every(self, seconds: float) -> None:
        """Change the pace of polling, from now on."""
        if seconds < self._poll_s:
            self._hurry.set()
        self._poll_s = seconds

    async def request(self, peer: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The coordinator's answer. Raises ControlUnreachable for any other peer."""
        check_size(f"the request for {protocol}", payload)
        if peer != self._coordinator:
            raise ControlUnreachable(f"over HTTPS only the coordinator can be asked, not peer {peer[:16]}...")
        answer = await self._call(REQUEST, Ask(protocol, payload).to_bytes(), timeout_s)
        if len(answer) > MAX_MESSAGE:
            raise ControlRefused(f"the answer to {protocol} holds {len(answer)} bytes, above the limit of {MAX_MESSAGE}")
        return answer

    def handle(self, protocol: str, handler: Handler) -> None:
        """Nobody can ask us over HTTPS: we have no address there."""

    async def publish(self, topic: str, payload: bytes, *, slot: str = "") -> None:
        """Put the value on the coordinator's board, where it stays until replaced."""
        check_size(f"the value for {topic}", payload)
        await self._call(PUBLISH, Publication(topic, slot, payload).to_bytes(), _POST_S)

    async def retract(self, topic: str) -> None:
        """The board repeats nothing: each reader sees a value once."""

    def subscribe(self, topic: str, receive: Receiver, *, validate: Validator) -> None:
        """Deliver the topic's values that `validate` accepts, with the next polls. What is on the board already comes too."""
        if topic not in self._topics:
            self._after = 0
            self._hurry.set()
        self._topics[topic] = (receive, validate)

    def unsubscribe(self, topic: str) -> None:
        """Ask for the topic no more."""
        self._topics.pop(topic, None)

    async def poll(self) -> None:
        """Ask the board once, until there is nothing newer. Raises ControlError."""
        while self._topics:
            topics = tuple(sorted(self._topics))
            reply = await self._call(POLL, Poll(topics, self._after).to_bytes(), _POST_S)
            page = page_from_bytes(reply)
            self._take(page)
            if not page.values:
                return

    def _take(self, page: Page) -> None:
        for posted in page.values:
            if posted.topic in self._topics and self._seen.is_new(_digest(posted)):
                receive, validate = self._topics[posted.topic]
                if validate(posted.author, posted.payload):
                    receive(posted.author, posted.payload)
        self._after = page.after

    async def _poll_for_ever(self) -> None:
        while True:
            with contextlib.suppress(ControlError):
                await self.poll()
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._hurry.wait()

    async def _call(self, path: str, body: bytes, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):  # not `wait_for`, which in Python 3.11 may lose a cancellation
                reply = await self._post(path, body)
        except ControlRefused:
            raise
        except TimeoutError as error:
            self._last_failed = True
            raise ControlTimeout(f"the coordinator gave no answer to {path} within {timeout_s:g} s") from error
        except Exception as error:  # whatever the client raises: it is not ours to know
            self._last_failed = True
            raise ControlDown(f"the coordinator cannot be reached over HTTPS for {path}: {error}") from error
        self._last_failed = False
        return reply


def _digest(posted: Posted) -> str:
    return blake3(f"{posted.topic}\n{posted.author}\n".encode() + posted.payload).hexdigest()
