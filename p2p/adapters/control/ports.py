"""What the rest of ECHO-2 sees of the control plane: one protocol, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

Handler = Callable[[str, bytes], Coroutine[Any, Any, bytes]]
"""(the asker's Ed25519 key in hex, payload) -> answer. A ControlRefused is told to the asker; runs on the caller's event loop."""

Receiver = Callable[[str, bytes], None]
"""(the author's Ed25519 key in hex, payload). Runs on the caller's event loop, must return at once."""

Validator = Callable[[str, bytes], bool]
"""(the author's key, payload) -> whether to deliver it and pass it on. Pure and quick: it runs in the network's thread."""


class Control(Protocol):
    """Small messages between peers. Peers are named by their Ed25519 public key in hex; payloads are at most 60,000 bytes.

    Every method raises only ControlError. Published values are state: the latest of each slot is repeated until the topic is
    retracted, values in between may be skipped, and each is delivered at most once in a row.
    """

    @property
    def is_usable(self) -> bool:
        """Whether messages can be carried now, as far as known here."""
        ...

    async def start(self) -> None:
        """Begin; returns when messages can be sent. Raises ControlMissing or ControlDown."""
        ...

    async def close(self) -> None:
        """End; safe to call twice."""
        ...

    async def request(self, peer: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The answer of `peer`. Raises ControlRefused, ControlTimeout, ControlUnreachable, ControlDown."""
        ...

    def handle(self, protocol: str, handler: Handler) -> None:
        """Answer requests of this protocol (`/echo2/...`)."""
        ...

    async def publish(self, topic: str, payload: bytes, *, slot: str = "") -> None:
        """Make `payload` this node's value of the slot, for all subscribers."""
        ...

    async def retract(self, topic: str) -> None:
        """Stop repeating this node's values of the topic."""
        ...

    def subscribe(self, topic: str, receive: Receiver, *, validate: Validator) -> None:
        """Deliver the topic's values that `validate` accepts, and pass on no others."""
        ...

    def unsubscribe(self, topic: str) -> None:
        """Deliver and pass on nothing of the topic any more; one that is unknown is no error."""
        ...
