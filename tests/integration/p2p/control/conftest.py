"""Control networks on the loopback interface, closed after each test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.control import stack
from p2p.adapters.control.net import ControlConfig, ControlNet
from p2p.domain.control_peers import ControlAddress

LOOPBACK = ("127.0.0.0/8",)


@pytest.fixture
def needs_libp2p() -> None:
    if stack.version() is None:
        pytest.skip("libp2p is not installed (extra p2p)")


@dataclass(frozen=True)
class Peer:
    """A running network and its public key."""

    net: ControlNet
    key: str

    @property
    def address(self) -> ControlAddress:
        host, port = self.net.addresses[0]
        return ControlAddress(self.key, host, port)


class Nets:
    """Makes and closes control networks."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    async def make(self, *, private: Ed25519PrivateKey | None = None, start: bool = True, **changes: Any) -> Peer:
        private = private or Ed25519PrivateKey.generate()
        config = ControlConfig(private.private_bytes_raw(), ("127.0.0.1", 0), allowed_networks=LOOPBACK)
        peer = Peer(ControlNet(replace(config, **changes)), private.public_key().public_bytes_raw().hex())
        self.peers.append(peer)
        if start:
            await peer.net.start()
        return peer

    async def close(self) -> None:
        await asyncio.gather(*(peer.net.close() for peer in self.peers))


@pytest.fixture
async def nets(needs_libp2p: None) -> AsyncIterator[Nets]:
    made = Nets()
    yield made
    await made.close()


@pytest.fixture
def eventually() -> Callable[..., Any]:
    async def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        ends = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < ends, f"not within {within_s:g} s"
            await asyncio.sleep(0.02)

    return wait
