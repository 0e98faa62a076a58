"""Clocks that jump by an hour in the middle of a transfer. Deadlines are counted by steady clocks; only tickets have a date."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import GaveUp, PeerClosed, PeerDropped, PeerOpened, PieceStored, TransferComplete
from tests.integration.p2p.bulk.nodes import (
    COORDINATOR,
    LIMITS,
    Node,
    holds_all,
    make_batches,
    make_pieces,
    public,
    put_all,
    running,
)
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.app import SteadyClock

HOUR_S = 3600.0
NOW = 1_790_000_000.0
TICKET_S = 3600  # how long the coordinator's tickets last
DATA = make_pieces(30, 50_000)


class Wall:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.set_by = 0.0
        self._begun = time.monotonic()

    def __call__(self) -> float:
        return NOW + time.monotonic() - self._begun + self.set_by


@pytest.mark.parametrize(
    ("whose", "jump_s"), [("seeder", HOUR_S + 1), ("peer", HOUR_S + 1), ("both", HOUR_S + 1), ("both", -HOUR_S)]
)
def test_a_jump_costs_a_connection_at_most(tmp_path: Path, whose: str, jump_s: float) -> None:
    """Forward, the listener ends what its clock says has expired, in words; the owner's next ticket brings it back. Nobody is blamed."""
    walls = {"seeder": Wall(), "peer": Wall()}
    hasty = replace(LIMITS, ping_s=0.1)
    seeder = Node(tmp_path, "seeder", is_seeder=True, up=2e6, unix=walls["seeder"], limits=hasty)
    peer = Node(tmp_path, "w-a", unix=walls["peer"], limits=hasty)
    put_all(seeder.store, DATA)
    with running(seeder, peer):
        peer.dial(seeder, expires_at=int(NOW + TICKET_S))
        peer.wait_event(PeerOpened)
        for text, signature in make_batches(DATA):
            seeder.node.add_batch(text, signature)
        peer.wait_event(PieceStored)
        for name in walls if whose == "both" else (whose,):
            walls[name].set_by += jump_s
        if jump_s > 0 and whose != "peer":
            told = peer.wait_event(PeerClosed)
            assert isinstance(told, PeerClosed)
            assert "the ticket expired" in told.reason
            peer.dial(seeder, expires_at=int(walls["seeder"]() + TICKET_S))
        peer.wait_event(TransferComplete)
        assert holds_all(peer.store, DATA)
        if jump_s < 0 or whose == "peer":
            assert not any(isinstance(one, PeerClosed) for one in peer.told + seeder.told)
        assert not any(isinstance(one, PeerDropped | GaveUp) for one in peer.told + seeder.told)


def test_a_new_ticket_before_the_old_one_ends_keeps_the_connection(tmp_path: Path) -> None:
    """The coordinator's clock jumped, so its tickets end an hour later from now on: a listener with the old time takes them too."""
    wall = Wall()
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True, up=2e6, unix=wall), Node(tmp_path, "w-a")
    put_all(seeder.store, DATA)
    with running(seeder, peer):
        peer.dial(seeder, expires_at=int(NOW + 60))
        peer.wait_event(PeerOpened)
        for text, signature in make_batches(DATA):
            seeder.node.add_batch(text, signature)
        peer.wait_event(PieceStored)
        peer.dial(seeder, expires_at=int(NOW + HOUR_S + TICKET_S))
        peer.wait_for(lambda one: isinstance(one, PieceStored) and sum(1 for _ in peer.store.digests()) > 10)
        wall.set_by += HOUR_S
        peer.wait_event(TransferComplete)
        assert not any(isinstance(one, PeerClosed) for one in peer.told)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_workers_clock_is_moved_by_no_jump_of_its_machine(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    real = time.time
    clock = SteadyClock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert 0 <= clock() - before < 5
    assert abs(SteadyClock()() - time.time()) < 5, "the next start takes the time as it is then"


async def test_tickets_are_judged_by_the_coordinators_time(tmp_path: Path) -> None:
    """A worker's bulk node asks its client what time it is: the machine's clock may be an hour off, and the coordinator's word corrects it."""
    off = Wall()
    off.set_by = -HOUR_S
    client = CoordinatorClient(
        "https://coordinator.invalid", key=Ed25519PrivateKey.generate(), coordinator_key=public(COORDINATOR), clock=off
    )
    client._learn_time(NOW + 5, off())
    assert abs(client.server_now() - NOW - 5) < 2
    listener, dialler = Node(tmp_path, "w-a", unix=client.server_now), Node(tmp_path, "w-b")
    with running(listener, dialler):
        dialler.dial(listener, expires_at=int(NOW - 60))
        told = dialler.wait_event(PeerClosed)
        assert isinstance(told, PeerClosed)
        assert "expired" in told.reason, "by the machine's own clock it would be good for an hour yet"
        dialler.dial(listener, expires_at=int(NOW + 600))
        dialler.wait_event(PeerOpened)
    await client.close()
