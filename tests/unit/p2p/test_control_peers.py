"""Peer ids: the mapping of the libp2p specification, against an example that it gives and against libp2p itself."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from p2p.adapters.control import stack
from p2p.domain.control_peers import peer_id_of, public_key_of
from p2p.errors import ControlRefused


@given(st.binary(min_size=32, max_size=32))
def test_there_and_back(raw: bytes) -> None:
    peer_id = peer_id_of(raw.hex())
    assert peer_id.startswith("12D3KooW")
    assert len(peer_id) == 52
    assert public_key_of(peer_id) == raw.hex()


def test_a_key_of_the_specification() -> None:
    """libp2p specs, peer-ids.md: the Ed25519 public key and private key of its test vectors; the id is libp2p's own for it."""
    public = "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    assert peer_id_of(public) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


def test_a_workers_key_is_its_peer_id() -> None:
    if stack.version() is None:
        pytest.skip("libp2p is not installed")
    stack.load()
    from libp2p.crypto.ed25519 import Ed25519PrivateKey as Libp2pKey
    from libp2p.peer.id import ID

    for _ in range(20):
        worker = Ed25519PrivateKey.generate()
        theirs = Libp2pKey.from_bytes(worker.private_bytes_raw())
        public = worker.public_key().public_bytes_raw().hex()
        assert str(ID.from_pubkey(theirs.get_public_key())) == peer_id_of(public)
        assert theirs.sign(b"x") == worker.sign(b"x")


@pytest.mark.parametrize("key", ["", "00" * 31, "00" * 33, "zz" * 32, "0x" + "00" * 31, " " + "00" * 32])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ControlRefused, match="64 hex digits"):
        peer_id_of(key)


@pytest.mark.parametrize(
    ("peer_id", "why"),
    [
        ("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "does not hold an Ed25519 key"),  # RSA
        ("12D3KooW" + "1" * 43, "does not hold an Ed25519 key"),
        ("12D3KooW" + "0" * 44, "is not base58"),
        ("12D3KooW" + "z" * 44, "does not hold an Ed25519 key"),
    ],
)
def test_what_is_no_peer_id_is_refused(peer_id: str, why: str) -> None:
    with pytest.raises(ControlRefused, match=why):
        public_key_of(peer_id)
