"""Links go down and come up in the middle of a transfer: the halves go on with what they have, and end with everything once healed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.adapters.bulk.events import GaveUp, PeerClosed, TransferComplete
from tests.integration.p2p.bulk.nodes import LIMITS, Node, eventually, holds_all, make_batches, make_pieces, put_all, running
from tests.integration.p2p.faults.hosts import Hosts, hosts, needs_namespaces

pytestmark = needs_namespaces
HASTY = replace(LIMITS, ping_s=0.2, silence_s=1.0, connect_s=1.0, redial_most_s=1.0)
DATA = make_pieces(60, 65_536)


def held(node: Node) -> int:
    return sum(1 for _ in node.store.digests())


def swarm_of(net: Hosts, tmp_path: Path, *, up: float, **changes: object) -> list[Node]:
    """A seeder on host 0, peers on the others, everybody connected; the transfer has begun."""
    nodes = [net.node(0, tmp_path, "seeder", is_seeder=True, up=up, **changes)]
    put_all(nodes[0].store, DATA)
    for host in (1, 2, 3):
        nodes.append(net.node(host, tmp_path, f"w-{host}", up=1e6, **changes))
        for other in nodes[:host]:
            net.dial(host, nodes[host], other)
    assert eventually(lambda: all(len(node.node.state().links) == 3 for node in nodes))
    for text, signature in make_batches(DATA):
        nodes[0].node.add_batch(text, signature)
    return nodes


def told(node: Node, kind: type, since: int = 0) -> bool:
    return any(isinstance(one, kind) for one in node.told[since:])


def test_two_halves_part_and_meet_again(tmp_path: Path) -> None:
    """The half with the seeder finishes alone; the other one shares what it has and waits; healed, it finishes too."""
    with hosts(4) as net:
        nodes = swarm_of(net, tmp_path, up=1e6, limits=HASTY)
        with running(*nodes):
            assert eventually(lambda: min(held(nodes[2]), held(nodes[3])) >= 12)
            net.cut((0, 1), (2, 3))
            nodes[1].wait_event(TransferComplete)
            for node in nodes[2:]:
                lost = {one.peer for one in node.told if isinstance(one, PeerClosed) and "nothing was heard" in one.reason}
                assert lost >= {"seeder", "w-1"}
            before = [held(node) for node in nodes[2:]]
            assert max(before) < len(DATA), "the cut came too late to show anything"
            time.sleep(1.0)
            assert [held(node) for node in nodes[2:]] == before == [max(before)] * 2, "what one of them had, both have"
            net.heal()
            for node in nodes[2:]:
                node.wait_event(TransferComplete)
                assert holds_all(node.store, DATA)
        assert not any("other bytes" in getattr(one, "reason", "") for node in nodes for one in node.told)


@pytest.mark.long
def test_a_cable_is_pulled_and_put_back(tmp_path: Path) -> None:
    """The seeder's: its own system tells it that there is no way out, and it comes back by itself. It does not begin again."""
    with hosts(4) as net:
        nodes = swarm_of(net, tmp_path, up=1.5e6, limits=HASTY)
        with running(*nodes):
            assert eventually(lambda: held(nodes[1]) >= 12)
            net.unplug(0)
            assert eventually(lambda: all(told(node, PeerClosed) for node in nodes))
            assert not any(told(node, TransferComplete) for node in nodes[1:])
            net.plug_in(0)
            for node in nodes[1:]:
                node.wait_event(TransferComplete, within_s=20)
                assert holds_all(node.store, DATA)
            (state,) = nodes[0].node.state().transfers
            assert state.copies < 2.0


@pytest.mark.long
def test_a_partition_that_outlasts_every_patience(tmp_path: Path) -> None:
    """With the limits of the product, 45 s: those who are cut off say that nothing comes, keep trying, and finish after the heal."""
    with hosts(4) as net:
        nodes = swarm_of(net, tmp_path, up=0.8e6)
        with running(*nodes):
            assert eventually(lambda: min(held(node) for node in nodes[1:]) >= 12)
            net.cut((0, 1), (2, 3))
            time.sleep(45.0)
            assert holds_all(nodes[1].store, DATA)
            for node in nodes[2:]:
                (reason, *_) = [one.reason for one in node.told if isinstance(one, GaveUp)]
                assert "no piece for 30 s" in reason
                assert not any(one.is_final for one in node.told if isinstance(one, GaveUp))
                assert not told(node, TransferComplete)
            net.heal()
            for node in nodes[2:]:
                node.wait_event(TransferComplete, within_s=60)
                assert holds_all(node.store, DATA)
