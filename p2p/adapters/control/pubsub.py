"""Gossip of small values: libp2p's gossipsub, with what it lacks.

What gossipsub drops it drops in silence (messages over 1 MiB, more than 10 a second of one topic from one peer, bursts over 32), so values
are small, sent at our own rate, repeated, and judged before they are passed on: one topic, a bounded size, a bounded rate of each author,
and the subscriber's own validator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import trio
from blake3 import blake3
from libp2p.abc import IHost
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub

from p2p.domain.control import Outbox, RateLimit, Seen
from p2p.domain.control_frames import MAX_MESSAGE
from p2p.domain.control_peers import public_key_of
from p2p.errors import ControlRefused

_PROTOCOL = TProtocol("/meshsub/1.2.0")
_RPC_BYTES = 256 << 10
_AUTHOR_RATE = 6.0  # a little above what an honest author may send
_AUTHOR_BURST = 24.0
_FORWARDER_RATE = 200  # of one neighbour and topic: it passes on the values of all authors
_IDLE_S = 3600.0

Deliver = Callable[[str, bytes], None]
Judge = Callable[[str, bytes], bool]


@dataclass(slots=True)
class _Topic:
    deliver: Deliver
    judge: Judge
    seen: Seen
    rate: RateLimit


class Gossip:
    """Publishes and receives the values of topics. Use from its trio thread only."""

    def __init__(self, host: IHost) -> None:
        self.router = GossipSub(
            [_PROTOCOL],
            degree=6,
            degree_low=4,
            degree_high=10,
            heartbeat_interval=1,
            max_messages_per_topic_per_second=_FORWARDER_RATE,
            adaptive_gossip_enabled=False,
            eclipse_protection_enabled=False,
        )
        self.pubsub = Pubsub(host, self.router, max_inbound_rpc_size=_RPC_BYTES, max_subscriptions_per_peer=64)
        self.pubsub.counter = (
            time.time_ns() // 1000
        )  # in seconds, as it comes, numbers repeat after a quick restart and are dropped
        self._me = public_key_of(str(host.get_id()))
        self._outbox = Outbox()
        self._topics: dict[str, _Topic] = {}
        self._changed = trio.Event()
        self.turn = trio.Lock()  # one at a time subscribes and unsubscribes
        self.members: frozenset[str] | None = None

    async def subscribe(self, topic: str, deliver: Deliver, judge: Judge) -> None:
        """Deliver each new value of the topic that passes, except our own."""
        known = self._topics.get(topic)
        if known is not None:
            known.deliver, known.judge = deliver, judge
            return
        self._topics[topic] = _Topic(deliver, judge, Seen(), RateLimit(rate=_AUTHOR_RATE, burst=_AUTHOR_BURST))
        self.pubsub.set_topic_validator(topic, self._accepts, is_async_validator=False)
        subscription = await self.pubsub.subscribe(topic)
        self.pubsub.manager.run_task(self._drain, topic, subscription)

    async def unsubscribe(self, topic: str) -> None:
        """Deliver and pass on nothing of the topic any more."""
        if topic in self._topics:
            await self.pubsub.unsubscribe(topic)
            self.pubsub.remove_topic_validator(topic)
            del self._topics[topic]

    def publish(self, topic: str, slot: str, payload: bytes) -> None:
        """Make `payload` our value of the slot. Raises ControlRefused."""
        self._outbox.put(topic, slot, payload, time.monotonic())
        self._changed.set()

    def retract(self, topic: str) -> None:
        """Stop repeating our values of the topic."""
        self._outbox.retract(topic)

    async def publish_due(self) -> None:
        """Publish what is due, for ever."""
        while True:
            for topic, payload in self._outbox.take_due(time.monotonic()):
                await self.pubsub.publish(topic, payload)
            self._changed = trio.Event()
            deadline = self._outbox.next_deadline()
            with trio.move_on_after(_IDLE_S if deadline is None else max(deadline - time.monotonic(), 0.0)):
                await self._changed.wait()

    async def _drain(self, topic: str, subscription: object) -> None:
        """Take messages at once: gossipsub keeps 32 messages for a subscriber and drops the rest."""
        async for message in subscription:  # type: ignore[attr-defined]
            author = public_key_of(str(ID(message.from_id)))
            state = self._topics.get(topic)
            if state is None:
                return  # unsubscribed meanwhile
            if author != self._me and state.seen.is_new(blake3(message.from_id + message.data).hexdigest()):
                state.deliver(author, message.data)

    def _accepts(self, _forwarder: ID, message: rpc_pb2.Message) -> bool:
        """Whether to deliver a message and pass it on. libp2p has checked the author's signature; our own pass unjudged."""
        if len(message.topicIDs) != 1 or len(message.data) > MAX_MESSAGE:
            return False
        try:
            author = public_key_of(str(ID(message.from_id)))
        except ControlRefused:
            return False
        if author == self._me:
            return True
        topic = self._topics.get(message.topicIDs[0])
        if topic is None:
            return False
        if self.members is not None and author not in self.members:
            return False
        return topic.rate.allows(author, time.monotonic()) and _judged(topic.judge, author, message.data)


def _judged(judge: Judge, author: str, payload: bytes) -> bool:
    try:
        return judge(author, payload)
    except Exception:  # a fault in a validator must not end gossipsub's task, and with it the network
        return False
