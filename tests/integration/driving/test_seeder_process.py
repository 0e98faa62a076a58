"""The seeder as a real process beside the coordinator: it dies, hangs or finds its port taken, and peers are served again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.adapters import seeder_process
from coordinator.adapters.seeder_process import SeederProcess, SeederSettings
from p2p.adapters.bulk.events import TransferComplete
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.domain.addresses import PeerInfo
from tests.integration.p2p.bulk.nodes import COORDINATOR, Node, holds_all, make_pieces, public, put_all, ticket
from tests.integration.p2p.bulk.nodes import running as nodes_running
from tests.integration.worker_node.peers_here import transfer_of


@asynccontextmanager
async def running(seeder: SeederProcess) -> AsyncIterator[None]:
    task = asyncio.create_task(seeder.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeder_process, "RESTART_FIRST_S", 0.05)


def seeder_in(root: Path) -> SeederProcess:
    return SeederProcess(SeederSettings(root / "pieces", root / "seeder.key", public(COORDINATOR), "127.0.0.1"))


async def until(condition: Callable[[], object], words: str, limit_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {limit_s} s: {words}") from None


def place(seeder: SeederProcess) -> PeerInfo:
    assert seeder.address is not None
    return PeerInfo(seeder.address.host, seeder.address.port, seeder.address.certificate_sha256)


def has(node: Node, transfer: str) -> bool:
    return any(isinstance(told, TransferComplete) and told.transfer == transfer for told in node.told)


async def test_a_seeder_that_dies_returns_where_it_was_and_is_told_everything_anew(tmp_path: Path) -> None:
    """Also what was told while it was away, and nothing of what was retired meanwhile."""
    rows = [make_pieces(4, 20_000, seed) for seed in range(3)]
    made = [transfer_of(data, version=number) for number, data in enumerate(rows)]
    for data in rows:
        put_all(PieceStore(tmp_path / "pieces", files=UNSYNCED_FILES), data)
    seeder, node, later = seeder_in(tmp_path), Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    with nodes_running(node, later):
        async with running(seeder):
            await until(lambda: seeder.address, "it listens")
            assert (tmp_path / "seeder.key").stat().st_mode & 0o777 == 0o600
            before = place(seeder)
            node.node.dial(before, ticket("w-a", "seeder"))
            for number in (0, 1):
                for text, signature in made[number][1]:
                    seeder.batch(text, signature)
            await until(lambda: has(node, made[0][0]) and has(node, made[1][0]), "two transfers")
            await until(lambda: set(seeder.first_sent) == {made[0][0], made[1][0]}, "the times of their first pieces")
            assert seeder._child is not None
            os.kill(seeder._child.pid, signal.SIGKILL)
            for text, signature in made[2][1]:
                seeder.batch(text, signature)  # into a pipe that is about to break
            await until(lambda: seeder.address is None, "its end is noticed")
            seeder.retire(made[0][0])
            await until(lambda: seeder.address, "it listens again")
            assert place(seeder) == before, "the same port, and the same certificate"
            await until(lambda: has(node, made[2][0]), "the third transfer, without a new dial")
            later.node.dial(before, ticket("w-b", "seeder"))
            await until(lambda: has(later, made[1][0]) and has(later, made[2][0]), "a late one gets both")
            assert not has(later, made[0][0])
            assert holds_all(later.store, rows[1] + rows[2])
            await until(lambda: seeder.uplink > 0, "its report")


async def test_a_port_that_was_taken_meanwhile_is_given_up(tmp_path: Path) -> None:
    seeder = seeder_in(tmp_path)
    async with running(seeder):
        await until(lambda: seeder.address, "it listens")
        port = place(seeder).port
        assert seeder._child is not None
        with socket.socket() as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            os.kill(seeder._child.pid, signal.SIGKILL)
            await until(lambda: seeder.address is None, "its end")
            squatter.bind(("127.0.0.1", port))
            squatter.listen()
            await until(lambda: seeder.address, "it listens elsewhere")
            assert place(seeder).port != port


async def test_a_seeder_that_hangs_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeder = seeder_in(tmp_path)
    async with running(seeder):
        await until(lambda: seeder.address, "it listens")
        assert seeder._child is not None
        first = seeder._child.pid
        monkeypatch.setattr(seeder_process, "SILENCE_S", 4.0)
        await until(lambda: seeder.state, "it reports")
        os.kill(first, signal.SIGSTOP)
        await until(lambda: seeder.address is None, "it is given up")
        await until(lambda: seeder.address, "another one listens")
        assert seeder._child is not None
        assert seeder._child.pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


async def test_its_end_ends_the_process(tmp_path: Path) -> None:
    seeder = seeder_in(tmp_path)
    async with running(seeder):
        await until(lambda: seeder.address, "it listens")
        assert seeder._child is not None
        pid = seeder._child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
