"""The bulk plane where hosts speak IPv6 only: listener, dial, and the exchange between two nodes on ::1."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from p2p.adapters.bulk.events import PeerClosed, PeerOpened, TransferComplete
from p2p.errors import PeerLost
from tests.integration.p2p.bulk.nodes import Node, holds_all, make_batches, make_pieces, put_all, running

HOST, NETWORKS = "::1", ("::1/128",)


@pytest.fixture(autouse=True)
def has_ipv6() -> None:
    try:
        socket.create_server((HOST, 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


def test_two_nodes_exchange_pieces_both_ways(tmp_path: Path) -> None:
    data = make_pieces(12, 70_000)
    one = Node(tmp_path, "w-a", host=HOST, allowed_networks=NETWORKS)
    other = Node(tmp_path, "w-b", host=HOST, allowed_networks=NETWORKS, listens=False)
    put_all(one.store, data[:6])
    put_all(other.store, data[6:])
    with running(one, other):
        assert one.address.host == HOST
        other.dial(one)
        other.wait_event(PeerOpened)
        for text, signature in make_batches(data):
            one.node.add_batch(text, signature)
            other.node.add_batch(text, signature)
        one.wait_event(TransferComplete)
        other.wait_event(TransferComplete)
        assert holds_all(one.store, data)
        assert holds_all(other.store, data)


def test_the_networks_that_the_operator_lists_hold_for_ipv6_too(tmp_path: Path) -> None:
    one = Node(tmp_path, "w-a", host=HOST, allowed_networks=NETWORKS)
    other = Node(tmp_path, "w-b", host=HOST)  # may dial 127.0.0.0/8 only
    with running(one, other), pytest.raises(PeerLost, match="::1 is not a public address"):
        other.dial(one)


def test_a_place_that_does_not_answer_is_named_in_brackets(tmp_path: Path) -> None:
    one = Node(tmp_path, "w-a", host=HOST, allowed_networks=NETWORKS)
    other = Node(tmp_path, "w-b", host=HOST, allowed_networks=NETWORKS)
    with running(other):
        one.node.close()
        other.dial(one)
        told = other.wait_event(PeerClosed)
    assert isinstance(told, PeerClosed)
    assert f"[::1]:{one.address.port} does not answer" in told.reason
