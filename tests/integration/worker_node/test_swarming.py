"""A whole worker in a swarm: peers by way of the coordinator's word, and HTTPS for what they do not bring."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coordinator.wire import messages as wire
from coordinator.wire.signing import public_hex, worker_id
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.codec.pieces import name
from p2p.domain.control_messages import Neighbour
from p2p.domain.manifest import Manifest
from p2p.domain.signing import sign_batch
from p2p.errors import ApplyFailed, FetchFailed, PieceCorrupt
from tests.integration.p2p.bulk.nodes import COORDINATOR, Node, public
from tests.integration.p2p.bulk.nodes import running as nodes_running
from tests.integration.worker_node.peers_here import neighbour
from tests.integration.worker_node.test_worker import Until, running, settings_for
from worker_node.adapters import identity, swarm
from worker_node.config import LinkSettings
from worker_node.domain import patience
from worker_node.domain.weights import Forthcoming, Version
from worker_node.runtime import Runtime


@pytest.fixture
def make_next(make_model: Callable[[int], Path], tmp_path: Path) -> Callable[[int], Path]:
    """Version n of a line of models: 600 KB, of which each differs from the one before in many elements."""

    def make(number: int) -> Path:
        directory = tmp_path / "line" / str(number)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 40}))
        if number == 0:
            weights = np.random.default_rng(7).standard_normal((384, 384)).astype(np.float32)
        else:
            weights = load_file(tmp_path / "line" / str(number - 1) / "model.safetensors")["w"].copy()
            weights[number::3] = np.nextafter(weights[number::3], 9.0, dtype=np.float32)
        save_file({"w": weights}, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


@pytest.fixture
async def small(coordinator: Any) -> Any:
    """The small coordinator, under the key that the bulk nodes trust."""
    coordinator.key, coordinator.public = COORDINATOR, public(COORDINATOR)
    await coordinator.start()
    return coordinator


def pieces_of(coordinator: Any, manifest: Manifest) -> Iterable[bytes]:
    store = PieceStore(coordinator.store_dir)
    return [store.read(piece.digest) for edge in manifest.edges for piece in edge.pieces]


def fill(node: Node, coordinator: Any, version: int, *, with_pieces: bool = True) -> None:
    """The node knows the version's transfers, and holds their pieces."""
    for data in pieces_of(coordinator, coordinator.manifests[version]) if with_pieces else ():
        node.store.put(name(data), data)
    for text in coordinator.batches[version]:
        node.node.add_batch(text, sign_batch(COORDINATOR, text))


def named(node: Node, state_dir: Path) -> Neighbour:
    """The node, with a ticket for the worker of that directory."""
    identity.make_state_dir(state_dir)
    key, _ = identity.load_or_create(state_dir)
    return neighbour(node, worker_id(public_hex(key)), key=public_hex(key))


@contextmanager
def refusing_edges(coordinator: Any, refused: Any) -> Iterator[list[str]]:
    """The coordinator gives files, and no piece of an edge; the digests that were asked for."""
    asked: list[str] = []

    def before(route: str, request: Any) -> None:
        if route != "piece":
            return
        digest = request.match_info["digest"]
        if any(digest == piece.digest for m in coordinator.manifests.values() for edge in m.edges for piece in edge.pieces):
            asked.append(digest)
            raise refused(503, "busy")

    coordinator.before = before
    yield asked
    coordinator.before = lambda route, request: None


def on_disk(state_dir: Path) -> set[str]:
    return {path.name for path in (state_dir / "weights" / "pieces").glob("??/*")}


def digests(manifest: Manifest, encoding: str) -> set[str]:
    return {piece.digest for edge in manifest.edges if edge.encoding == encoding for piece in edge.pieces}


def all_digests(manifest: Manifest) -> set[str]:
    return {piece.digest for piece in manifest.all_pieces()}


