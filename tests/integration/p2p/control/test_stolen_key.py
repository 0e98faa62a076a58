"""Attacks on identity: who knows a worker's public key must not be taken for the worker.

libp2p 0.8.1 accepts unauthenticated plaintext by default. The first test shows that the attack is real, on a listener with libp2p's
defaults; the others that it fails here, on the listener and on the dialler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.control import stack
from p2p.domain.control_peers import ControlAddress, peer_id_of
from p2p.errors import ControlTimeout, ControlUnreachable

ECHO = "/echo2/echo/1"
T = TypeVar("T")


async def in_trio(work: Callable[[], Awaitable[T]]) -> T:
    """Run on a trio loop in a thread: the attacker's own."""
    import trio

    return await asyncio.to_thread(trio.run, work)


def thief(victim: str, kind: str) -> Any:
    """A libp2p host that claims `victim`'s public key (hex) and holds another private key."""
    stack.load()
    from libp2p import new_host
    from libp2p.crypto.ed25519 import Ed25519PrivateKey as Libp2pPrivate
    from libp2p.crypto.ed25519 import Ed25519PublicKey as Libp2pPublic
    from libp2p.crypto.keys import KeyPair
    from libp2p.crypto.x25519 import create_new_key_pair
    from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
    from libp2p.security.noise.transport import PROTOCOL_ID, Transport

    stolen = Libp2pPublic.from_bytes(bytes.fromhex(victim))

    class Claims(Libp2pPrivate):
        def get_public_key(self) -> Any:
            return stolen

    pair = KeyPair(Claims(Libp2pPrivate.new().impl), stolen)
    security: Any = {
        "plaintext": {PLAINTEXT_PROTOCOL_ID: InsecureTransport(pair)},
        "noise": {PROTOCOL_ID: Transport(pair, noise_privkey=create_new_key_pair().private_key)},
    }[kind]
    host = new_host(key_pair=pair, sec_opt=security)
    assert str(host.get_id()) == peer_id_of(victim), "the attacker goes by the victim's name"
    return host


async def steal(victim: str, kind: str, target: str, port: int) -> bytes:
    """Ask `target` on the port under the victim's name. Raises whatever libp2p raises when that fails."""
    import trio
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from multiaddr import Multiaddr

    host = thief(victim, kind)
    with trio.fail_after(5.0):
        async with host.run([]):
            peer = ID.from_base58(peer_id_of(target))
            await host.connect(PeerInfo(peer, [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")]))
            stream = await host.new_stream(peer, [ECHO])
            await stream.write(bytes(4))
            answer = await stream.read(200)
            await host.close()
            return bytes(answer)


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def new_key() -> tuple[Any, str]:
    key = Ed25519PrivateKey.generate()
    return key, key.public_key().public_bytes_raw().hex()


async def test_the_attack_works_on_a_listener_with_libp2ps_defaults(needs_libp2p: None) -> None:
    stack.load()
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from multiaddr import Multiaddr

    _, victim = new_key()
    seen: list[str] = []

    async def attack() -> None:
        pair = create_new_key_pair()
        host = new_host(key_pair=pair)

        async def serve(stream: Any) -> None:
            seen.append(str(stream.muxed_conn.peer_id))
            await stream.write(b"welcome")
            await stream.close()

        host.set_stream_handler(ECHO, serve)
        async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            port = int(host.get_transport_addrs()[0].value_for_protocol("tcp"))
            assert await steal(victim, "plaintext", pair.public_key.to_bytes().hex(), port) == b"welcome"
            await host.close()

    await in_trio(attack)
    assert seen == [peer_id_of(victim)]


@pytest.mark.parametrize("kind", ["plaintext", "noise"])
async def test_a_dial_under_a_stolen_public_key_is_refused(nets: Any, kind: str) -> None:
    stack.load()
    from libp2p.exceptions import BaseLibp2pError

    asked: list[str] = []

    async def note(key: str, payload: bytes) -> bytes:
        asked.append(key)
        return b"welcome"

    one = await nets.make()
    one.net.handle(ECHO, note)
    private, victim = new_key()
    with pytest.raises(Exception) as refused:  # trio wraps what libp2p raised
        await in_trio(lambda: steal(victim, kind, one.key, one.address.port))
    assert isinstance(innermost(refused.value), BaseLibp2pError), refused.value
    assert asked == []
    assert one.net._running.connections == 0

    owner = await nets.make(private=private)
    owner.net.know(one.address)
    assert await owner.net.request(one.key, ECHO, b"", timeout_s=5.0) == b"welcome", "the owner of the key is let in"
    assert asked == [victim]


@pytest.mark.parametrize("kind", ["plaintext", "noise"])
async def test_a_listener_under_a_stolen_public_key_is_not_believed(nets: Any, kind: str) -> None:
    two = await nets.make()
    _, victim = new_key()
    ready: list[int] = []

    async def listen() -> None:
        import trio
        from multiaddr import Multiaddr

        host = thief(victim, kind)
        async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            ready.append(int(host.get_transport_addrs()[0].value_for_protocol("tcp")))
            with trio.move_on_after(6.0):
                while not done:
                    await trio.sleep(0.05)
            await host.close()

    done: list[bool] = []
    listening = asyncio.create_task(in_trio(listen))
    while not ready:
        await asyncio.sleep(0.02)
    two.net.know(ControlAddress(victim, "127.0.0.1", ready[0]))
    with pytest.raises((ControlUnreachable, ControlTimeout)):
        await two.net.request(victim, ECHO, b"secret", timeout_s=3.0)
    assert two.net._running.connections == 0
    done.append(True)
    await listening


async def test_a_stranger_with_another_kind_of_key_harms_nobody(nets: Any) -> None:
    """An RSA identity is a valid libp2p peer; it has no Ed25519 key to be named by."""
    one = await nets.make()
    asked: list[str] = []

    async def note(key: str, payload: bytes) -> bytes:
        asked.append(key)
        return b""

    one.net.handle(ECHO, note)
    stack.load()
    import trio
    from libp2p import new_host
    from libp2p.crypto.rsa import create_new_key_pair
    from libp2p.exceptions import BaseLibp2pError
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo
    from multiaddr import Multiaddr

    async def visit() -> bytes:
        host = new_host(key_pair=create_new_key_pair())
        with trio.fail_after(5.0):
            async with host.run([]):
                peer = ID.from_base58(peer_id_of(one.key))
                await host.connect(PeerInfo(peer, [Multiaddr(f"/ip4/127.0.0.1/tcp/{one.address.port}")]))
                try:
                    stream = await host.new_stream(peer, [ECHO])
                    await stream.write(bytes(4))
                    return bytes(await stream.read(10))
                except BaseLibp2pError:
                    return b""
                finally:
                    await host.close()

    assert await in_trio(visit) == b""
    assert asked == []
    two = await nets.make()
    two.net.know(one.address)
    assert await two.net.request(one.key, ECHO, b"", timeout_s=5.0) == b""
