"""Real sockets on loopback: who is served, who is cut off, and how fetches get through faults."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from yarl import URL

from p2p.adapters.fetch import assemble, fetch
from p2p.adapters.peer import Patience, PeerInfo, PeerLimits, PeerServer, PeerSource
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.snapshot_dir import digest_of
from p2p.adapters.tls import pinned_client
from p2p.codec import pieces
from p2p.domain.manifest import Manifest, Piece
from p2p.domain.tickets import Ticket, prove, sign_ticket
from p2p.errors import FetchFailed, PieceAbsent, PieceCorrupt, TicketError
from tests.factories_p2p import by, publish

COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
FETCHER = Ed25519PrivateKey.from_private_bytes(b"\x02" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"\x03" * 32)
LOOPBACK = ["127.0.0.0/8"]
NOW = 500.0
LIMITS = PeerLimits()


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


TICKET = Ticket("t-1", "w-a", public(FETCHER), "w-b", "job", 1000)


@asynccontextmanager
async def serving(
    store: PieceStore, *, worker_id: str = "w-b", limits: PeerLimits = LIMITS
) -> AsyncIterator[tuple[PeerServer, PeerInfo]]:
    server = PeerServer(
        store,
        worker_id=worker_id,
        coordinator_public_key=public(COORDINATOR),
        host="127.0.0.1",
        port=0,
        clock=lambda: NOW,
        limits=limits,
    )
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.close()


def source(
    address: PeerInfo, ticket: Ticket = TICKET, *, signer: Ed25519PrivateKey = COORDINATOR, key: Ed25519PrivateKey = FETCHER
) -> PeerSource:
    return PeerSource(
        address, sign_ticket(signer, ticket), key, allowed_networks=LOOPBACK, clock=lambda: NOW, patience=Patience(2, 2)
    )


@pytest.fixture
def origin(made: ModuleType, tmp_path: Path) -> tuple[Manifest, PieceStore]:
    """A version of 3 MB in twelve raw pieces, with its store."""
    model = made.write_model(tmp_path / "model", {"w": made.weights((1500, 1024)), "n": made.bits("F32", (9,))})
    return publish(model, tmp_path / "origin", job_id="job", version=1, canary_ids=()), PieceStore(tmp_path / "origin")


async def test_a_second_node_takes_most_bytes_from_the_first(
    made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path
) -> None:
    manifest, store = origin
    edge = manifest.edges[0]
    coordinator = made.StoreSource("coordinator", store)
    first, second = (PieceStore(tmp_path / name, files=UNSYNCED_FILES) for name in ("first", "second"))
    one = await fetch(manifest.pieces([edge]), [coordinator], first, no_progress_s=10, origins={"coordinator"})
    assert one.bytes_by_source.keys() == {"coordinator"}

    async def paced(piece: Piece) -> bytes:
        await asyncio.sleep(0.05)  # the coordinator is farther away than the peer
        data: bytes = await made.StoreSource.read(coordinator, piece)
        return data

    coordinator.read = paced
    async with serving(first) as (server, address), source(address) as peer:
        two = await fetch(manifest.pieces([edge]), [peer, coordinator], second, no_progress_s=10, origins={"coordinator"})
    needed = sum(piece.size for piece in manifest.pieces([edge]))
    assert two.bytes_by_source["w-b"] > needed / 2
    assert server.bytes_sent >= two.bytes_by_source["w-b"]
    assemble(manifest, by(manifest, edge), second, tmp_path / "out")
    assert digest_of(tmp_path / "out") == manifest.digest


@pytest.mark.parametrize(
    ("ticket", "signer", "key", "words"),
    [
        (replace(TICKET, server="w-c"), COORDINATOR, FETCHER, "is for peer w-c"),
        (replace(TICKET, expires_at=499), COORDINATOR, FETCHER, "expired"),
        (TICKET, OTHER, FETCHER, "not signed by this peer's coordinator"),
        (TICKET, COORDINATOR, OTHER, "not the signature of w-a"),
    ],
    ids=["for another peer", "expired", "forged", "stolen"],
)
async def test_other_tickets_are_refused(
    origin: tuple[Manifest, PieceStore], ticket: Ticket, signer: Ed25519PrivateKey, key: Ed25519PrivateKey, words: str
) -> None:
    manifest, store = origin
    async with serving(store) as (server, address), source(address, ticket, signer=signer, key=key) as peer:
        with pytest.raises(FetchFailed, match=f"answers 403: .*{words}"):
            await peer.read(manifest.edges[0].pieces[0])
    assert server.bytes_sent == 0


async def ask(address: PeerInfo, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        url = URL(f"https://127.0.0.1:{address.port}{path}", encoded=True)
        async with session.request(method, url, headers=headers, ssl=pinned_client(address.certificate_sha256)) as response:
            return response.status, await response.text(errors="replace")


def headers(path: str, *, time_sent: str = "500", job: str = "job") -> dict[str, str]:
    text = sign_ticket(COORDINATOR, replace(TICKET, job_id=job))
    return {
        "Echo2-Ticket": text,
        "Echo2-Time": time_sent,
        "Echo2-Proof": prove(FETCHER, text, path, int(time_sent) if time_sent.isdigit() else 0),
    }


async def test_requests_that_are_not_for_a_piece_are_refused(origin: tuple[Manifest, PieceStore]) -> None:
    manifest, store = origin
    path = f"/pieces/job/{manifest.edges[0].pieces[0].digest}"
    async with serving(store) as (_, address):
        assert (await ask(address, path, {}))[0] == 403
        assert (await ask(address, path, headers(path)))[0] == 200
        assert (await ask(address, path, headers(path), "POST"))[0] == 405
        for other, status in [("/pieces/job/nonsense", 400), ("/pieces/job/%2e%2e%2ftls%2fcertificate.key", 400), ("/", 403)]:
            assert (await ask(address, other, headers(other)))[0] == status
        for time_sent, words in [
            ("", "whole Unix seconds"),
            ("١٢٣", "whole Unix"),
            ("9" * 13, "whole Unix"),
            ("900", "off this peer's clock"),
        ]:
            assert (status_and_words := await ask(address, path, headers(path, time_sent=time_sent)))[0] == 403
            assert words in status_and_words[1]
        status, text = await ask(address, path, headers(path, job="another"))
        assert status == 403
        assert "is for pieces of job another" in text
        status, text = await ask(address, path, headers("/pieces/job/" + "0" * 64))
        assert status == 403
        assert "not the signature" in text


async def test_a_server_with_another_certificate_is_not_spoken_to(origin: tuple[Manifest, PieceStore]) -> None:
    manifest, store = origin
    async with serving(store) as (server, address), source(replace(address, certificate_sha256="0" * 64)) as peer:
        with pytest.raises(aiohttp.ServerFingerprintMismatch):
            await peer.read(manifest.edges[0].pieces[0])
    assert server.bytes_sent == 0


async def test_tls_below_1_3_is_refused(origin: tuple[Manifest, PieceStore]) -> None:
    _, store = origin
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(store) as (_, address):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", address.port, ssl=context)


async def test_bad_addresses_and_tickets_are_refused_before_dialling() -> None:
    text = sign_ticket(COORDINATOR, TICKET)
    for address, words in [
        (PeerInfo("127.0.0.1", 4000, "0" * 64), "w-b is not dialled: 127.0.0.1 is not a public"),
        (PeerInfo("example.org", 4000, "0" * 64), "not an IP address literal"),
        (PeerInfo("8.8.8.8", 22, "0" * 64), "port 22"),
        (PeerInfo("8.8.8.8", 4000, "00"), "names the certificate '00'"),
        (PeerInfo("8.8.8.8", 4000, "zz"), "names the certificate 'zz'"),
    ]:
        with pytest.raises(FetchFailed, match=words):
            PeerSource(address, text, FETCHER)
    with pytest.raises(TicketError):
        PeerSource(PeerInfo("8.8.8.8", 4000, "0" * 64), "no ticket", FETCHER)


@asynccontextmanager
async def answering(tmp_path: Path, reply: bytes, *, pause_s: float = 0.0) -> AsyncIterator[PeerInfo]:
    """A peer under a proper certificate that sends the same bytes to whoever asks, one at a time if `pause_s`."""
    from p2p.adapters.tls import self_signed, server_context

    certificate, key, digest = self_signed(tmp_path / "liar", ["127.0.0.1"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for start in range(0, len(reply), step := 1 if pause_s else 1 << 16):
                writer.write(reply[start : start + step])
                await writer.drain()
                await asyncio.sleep(pause_s)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_context(certificate, key))
    try:
        yield PeerInfo("127.0.0.1", server.sockets[0].getsockname()[1], digest)
    finally:
        server.close()
        await server.wait_closed()


def reply(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode() + body


LIES = {
    "too long": reply(bytes(2000), "Content-Length: 2000"),
    "too short": reply(bytes(10), "Content-Length: 10"),
    "says more than it sends": reply(bytes(10), "Content-Length: 1000"),
    "endless": reply(b"ffff\r\n" + bytes(0xFFFF) + b"\r\n", "Transfer-Encoding: chunked"),
    "redirect": reply(b"", "Location: http://169.254.169.254/", "Content-Length: 0", status="302 Found"),
    "compressed": reply(bytes(30), "Content-Length: 30", "Content-Encoding: gzip"),
    "no HTTP": b"\0" * 1000,
    "refusal without end": reply(b"x" * 100_000, "Content-Length: 1000000", status="500 Oops"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_peer_costs_an_error_in_words(tmp_path: Path, lie: str) -> None:
    async with answering(tmp_path, LIES[lie]) as address, source(address) as peer:
        with pytest.raises((FetchFailed, PieceCorrupt, aiohttp.ClientError)) as raised:
            await peer.read(pieces.name(b"x" * 1000))
        assert str(raised.value)


async def test_a_silent_peer_is_given_up(tmp_path: Path) -> None:
    async with answering(tmp_path, LIES["says more than it sends"], pause_s=30) as address, source(address) as peer:
        with pytest.raises((TimeoutError, aiohttp.ClientError)):
            await peer.read(pieces.name(b"x" * 1000))


async def test_a_trickling_peer_is_left_for_another(made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    slow = reply(bytes(256 << 10), f"Content-Length: {256 << 10}")
    async with answering(tmp_path, slow, pause_s=0.05) as address, source(address) as peer:
        mine = PieceStore(tmp_path / "mine", files=UNSYNCED_FILES)
        report = await fetch(manifest.pieces([manifest.edges[0]]), [peer, made.StoreSource("other", store)], mine, no_progress_s=3)
        assert report.bytes_by_source.keys() == {"other"}
        with pytest.raises(FetchFailed, match=r"no piece arrived for 1 s.*w-b: no answer yet|w-b: no answer within"):
            await fetch(manifest.pieces([manifest.edges[1]]), [peer], PieceStore(tmp_path / "none"), no_progress_s=1)


async def test_a_peer_that_dies_in_the_middle_is_replaced(
    made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path
) -> None:
    manifest, store = origin
    mine = PieceStore(tmp_path / "mine", files=UNSYNCED_FILES)
    spare = made.StoreSource("spare", PieceStore(tmp_path / "empty"))
    async with (
        serving(store, limits=PeerLimits(bytes_per_s=4e6, burst_bytes=1 << 16)) as (server, address),
        source(address) as peer,
    ):

        def watch(here: int, total: int) -> None:
            if here > total / 3 and spare.store is not store:
                spare.store = store
                closing.append(asyncio.create_task(server.close()))

        closing: list[asyncio.Task[None]] = []
        report = await fetch(manifest.pieces([manifest.edges[0]]), [peer, spare], mine, no_progress_s=10, on_progress=watch)
        await asyncio.gather(*closing)
    assert report.bytes_by_source["w-b"] > 0
    assert report.bytes_by_source["spare"] > 0
    assemble(manifest, by(manifest, manifest.edges[0]), mine, tmp_path / "out")
    assert digest_of(tmp_path / "out") == manifest.digest


async def test_the_upload_rate_is_kept(origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    started = time.monotonic()
    async with serving(store, limits=PeerLimits(bytes_per_s=6e6, burst_bytes=64 << 10)) as (_, address), source(address) as peer:
        await fetch(manifest.pieces([manifest.edges[0]]), [peer], PieceStore(tmp_path / "mine", files=UNSYNCED_FILES), no_progress_s=10)
    assert time.monotonic() - started > 0.9 * (manifest.edges[0].size - (64 << 10)) / 6e6


async def test_requests_above_the_bound_are_put_off_without_blame(origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    piece = manifest.edges[0].pieces[0]
    limits = PeerLimits(requests_per_fetcher=1, bytes_per_s=100e3, burst_bytes=1)
    async with serving(store, limits=limits) as (_, address), source(address) as peer:
        slow = asyncio.create_task(peer.read(piece))
        await asyncio.sleep(0.2)
        with pytest.raises(PieceAbsent, match="as many requests as it may"):
            await peer.read(piece)
        assert len(await slow) == piece.size
        assert len(await peer.read(piece)) == piece.size


async def test_connections_are_bounded_in_number_and_without_a_ticket_in_time(origin: tuple[Manifest, PieceStore]) -> None:
    manifest, store = origin
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with serving(store, limits=PeerLimits(connections=2, first_request_s=0.5)) as (_, address):
        held = [await asyncio.open_connection("127.0.0.1", address.port, ssl=context) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", address.port, ssl=context)
        assert await reader.read() == b""
        writer.close()
        for reader, writer in held:
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        async with source(address) as peer:
            assert await peer.read(manifest.edges[0].pieces[0])
            await asyncio.sleep(0.7)
            assert await peer.read(manifest.edges[0].pieces[1])  # its connection stays


async def test_connections_of_one_fetcher_are_bounded(origin: tuple[Manifest, PieceStore]) -> None:
    manifest, store = origin
    piece = manifest.edges[0].pieces[0]
    async with (
        serving(store, limits=PeerLimits(connections_per_fetcher=1)) as (_, address),
        source(address) as one,
        source(address) as two,
    ):
        assert await one.read(piece)
        with pytest.raises(PieceAbsent, match="as many as it may"):
            await two.read(piece)
        await one.close()
        await asyncio.sleep(0.2)
        assert await two.read(piece)


async def test_a_slow_reader_is_cut_off(origin: tuple[Manifest, PieceStore]) -> None:
    manifest, store = origin
    piece = manifest.edges[0].pieces[0]
    async with (
        serving(store, limits=PeerLimits(send_s=0.3, bytes_per_s=100e3, burst_bytes=1)) as (server, address),
        source(address) as peer,
    ):
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await peer.read(piece)
    assert server.bytes_sent < piece.size


def child(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(publish.__code__.co_filename).parents[2])}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_publishing_in_a_child_process_gives_the_same_manifest(origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    arguments = [
        "-m",
        "p2p.adapters.publish",
        str(tmp_path / "model"),
        str(tmp_path / "child"),
        "--job-id",
        "job",
        "--version",
        "1",
    ]
    process = child(*arguments)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert Manifest.from_json(out.strip()) == manifest
    assert set(PieceStore(tmp_path / "child").digests()) == set(store.digests())


FETCHING = """
import asyncio, sys, time
from pathlib import Path
from p2p.adapters.fetch import fetch
from p2p.adapters.piece_store import PieceStore
from p2p.domain.manifest import Manifest

