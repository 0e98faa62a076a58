"""What one peer's words may cost: memory for what it claims, questions for what it promises."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.adapters.bulk import catalogue
from p2p.adapters.bulk.events import BatchSeen, PeerOpened
from p2p.adapters.bulk.link import Link
from p2p.domain import bulk_frames
from p2p.domain.manifest import MAX_PIECES
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import Node, eventually, make_batches, make_pieces, running
from tests.integration.p2p.bulk.stranger import Stranger

ALL = (1 << MAX_PIECES) - 1


def link_of(node: Node, peer: str = "w-x") -> Link:
    return node.node._hub.links["job", peer]


def name_unknown(peer: Stranger, count: int) -> None:
    for number in range(1, count + 1):
        peer.say(wire.KNOWS, number.to_bytes(32, "big"), transfer=number, a=1)


def heard_all(peer: Stranger) -> int:
    """How many questions came until the node has read everything that was said so far."""
    peer.say(wire.PING, a=77)
    asks = 0
    while (heard := peer.hear(wire.ASK, wire.PONG))[0] == wire.ASK:
        asks += 1
    assert heard[2] == 77
    return asks


def test_claims_cost_no_memory_where_the_transfer_is_unknown_and_are_cut_to_the_row_where_it_is(tmp_path: Path) -> None:
    """A frame of 13 bytes of payload claims 2^20 pieces; 16,384 of them would be 2 GiB."""
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        known = node.node.add_batch(*make_batches(make_pieces(4, 100))[0])
        going_on = node.node.add_batch(*make_batches(make_pieces(4, 100, seed=1), per_batch=2, version=2)[0])
        peer.hello("w-x", "w-a")
        name_unknown(peer, 20)
        for number, transfer in ((100, known), (101, going_on)):
            peer.say(wire.KNOWS, bytes.fromhex(transfer), transfer=number, a=1)
        for number in (*range(1, 21), 100, 101):
            peer.stream.sendall(bulk_frames.have(number, ALL, queue=0, uplink=1e6, serves=True))
        heard_all(peer)
        sizes = {transfer: heard.pieces.bit_length() for transfer, heard in link_of(node).haves.items()}
        assert sizes == {known: 4, going_on: 1 << 16}, "of a row that goes on, more than its first batch may be held"


def test_a_peer_is_asked_for_few_transfers_at_a_time_and_thrice_at_most_if_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ASK_S", 0.5)
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        name_unknown(peer, 100)
        asks = heard_all(peer)
        assert asks == 64
        while asks < 300:
            peer.hear(wire.ASK)
            asks += 1
            assert len(node.node._catalogue._asking) <= 64
        assert eventually(lambda: not node.node._catalogue._asking)
        assert heard_all(peer) == 0
        peer.say(wire.KNOWS, (1).to_bytes(32, "big"), transfer=1, a=2)
        assert heard_all(peer) == 1, "it knows more: it is asked again"


def test_promises_of_unknown_transfers_are_bounded(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        known = node.node.add_batch(*make_batches(make_pieces(4, 100))[0])
        peer.hello("w-x", "w-a")
        name_unknown(peer, 1000)
        peer.say(wire.KNOWS, bytes.fromhex(known), transfer=1001, a=1)
        heard_all(peer)
        assert len(link_of(node).promised) == 256 + 1
        assert known in link_of(node).promised


def test_a_newcomer_learns_of_all_transfers_of_a_job_at_once(tmp_path: Path) -> None:
    """As many as a job may have: the bounds on questions and promises leave room for honest use, without waiting for a repeat."""
    old, new = Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    with running(old, new):
        names = {old.node.add_batch(*make_batches([bytes([number])], version=number)[0]) for number in range(150)}
        new.dial(old)
        new.wait_event(PeerOpened)
        is_last = lambda _: {one.transfer for one in new.told if isinstance(one, BatchSeen)} == names  # noqa: E731
        new.wait_for(is_last, within_s=catalogue.ASK_S * 5)


def test_a_listener_on_every_ipv6_address_takes_ipv4_too(tmp_path: Path) -> None:
    """A name may stand for either family, and a peer dials what it resolves to."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    node = Node(tmp_path, "w-a", host="::")
    with running(node):
        for host in ("127.0.0.1", "::1"):
            with Stranger(replace(node.address, host=host)) as peer:
                peer.hello("w-x", "w-a")
