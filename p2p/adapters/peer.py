"""Pieces from worker to worker over HTTPS: the server beside a piece store, and the source that reads from one.

GET /pieces/{job}/{digest} with a ticket and its holder's proof (PROTOCOL.md). The connection is TLS 1.3 under exactly the
certificate that the coordinator named. Whoever shows no valid ticket is cut off; whoever does is bounded in requests, rate and time.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType

import aiohttp
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from yarl import URL

from p2p.adapters.piece_store import PieceStore
from p2p.adapters.tls import pinned_client, self_signed, server_context
from p2p.domain.addresses import PeerInfo, may_dial
from p2p.domain.bucket import TokenBucket
from p2p.domain.manifest import Piece
from p2p.domain.tickets import Ticket, check_proof, peek_ticket, prove, read_ticket
from p2p.errors import FetchFailed, PieceAbsent, PieceCorrupt, TicketError

TICKET, TIME, PROOF = "Echo2-Ticket", "Echo2-Time", "Echo2-Proof"
MAX_TIME_DIGITS = 12
BLOCK_BYTES = 64 << 10
READ_BYTES = 64 << 10

__all__ = ["PeerInfo", "PeerLimits", "PeerServer", "PeerSource"]


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """What a server gives away."""

    connections: int = 128  # more are closed at once
    requests: int = 32  # served at once, over all fetchers: bounds the memory for pieces
    requests_per_fetcher: int = 8
    connections_per_fetcher: int = 8
    bytes_per_s: float | None = None  # upload, over all fetchers; None: unbounded
    burst_bytes: int = 1 << 20
    first_request_s: float = 10.0  # a connection that showed no valid ticket by then is closed
    idle_s: float = 60.0
    send_s: float = 120.0  # to send one piece


class PeerServer:
    """Serves what the store holds to holders of tickets for `worker_id`. `clock` gives Unix seconds."""

    def __init__(
        self,
        store: PieceStore,
        *,
        worker_id: str,
        coordinator_public_key: str,
        host: str,
        port: int,
        clock: Callable[[], float] = time.time,
        limits: PeerLimits = PeerLimits(),
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._public_key = coordinator_public_key
        self._address = (host, port)
        self._clock = clock
        self._limits = limits
        self._serving: Counter[str] = Counter()  # requests by fetcher
        self._known: dict[web.RequestHandler, str] = {}  # open connection -> fetcher, once a ticket was valid
        self._bucket: TokenBucket | None = None
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None
        self.bytes_sent = 0

    async def start(self) -> PeerInfo:
        """Listen; port 0 takes a free one. The certificate is kept in the store's `tls` folder. Raises OSError."""
        certificate, key, fingerprint = await asyncio.to_thread(
            self_signed, self._store.root / "tls", [self._address[0], self._worker_id]
        )
        limits = self._limits
        if limits.bytes_per_s is not None:
            self._bucket = TokenBucket(limits.bytes_per_s, limits.burst_bytes, now=time.monotonic())
        web_server = web.Server(self._answer, keepalive_timeout=limits.idle_s, access_log=None)
        self._runner = web.ServerRunner(web_server, handle_signals=False)
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._accept(web_server),
            *self._address,
            ssl=server_context(certificate, key),
            ssl_handshake_timeout=limits.first_request_s,
            ssl_shutdown_timeout=1.0,
        )
        bound: socket.socket = self._server.sockets[0]
        return PeerInfo(self._address[0], bound.getsockname()[1], fingerprint)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._server is not None:
            await self._server.wait_closed()

    def _accept(self, server: web.Server) -> asyncio.Protocol:
        """A connection's protocol: one that closes it when there are too many, else aiohttp's with a time limit for a ticket."""
        if len(server.connections) >= self._limits.connections:
            return _Refusing()
        protocol = server()
        asyncio.get_running_loop().call_later(self._limits.first_request_s, self._drop_unknown, protocol)
        return protocol

    def _drop_unknown(self, protocol: web.RequestHandler) -> None:
        if protocol not in self._known and protocol.transport is not None:
            protocol.transport.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Check who asks, then serve within the bounds."""
        try:
            ticket = self._admit(request)
        except TicketError as error:
            return _closing(403, str(error))
        limits = self._limits
        if not self._knows(request.protocol, ticket.fetcher):
            return _closing(429, f"{ticket.fetcher} holds {limits.connections_per_fetcher} connections, as many as it may")
        if self._serving[ticket.fetcher] >= limits.requests_per_fetcher or self._serving.total() >= limits.requests:
            return web.Response(status=429, text=f"{self._worker_id} serves as many requests as it may; ask again in a second")
        self._serving[ticket.fetcher] += 1
        try:
            async with asyncio.timeout(limits.send_s):
                return await self._serve(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # half a body may be out: nothing more can be said
            return _closing(408, f"the piece was not taken within {limits.send_s:g} s")
        finally:
            self._serving[ticket.fetcher] -= 1
            self._serving += Counter()  # forgets fetchers at zero

    def _knows(self, protocol: web.RequestHandler, fetcher: str) -> bool:
        """Note whose connection this is; False if the fetcher has too many others."""
        self._known = {one: owner for one, owner in self._known.items() if one.transport is not None}
        others = sum(owner == fetcher and one is not protocol for one, owner in self._known.items())
        if others >= self._limits.connections_per_fetcher:
            return False
        self._known[protocol] = fetcher
        return True

    def _admit(self, request: web.BaseRequest) -> Ticket:
        """The valid ticket of a request. Raises TicketError."""
        now = self._clock()
        text = request.headers.get(TICKET, "")
        ticket = read_ticket(text, public_key=self._public_key, server=self._worker_id, now=now)
        sent = request.headers.get(TIME, "")
        if not (sent.isascii() and sent.isdigit() and len(sent) <= MAX_TIME_DIGITS):
            raise TicketError(f"header {TIME} is {sent[:20]!r}; it must be whole Unix seconds")
        check_proof(ticket, text, request.raw_path, time=int(sent), proof=request.headers.get(PROOF, ""), now=now)
        if not request.path.startswith(f"/pieces/{ticket.job_id}/"):
            raise TicketError(f"ticket {ticket.id} is for pieces of job {ticket.job_id}, not for {request.path[:120]}")
        return ticket

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send a piece, verified on the way out."""
        digest = request.path.rsplit("/", 1)[-1]
        if request.method != "GET":
            return _closing(405, "only GET is served here")
        try:
            data = await asyncio.to_thread(self._store.read, digest)
        except ValueError as error:
            return _closing(400, str(error))
        except (KeyError, PieceCorrupt):
            return web.Response(status=404, text=f"piece {digest} is not here")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(data)
        await response.prepare(request)
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            if self._bucket is not None:
                await asyncio.sleep(self._bucket.take(len(block), time.monotonic()))
            await response.write(block)
            self.bytes_sent += len(block)
        await response.write_eof()
        return response