class Slow:
    name = "slow"
    store = PieceStore(Path(sys.argv[2]))
    async def read(self, piece):
        await asyncio.sleep(0.3)
        return self.store.read(piece.digest)

manifest = Manifest.from_json(Path(sys.argv[1]).read_text())
tell = lambda here, total: print(here, flush=True)
asyncio.run(fetch(manifest.pieces([manifest.edges[0]]), [Slow()], PieceStore(Path(sys.argv[3])), on_progress=tell))
"""


async def test_a_fetch_that_was_killed_resumes(made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    process = child("-c", FETCHING, str(tmp_path / "manifest.json"), str(store.root), str(tmp_path / "mine"))
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    mine = PieceStore(tmp_path / "mine")
    mine.sweep()
    had = {digest: len(mine.read(digest)) for digest in mine.digests()}
    assert 2 <= len(had) < len(manifest.pieces([manifest.edges[0]]))
    report = await fetch(manifest.pieces([manifest.edges[0]]), [made.StoreSource("origin", store)], mine, no_progress_s=10)
    assert sum(report.bytes_by_source.values()) + sum(had.values()) == sum(
        piece.size for piece in manifest.pieces([manifest.edges[0]])
    )
    assemble(manifest, by(manifest, manifest.edges[0]), mine, tmp_path / "out")


async def test_a_cancelled_fetch_leaves_no_request_and_resumes(
    made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path
) -> None:
    manifest, store = origin
    mine = PieceStore(tmp_path / "mine")
    async with serving(store, limits=PeerLimits(bytes_per_s=2e6, burst_bytes=1)) as (_, address), source(address) as peer:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fetch(manifest.pieces([manifest.edges[0]]), [peer], mine, no_progress_s=10), 0.8)
        assert len(asyncio.all_tasks()) == 1 or all("_attempt" not in repr(task) for task in asyncio.all_tasks())
    report = await fetch(manifest.pieces([manifest.edges[0]]), [made.StoreSource("origin", store)], mine, no_progress_s=10)
    assert 0 < sum(report.bytes_by_source.values()) < manifest.edges[0].size