async def test_a_worker_gets_every_edge_from_a_peer(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, refused: Any
) -> None:
    """The keyframe asked for by name, the delta as soon as it is told; the coordinator gives the small files only."""
    state_dir = tmp_path / "worker"
    first = small.publish(make_next(0), 0)
    node = Node(tmp_path, "w-b")
    with nodes_running(node), refusing_edges(small, refused) as asked:
        fill(node, small, 0)
        small.peers = (named(node, state_dir),)
        async with running(settings_for(small, state_dir)):
            await until(lambda: small.confirms, "version 0")
            keyframe = next(edge for edge in first.edges if edge.encoding == "planes")
            assert small.confirms[0].fetched_from_peers_bytes == keyframe.size
            assert small.confirms[0].fetched_bytes == sum(piece.size for piece in first.pieces([keyframe]))
            small.encode(make_next(1), 1, base=0)
            delta = small.manifests[1]
            fill(node, small, 1)
            await until(lambda: digests(delta, "delta") <= on_disk(state_dir), "the delta, before it is announced")
            assert not digests(first, "raw") & on_disk(state_dir)
            small.newest = 1
            await until(lambda: small.confirms[-1].version == 1, "version 1")
            assert small.confirms[-1].fetched_from_peers_bytes == delta.edges[0].size
        assert asked == []


async def test_a_seeder_counts_as_the_coordinator(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, refused: Any
) -> None:
    state_dir = tmp_path / "worker"
    manifest = small.publish(make_next(0), 0)
    node = Node(tmp_path, "seeder", is_seeder=True)
    with nodes_running(node), refusing_edges(small, refused):
        fill(node, small, 0)
        small.peers = (named(node, state_dir),)
        async with running(settings_for(small, state_dir)):
            await until(lambda: small.confirms, "version 0")
    assert small.confirms[0].fetched_from_peers_bytes == 0
    keyframe = next(edge for edge in manifest.edges if edge.encoding == "planes")
    assert small.confirms[0].fetched_bytes == sum(piece.size for piece in manifest.pieces([keyframe]))


@pytest.mark.parametrize("there", ["nobody answers", "no peer named", "a dead seeder"])
async def test_without_peers_everything_comes_over_https_at_once(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, there: str
) -> None:
    state_dir = tmp_path / "worker"
    small.publish(make_next(0), 0)
    if there == "no peer named":
        small.peers = ()
    elif there == "a dead seeder":
        node = Node(tmp_path, "seeder", is_seeder=True)
        node.node.close()
        small.peers = (named(node, state_dir),)
    async with running(settings_for(small, state_dir)):
        await until(lambda: small.requests["manifest"], "the fetch begins")
        begun = time.monotonic()
        await until(lambda: small.confirms, "version 0", limit_s=patience.DIALLED_S + 3.0)
        assert time.monotonic() - begun < (patience.DIALLED_S if there == "a dead seeder" else patience.ASKED_S) + 2.0
    assert small.confirms[0].fetched_from_peers_bytes == 0