class _Refusing(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _closing(status: int, text: str) -> web.Response:
    """A refusal that ends the connection."""
    response = web.Response(status=status, text=text)
    response.force_close()
    return response


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a fetcher waits for a connection, and for the next byte."""

    connect_s: float = 5.0
    silence_s: float = 15.0


PATIENCE = Patience()


class PeerSource:
    """A PieceSource: one peer, by one ticket, under its pinned certificate. Close it after use."""

    def __init__(
        self,
        address: PeerInfo,
        ticket: str,
        key: Ed25519PrivateKey,
        *,
        allowed_networks: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        patience: Patience = PATIENCE,
    ) -> None:
        """`key` is the fetcher's; the peer's id and the job are read from the ticket.

        Raises TicketError, and FetchFailed when the address may not be dialled (other than public networks only if they are
        in `allowed_networks`) or its certificate's digest is malformed.
        """
        self._name, self._job_id = (found := peek_ticket(ticket)).server, found.job_id
        refusal = may_dial(address.host, address.port, allowed_networks)
        if refusal is not None:
            raise FetchFailed(f"peer {self._name} is not dialled: {refusal}")
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._base = f"https://{host}:{address.port}"
        try:
            self._pin = pinned_client(address.certificate_sha256)
        except ValueError as error:
            raise FetchFailed(f"peer {self._name} names the certificate {address.certificate_sha256[:80]!r}: {error}") from error
        self._ticket = ticket
        self._key = key
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=patience.connect_s, sock_read=patience.silence_s)
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        """The peer's worker id."""
        return self._name

    async def read(self, piece: Piece) -> bytes:
        """Ask the peer; no more than the piece's size is read. Raises PieceAbsent, PieceCorrupt, FetchFailed, ClientError."""
        path = f"/pieces/{self._job_id}/{piece.digest}"
        async with self._opened().get(
            URL(self._base + path, encoded=True), headers=self._headers(path), allow_redirects=False
        ) as response:
            if response.status in (404, 429):  # not there now, or too busy: no fault
                raise PieceAbsent(f"{self._name} does not give piece {piece.digest} now: {await _words(response)}")
            if response.status != 200:
                raise FetchFailed(f"{self._name} answers {response.status}: {await _words(response)}")
            if response.content_length != piece.size:
                raise PieceCorrupt(f"{self._name} offers {response.content_length} bytes for a piece of {piece.size}")
            return await _exactly(response, piece.size)

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> PeerSource:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _headers(self, path: str) -> dict[str, str]:
        now = int(self._clock())
        return {
            TICKET: self._ticket,
            TIME: str(now),
            PROOF: prove(self._key, self._ticket, path, now),
            "Accept-Encoding": "identity",
        }

    def _opened(self) -> aiohttp.ClientSession:
        """The session, opened at the first request because it belongs to the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._pin, limit=8)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def _exactly(response: aiohttp.ClientResponse, size: int) -> bytes:
    """The body, which must have this size."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(READ_BYTES):
        body += chunk
        if len(body) > size:
            break
    if len(body) != size:
        raise PieceCorrupt(f"a piece of {size} bytes was asked, {len(body)} or more came")
    return bytes(body)


async def _words(response: aiohttp.ClientResponse) -> str:
    """The beginning of a refusal's text."""
    return (await response.content.read(400)).decode(errors="replace")
