"""`FallbackControl`: libp2p as long as it works, the coordinator's HTTPS whenever it does not, and back.

When is decided in `p2p/domain/control.py`. Values are published both ways, so that nobody has to guess who is where, and the board is read
both ways too: slowly while libp2p works, since that is how a silent libp2p is noticed, and quickly while it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from random import Random

from blake3 import blake3

from p2p.adapters.control.https import POLL_S, HttpsControl
from p2p.adapters.control.ports import Control, Handler, Receiver, Validator
from p2p.domain.control import Route, Seen, Silence
from p2p.domain.control_frames import check_size
from p2p.errors import ControlDown, ControlError, ControlMissing, ControlRefused

SLOW_S = 20.0
_FIRST_SHARE = 0.5  # of a request's time, for the first way
_WATCH_S = 1.0
_PEERS = 1024
_LOST = "libp2p is down or has no connection"


class FallbackControl:
    """Two ways for the same messages. Raises what the second raises: correctness may rest on HTTPS, never on libp2p."""

    def __init__(
        self,
        first: Control,
        second: HttpsControl,
        *,
        quick_s: float = POLL_S,
        slow_s: float = SLOW_S,
        retry_s: float = 15.0,
        is_proof: Callable[[str, str], bool] = lambda _topic, _author: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_proof` (topic, author): whether a value that the board brings must come by libp2p too, or libp2p is silent."""
        self._first = first
        self._second = second
        self._quick_s = quick_s
        self._slow_s = slow_s
        self._is_proof = is_proof
        self._clock = clock
        self._rng = Random()  # noqa: S311  # spreads retries, guards nothing
        self._retry_s = retry_s
        self._route = self._new_route()
        self._routes: OrderedDict[str, Route] = OrderedDict()
        self._silence = Silence()
        self._seen = Seen()
        self._unsent: dict[tuple[str, str], bytes] = {}  # for the board
        self._sent_at = float("-inf")
        self._watch: asyncio.Task[None] | None = None
        self._why = "libp2p was not started"

    @property
    def is_usable(self) -> bool:
        """Whether messages can be carried now."""
        return self._takes_first() or self._second.is_usable

    @property
    def way(self) -> str:
        """For logs and status: which way is taken, and why not the first."""
        return "libp2p" if self._takes_first() else f"https ({self._why})"

    async def start(self) -> None:
        """Start both; without libp2p, the second alone."""
        await self.start_second()
        await self.start_first()

    async def start_second(self) -> None:
        """Start HTTPS; libp2p may be started later, or never."""
        await self._second.start()
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_watch())

    async def start_first(self) -> None:
        """Start libp2p. Where that fails, messages go over HTTPS, and `way` says why."""
        try:
            await self._first.start()
            self._why = _LOST
        except (ControlMissing, ControlDown) as error:
            self._give_up_first(str(error))

    async def close(self) -> None:
        """End both."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._first.close()
        await self._second.close()

    async def request(self, peer: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The peer's answer, the first way if it is open, else the second. Raises ControlError."""
        ends = self._clock() + timeout_s
        route = self._route_to(peer)
        if self._takes_first() and route.takes_first(self._clock()):
            try:
                answer = await self._first.request(peer, protocol, payload, timeout_s=timeout_s * _FIRST_SHARE)
            except ControlRefused:
                raise
            except ControlDown as error:
                self._give_up_first(str(error))
            except ControlError:
                route.failed(self._clock())
            else:
                route.succeeded()
                return answer
        return await self._second.request(peer, protocol, payload, timeout_s=max(ends - self._clock(), 0.1))

    def handle(self, protocol: str, handler: Handler) -> None:
        """Answer requests of this protocol."""
        self._first.handle(protocol, handler)

    async def publish(self, topic: str, payload: bytes, *, slot: str = "") -> None:
        """Both ways: at once by libp2p, and on the board within a second or, while libp2p works, within SLOW_S. Raises ControlRefused."""
        check_size(f"the value for {topic}", payload)
        with contextlib.suppress(ControlDown):
            await self._first.publish(topic, payload, slot=slot)
        self._unsent[topic, slot] = payload

    async def retract(self, topic: str) -> None:
        """Stop repeating this node's values of the topic."""
        for place in [place for place in self._unsent if place[0] == topic]:
            del self._unsent[place]
        await self._first.retract(topic)

    def subscribe(self, topic: str, receive: Receiver, *, validate: Validator) -> None:
        """Deliver each value once, whichever way it comes first."""

        def from_first(author: str, payload: bytes) -> None:
            digest = _digest(topic, author, payload)
            self._silence.first_brought(digest)
            self._route.succeeded()
            if self._seen.is_new(digest):
                receive(author, payload)

        def from_second(author: str, payload: bytes) -> None:
            digest = _digest(topic, author, payload)
            if self._is_proof(topic, author):
                self._silence.second_brought(digest, self._clock())
            if self._seen.is_new(digest):
                receive(author, payload)

        self._first.subscribe(topic, from_first, validate=validate)
        self._second.subscribe(topic, from_second, validate=validate)

    def unsubscribe(self, topic: str) -> None:
        """Deliver nothing of the topic any more."""
        self._first.unsubscribe(topic)
        self._second.unsubscribe(topic)

    def _takes_first(self) -> bool:
        return self._first.is_usable and self._route.takes_first(self._clock())

    def _give_up_first(self, why: str) -> None:
        self._why = why
        self._route.failed(self._clock())

    def _new_route(self) -> Route:
        return Route(first_s=self._retry_s, rng=self._rng)

    def _route_to(self, peer: str) -> Route:
        route = self._routes.pop(peer, None) or self._new_route()
        self._routes[peer] = route
        if len(self._routes) > _PEERS:
            self._routes.popitem(last=False)
        return route

    async def _keep_watch(self) -> None:
        """Poll the board quickly while the first way is closed or silent."""
        while True:
            now = self._clock()
            if self._first.is_usable and self._silence.is_silent(now):
                self._give_up_first("libp2p is connected but silent")
            takes_first = self._takes_first()
            if takes_first:
                self._why = _LOST  # if it ends
            self._second.poll_every(self._slow_s if takes_first else self._quick_s)
            if now - self._sent_at >= (self._slow_s if takes_first else 0.0):
                self._sent_at = now
                await self._send_to_board()
            await asyncio.sleep(_WATCH_S)

    async def _send_to_board(self) -> None:
        """What is not sent now is sent with the next try, unless a newer value has come."""
        for place, payload in list(self._unsent.items()):
            topic, slot = place
            try:
                await self._second.publish(topic, payload, slot=slot)
            except ControlRefused:
                pass  # the board will not have it: trying again changes nothing
            except ControlError:
                return
            if self._unsent.get(place) is payload:
                del self._unsent[place]


def _digest(topic: str, author: str, payload: bytes) -> str:
    return blake3(f"{topic}\n{author}\n".encode() + payload).hexdigest()