async def test_a_silent_peer_costs_its_patience_and_no_more(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the rows and holds nothing. What then comes over HTTPS, that peer gets from a worker that does not listen."""
    monkeypatch.setattr(patience, "STALL_S", 1.0)
    state_dir = tmp_path / "worker"
    manifest = small.publish(make_next(0), 0)
    node = Node(tmp_path, "w-b", wants=lambda first: False)
    with nodes_running(node):
        fill(node, small, 0, with_pieces=False)
        small.peers = (named(node, state_dir),)
        async with running(settings_for(small, state_dir)):
            await until(lambda: small.confirms, "version 0", limit_s=10.0)
            assert small.confirms[0].fetched_from_peers_bytes == 0
            await until(lambda: digests(manifest, "planes") <= set(node.store.digests()), "the upload")


async def test_pieces_that_peers_bring_late_are_not_asked_for_again(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTPS is slow after the patience; a peer that comes then brings the rest, and each byte is counted once."""
    monkeypatch.setattr(patience, "ASKED_S", 0.2)
    state_dir = tmp_path / "worker"
    manifest = small.publish(make_next(0), 0)
    asked: list[str] = []
    late = asyncio.Event()
    node = Node(tmp_path, "w-b")
    on_piece = small.on_piece

    async def slow(request: Any, body: bytes) -> bytes:
        asked.append(request.match_info["digest"])
        if request.match_info["digest"] in digests(manifest, "planes"):
            await late.wait()
        return bytes(await on_piece(request, body))

    small.on_piece = slow
    with nodes_running(node):
        fill(node, small, 0)
        async with running(settings_for(small, state_dir)) as (runtime, _):
            await until(lambda: asked, "HTTPS")
            small.peers = (named(node, state_dir),)
            peer = named(node, state_dir)
            runtime._peers.meet("job", [(peer, (node.address.host, node.address.port))])
            await until(lambda: digests(manifest, "planes") <= on_disk(state_dir), "the pieces")
            late.set()
            await until(lambda: small.confirms, "version 0")
    keyframe = next(edge for edge in manifest.edges if edge.encoding == "planes")
    confirm = small.confirms[0]
    assert confirm.fetched_from_peers_bytes == keyframe.size
    over_https = sum(piece.size for piece in manifest.pieces([keyframe]) if piece.digest in asked)
    assert confirm.fetched_bytes == keyframe.size + over_https
    assert len(set(asked) & digests(manifest, "planes")) < len(keyframe.pieces)


async def test_what_is_being_encoded_is_left_to_peers_where_there_are_some(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """The coordinator's uplink is not for what the swarm carries."""
    state_dir = tmp_path / "worker"
    base = small.publish(make_next(0), 0)
    node = Node(tmp_path, "w-b")
    with nodes_running(node):
        fill(node, small, 0)
        small.peers = (named(node, state_dir),)
        async with running(settings_for(small, state_dir)) as (runtime, _):
            await until(lambda: small.confirms, "version 0")
            await until(lambda: runtime._peers.is_connected("job"), "the connection")
            small.encode(make_next(1), 1, base=0)
            transfer = small.manifests[1].edges[0].transfer
            small.forthcoming = (wire.Forthcoming(job_id="job", version=1, base_digest=base.digest, transfer=transfer),)
            before = small.requests["piece"]
            beats = len(small.beats)
            await until(lambda: len(small.beats) > beats + 3, "beats with the news")
            assert small.requests["batches"] == 0
            assert small.requests["piece"] == before


async def test_the_limit_down_holds_over_https(small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until) -> None:
    small.publish(make_next(0), 0)
    rate = 250_000.0
    begun: list[float] = []
    small.before = lambda route, request: begun.append(time.monotonic()) if route == "piece" else None
    link = LinkSettings(down_bytes_per_s=rate)
    async with running(settings_for(small, tmp_path / "worker", link=link)):
        await until(lambda: small.confirms, "version 0", limit_s=20.0)
    size = small.confirms[0].fetched_bytes
    assert size > 400_000
    assert time.monotonic() - begun[0] > 0.9 * (size - (64 << 10)) / rate


async def test_pieces_in_the_store_are_kept_while_peers_exchange_them(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """A fetch makes room: what a running transfer brought ahead stays, what nothing names goes."""
    state_dir = tmp_path / "worker"
    small.publish(make_next(0), 0)
    node = Node(tmp_path, "w-b")
    with nodes_running(node):
        fill(node, small, 0)
        small.peers = (named(node, state_dir),)
        async with running(settings_for(small, state_dir)):
            await until(lambda: small.confirms, "version 0")
            for number in (1, 2):
                small.encode(make_next(number), number, base=number - 1)
            small.hops = small.hops[:-1]  # version 2 by version 1 is on its way, and not announced
            fill(node, small, 1)
            ahead = digests(small.manifests[1], "delta")
            await until(lambda: ahead <= on_disk(state_dir), "the delta ahead")
            left = name(b"left by nobody knows whom")
            PieceStore(state_dir / "weights" / "pieces").put(left, b"left by nobody knows whom")
            small.newest = 1
            await until(lambda: small.confirms[-1].version == 1, "version 1")
            assert left.digest not in on_disk(state_dir)
            assert ahead <= on_disk(state_dir)


async def offered(runtime: Runtime, coordinator: Any, number: int) -> Version:
    version = Version("job", number, coordinator.manifests[number].digest)
    await runtime._swarm.offer(version, epoch=runtime._epoch)
    return version


def bring(runtime: Runtime, version: Version) -> Awaitable[Any]:
    return runtime._swarm.bring(version, epoch=lambda: runtime._epoch, on_progress=lambda here, total: None)


async def test_versions_that_cannot_be_applied_do_not_fill_the_disk(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes whole from a peer and is not applied; of the earlier ones nothing is left, and no transfer goes on."""
    state_dir = tmp_path / "worker"
    small.publish(make_next(0), 0)
    node = Node(tmp_path, "w-b")

    def fails(_manifest: Any, path: Any, store: Any, *_: Any, **__: Any) -> None:
        for hop in path:
            for piece in hop.edge.pieces:
                store.read(piece.digest)
        raise ApplyFailed("other bits came out")

    with nodes_running(node):
        fill(node, small, 0)
        small.peers = (named(node, state_dir),)
        async with running(settings_for(small, state_dir)) as (runtime, _):
            await until(lambda: small.confirms, "version 0")
            monkeypatch.setattr(swarm, "assemble", fails)
            for number in range(1, 6):
                small.encode(make_next(number), number, base=0)
                fill(node, small, number)
                version = await offered(runtime, small, number)
                with pytest.raises(ApplyFailed):
                    await bring(runtime, version)
                delta = digests(small.manifests[number], "delta")
                assert delta <= on_disk(state_dir)
                assert on_disk(state_dir) <= all_digests(small.manifests[0]) | all_digests(small.manifests[number])
            kept = {one.version for one in runtime._peers.state().transfers}
            assert kept <= {0, 5}


async def test_a_version_whose_turn_comes_late_is_brought_all_the_same(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """Four newer ones are offered meanwhile; one that was never offered is a failed fetch and no more."""
    small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        for number in range(1, 6):
            small.encode(make_next(number), number, base=0)
        first = await offered(runtime, small, 1)
        async with runtime._swarm._turn:
            late = asyncio.ensure_future(bring(runtime, first))
            for number in range(2, 6):
                await offered(runtime, small, number)
        assert (await late).version == first
        with pytest.raises(FetchFailed, match="not at hand any more"):
            await bring(runtime, Version("job", 1, "0" * 64))


async def test_a_fetch_that_fails_ends_the_assembly_and_doubts_nothing(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are decoded as they come; when no more come, what was begun is removed and the path is as good as before."""
    small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        small.encode(make_next(1), 1, base=0)
        version = await offered(runtime, small, 1)
        begun = asyncio.Event()

        async def fails(*_: Any, **__: Any) -> None:
            await until(lambda: list((tmp_path / "worker" / "weights" / "versions").glob(".*.tmp")), "the assembly")
            begun.set()
            raise FetchFailed("nobody has it")

        monkeypatch.setattr(runtime._swarm, "_fetch", fails)
        with pytest.raises(FetchFailed, match="nobody has it"):
            await bring(runtime, version)
        assert begun.is_set()
        assert not list((tmp_path / "worker" / "weights" / "versions").glob(".*.tmp"))
        assert not runtime._swarm._doubted
        monkeypatch.undo()
        assert (await bring(runtime, version)).version == version


@pytest.mark.parametrize(
    ("cause", "is_doubted", "blame"),
    [
        (None, True, ""),
        (OSError(errno.ENOSPC, "No space left on device"), False, "worker"),
        (PieceCorrupt("piece 0 was damaged on disk and is removed: fetch it again"), False, "worker"),
    ],
)
async def test_an_assembly_that_fails_ends_the_fetch_at_once(
    small: Any,
    make_next: Callable[[int], Path],
    tmp_path: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    cause: Exception | None,
    is_doubted: bool,
    blame: str,
) -> None:
    """While the coordinator still owes pieces, which never come. Nobody else is to blame where this machine's disk is."""
    small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        small.encode(make_next(1), 1, base=0)
        version = await offered(runtime, small, 1)
        asked, is_over = asyncio.Event(), asyncio.Event()
        on_piece = small.on_piece

        async def never(request: Any, body: bytes) -> bytes:
            if request.match_info["digest"] in digests(small.manifests[1], "delta"):
                asked.set()
                await is_over.wait()
            return bytes(await on_piece(request, body))

        loop = asyncio.get_running_loop()

        def fails(*_: Any, **__: Any) -> None:
            asyncio.run_coroutine_threadsafe(asked.wait(), loop).result(10)
            raise ApplyFailed("shard 0 does not fit") from cause

        small.on_piece = never
        monkeypatch.setattr(swarm, "assemble", fails)
        with pytest.raises(ApplyFailed, match="shard 0 does not fit") as caught:
            async with asyncio.timeout(10):
                await bring(runtime, version)
        assert bool(runtime._swarm._doubted) == is_doubted
        assert swarm.blame_for(caught.value) == blame
        assert not runtime._peers.state().transfers
        is_over.set()
        small.on_piece = on_piece
        monkeypatch.undo()
        assert (await bring(runtime, version)).version == version


async def test_a_fetch_that_is_given_up_before_its_turn_asks_for_no_piece(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """It waits behind another one; brought again later, it comes."""
    small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        for number in (1, 2):
            small.encode(make_next(number), number, base=0)
        first, second = [await offered(runtime, small, number) for number in (1, 2)]
        before = small.requests["piece"]
        async with runtime._swarm._turn:
            waits = asyncio.ensure_future(bring(runtime, first))
            await asyncio.sleep(0)
            runtime._swarm.stop_fetch(first)
        with pytest.raises(FetchFailed, match="given up"):
            await waits
        assert small.requests["piece"] == before
        assert not runtime._swarm._doubted
        assert (await bring(runtime, second)).version == second
        assert (await bring(runtime, first)).version == first


async def test_a_path_whose_base_was_dropped_while_it_was_applied_is_not_doubted(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker let go of version 0 itself: nothing is wrong with the edge."""
    small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        small.encode(make_next(1), 1, base=0)
        version = await offered(runtime, small, 1)
        loop, zero = asyncio.get_running_loop(), Version("job", 0, small.manifests[0].digest)

        def dropped(*_: Any, **__: Any) -> None:
            asyncio.run_coroutine_threadsafe(runtime._swarm.drop([zero]), loop).result(10)
            raise ApplyFailed("the base is gone")

        monkeypatch.setattr(swarm, "assemble", dropped)
        with pytest.raises(ApplyFailed, match="the base is gone"):
            await bring(runtime, version)
        assert not runtime._swarm._doubted


async def test_a_path_whose_base_was_dropped_meanwhile_is_asked_for_again(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """Version 2 was offered by a delta from 0; its turn comes when 1 is held and 0 is gone."""
    small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        for number in (1, 2):
            small.encode(make_next(number), number, base=0)
        second = await offered(runtime, small, 2)
        await bring(runtime, await offered(runtime, small, 1))
        await runtime._swarm.drop([Version("job", 0, small.manifests[0].digest)])
        first = Base(1, small.manifests[1].digest, small.directories[1])
        small.hops += Encoder(small.store_dir).add_edges(small.directories[2], small.manifests[2], bases=[first])
        asked = small.requests["manifest"]
        assert (await bring(runtime, second)).version == second
        assert small.requests["manifest"] == asked + 1


async def test_nothing_is_fetched_while_pieces_ahead_are_removed(
    small: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch counts what is in the store: it begins before the clean-up or after it."""
    base = small.publish(make_next(0), 0)
    async with running(settings_for(small, tmp_path / "worker")) as (runtime, _):
        await until(lambda: small.confirms, "version 0")
        small.encode(make_next(1), 1, base=0)
        version = await offered(runtime, small, 1)
        go = asyncio.Event()

        async def start(*_: Any, **__: Any) -> None:
            await go.wait()

        monkeypatch.setattr(runtime._swarm._prefetch, "start", start)
        news = Forthcoming("job", 2, base.digest, "a" * 64)
        ahead = asyncio.create_task(runtime._swarm.prefetch(news, epoch=lambda: runtime._epoch))
        await until(runtime._swarm._turn.locked, "the clean-up")
        pieces = small.requests["piece"]
        fetch = asyncio.ensure_future(bring(runtime, version))
        await asyncio.sleep(0.2)
        assert small.requests["piece"] == pieces
        go.set()
        await ahead
        assert (await fetch).version == version
