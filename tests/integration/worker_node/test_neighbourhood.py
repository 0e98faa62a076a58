"""Whom a worker dials: the coordinator's word, what the operator's networks allow, and how often it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2p.adapters.control.https import HttpsControl
from p2p.domain.control_board import Ask
from p2p.domain.control_messages import Neighbour, PeersReply, PeersRequest, Place
from worker_node.adapters import neighbourhood
from worker_node.adapters.neighbourhood import Neighbourhood

KEY = "a" * 64


class Dials:
    """Stands where `Peers` stands, and notes whom to dial."""

    def __init__(self) -> None:
        self.met: list[tuple[str, dict[str, tuple[str, int]]]] = []
        self.unasked: list[str] = []
        self.nobody = 0

    def meet(self, job_id: str, found: Any) -> None:
        self.met.append((job_id, {peer.worker_id: place for peer, place in found}))

    def meet_nobody(self) -> None:
        self.nobody += 1

    def meet_nobody_new(self, job_id: str) -> None:
        self.unasked.append(job_id)


class Coordinator:
    """Answers what the test says; None: it cannot be reached."""

    def __init__(self, *peers: Neighbour) -> None:
        self.peers: tuple[Neighbour, ...] | None = peers
        self.asked: list[str] = []
        self.turns = False

    async def post(self, path: str, body: bytes) -> bytes:
        self.asked.append(PeersRequest.from_bytes(Ask.from_bytes(body).payload).job_id)
        if self.peers is None:
            raise ConnectionRefusedError("down")
        self.peers = self.peers[::-1] if self.turns else self.peers
        return PeersReply(self.peers).to_bytes()


def peer(worker_id: str, host: str | None, port: int = 4000) -> Neighbour:
    return Neighbour(worker_id, KEY, None if host is None else Place(host, port), "c" * 64, None, 0, "t")


@asynccontextmanager
async def asking(
    coordinator: Coordinator, *, host: str = "localhost", met: Callable[[Sequence[Neighbour]], None] = lambda _: None
) -> AsyncIterator[tuple[Neighbourhood, Dials]]:
    dials = Dials()
    control = HttpsControl(coordinator.post, coordinator=KEY)
    around = Neighbourhood(dials, control, coordinator_key=KEY, coordinator_host=host, met=met)  # type: ignore[arg-type]
    task = asyncio.create_task(around.run())
    try:
        yield around, dials
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def soon(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_only_public_places_and_listed_networks_are_dialled_but_for_the_seeder() -> None:
    coordinator = Coordinator(
        peer("seeder", "127.0.0.1"),
        peer("w-public", "8.8.8.8"),
        peer("w-private", "10.1.2.3"),
        peer("w-loopback", "127.0.0.1"),
        peer("w-system", "8.8.8.8", 22),
        peer("w-nowhere", None),
    )
    async with asking(coordinator) as (around, dials):
        await asyncio.sleep(0.05)
        assert coordinator.asked == [], "there is no job yet"
        around.work_for("job", ())
        await soon(lambda: dials.met)
        assert dials.met == [("job", {"seeder": ("127.0.0.1", 4000), "w-public": ("8.8.8.8", 4000)})]
        around.work_for("job", ["10.0.0.0/8"])
        await soon(lambda: len(dials.met) == 2)
        assert set(dials.met[1][1]) == {"seeder", "w-public", "w-private"}
        around.work_for("other", ["10.0.0.0/8"])
        await soon(lambda: len(dials.met) == 3)
        assert dials.met[2][0] == "other"
        around.work_for("other", ["10.0.0.0/8"])
        await asyncio.sleep(0.05)
        assert len(dials.met) == 3, "nothing is new"


@pytest.mark.parametrize(
    ("host", "place"), [("localhost", "127.0.0.1"), ("127.0.0.5", "127.0.0.5"), ("no.such.host.invalid", None)]
)
async def test_a_seeder_on_every_address_is_on_the_coordinators_host(host: str, place: str | None) -> None:
    """One that cannot be found keeps nobody from dialling the others."""
    async with asking(Coordinator(peer("seeder", "0.0.0.0"), peer("w-b", "8.8.8.8")), host=host) as (around, dials):
        around.work_for("job", ())
        await soon(lambda: dials.met)
        assert dials.met[0][1].get("seeder") == (None if place is None else (place, 4000))
        assert "w-b" in dials.met[0][1]


async def test_the_same_answer_again_is_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an answer that is none changes nobody's connections."""
    monkeypatch.setattr(neighbourhood, "EVERY_S", 0.05)
    monkeypatch.setattr(neighbourhood, "RARELY_S", 0.4)
    coordinator = Coordinator(peer("w-b", "8.8.8.8"), peer("w-c", "9.9.9.9"))
    coordinator.turns = True  # the same peers, by their uplinks of the moment
    async with asking(coordinator) as (around, dials):
        around.work_for("job", ())
        await soon(lambda: len(coordinator.asked) >= 5)  # after 0.05, 0.1, 0.2 and 0.4 s
        await asyncio.sleep(0.2)
        assert len(coordinator.asked) <= 6
        coordinator.peers = None
        met = len(dials.met)
        await soon(lambda: len(dials.unasked) >= 3)
        assert len(dials.met) <= met + 1
        assert dials.unasked[0] == "job"


async def test_without_a_job_nobody_is_met() -> None:
    """Before the first job nothing is asked, and after the last one everybody is let go."""
    coordinator = Coordinator(peer("w-b", "8.8.8.8"))
    named: list[int] = []
    async with asking(coordinator, met=lambda peers: named.append(len(peers))) as (around, dials):
        await soon(lambda: dials.nobody == 1)
        around.work_for("job", ())
        await soon(lambda: len(dials.met) == 1)
        around.work_for(None, ())
        await soon(lambda: dials.nobody == 2)
        assert named == [0, 1, 0]
        assert coordinator.asked == ["job"]
