"""Fetching: drives the machine in `domain.fetching` with real sources, verifies each piece and stores it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import PieceStore
from p2p.domain.fetching import Arrived, Event, Failed, Fetching, FetchLimits, Request, Tick
from p2p.domain.manifest import Piece
from p2p.errors import FetchFailed, PieceAbsent, PieceCorrupt

__all__ = ["FetchReport", "PieceSource", "assemble", "fetch"]

Progress = Callable[[int, int], None]
OnPiece = Callable[[Piece], None]


class PieceSource(Protocol):
    """A place that pieces come from. What it sends is verified by whoever asked."""

    @property
    def name(self) -> str:
        """Who this is, unique among the sources of a fetch."""
        ...

    async def read(self, piece: Piece) -> bytes:
        """The piece's bytes; never more than its size in memory.

        Raises PieceAbsent if it is not there now, PieceCorrupt if other bytes came, anything else for other failures.
        """
        ...


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What a fetch cost. Pieces that were on disk already appear in no source's bytes."""

    bytes_by_source: dict[str, int]
    seconds: float
    retries: int  # requests that ended without their piece


async def fetch(
    needed: Sequence[Piece],
    sources: Sequence[PieceSource],
    store: PieceStore,
    *,
    no_progress_s: float = 30.0,
    on_progress: Progress | None = None,
    on_piece: OnPiece = lambda _: None,
    origins: Collection[str] = (),
) -> FetchReport:
    """Bring every needed piece (each named once) into the store; those already there are not asked for.

    `on_progress(bytes here, bytes needed)` is called at the start and after each piece, `on_piece` for each that is in the store. `origins` names the sources to spare
    while others can serve. Raises FetchFailed: no piece for `no_progress_s`, or the store cannot write. Cancelling is safe.
    """
    missing = await asyncio.to_thread(lambda: [piece for piece in needed if not store.has(piece.digest)])
    total, left = _bytes(needed), _bytes(missing)
    limits = FetchLimits(no_progress_s=no_progress_s)
    by_name = {source.name: source for source in sources}
    machine = Fetching(missing, by_name, now=time.monotonic(), limits=limits, origins=origins, salt=secrets.token_hex(8))
    return await _Fetch(machine, by_name, store, _Told(on_progress or _ignore, on_piece), total, total - left).run()


@dataclass(frozen=True, slots=True)
class _Told:
    """Who hears of what came."""

    progress: Progress
    piece: OnPiece


class _Fetch:
    """The running requests of one fetch."""

    def __init__(
        self,
        machine: Fetching,
        sources: dict[str, PieceSource],
        store: PieceStore,
        told: _Told,
        total: int,
        here: int,
    ) -> None:
        self._machine = machine
        self._sources = sources
        self._store = store
        self._told = told
        self._total = total
        self._here = here
        self._running: dict[Request, asyncio.Task[Event]] = {}
        self._dropped: set[asyncio.Task[Event]] = set()
        self._bytes: Counter[str] = Counter()
        self._retries = 0

    async def run(self) -> FetchReport:
        """Until every piece is here. No request outlives the call."""
        started = time.monotonic()
        self._told.progress(self._here, self._total)
        try:
            while not self._machine.done:
                now = time.monotonic()
                self._cancel(self._machine.handle(Tick(), now))
                for request in self._machine.next_requests(now):
                    self._running[request] = asyncio.create_task(self._attempt(request))
                await self._wait()
        finally:
            await _end([*self._running.values(), *self._dropped])
        return FetchReport(dict(self._bytes), time.monotonic() - started, self._retries)

    async def _wait(self) -> None:
        """Sleep until a request ends or the machine's next deadline, and tell the machine."""
        deadline = self._machine.next_deadline()
        timeout = max(0.0, (deadline if deadline is not None else 0.0) - time.monotonic())
        if self._running:
            await asyncio.wait(self._running.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout)
        for request, task in list(self._running.items()):
            if task.done() and self._running.pop(request, None) is not None:
                self._take(task.result())

    def _take(self, event: Event) -> None:
        """Count an outcome and report it to the machine."""
        match event:
            case Arrived(request):
                self._bytes[request.source] += request.piece.size
                self._here = min(self._here + request.piece.size, self._total)
                self._told.piece(request.piece)
                self._told.progress(self._here, self._total)
            case Failed():
                self._retries += 1
        self._cancel(self._machine.handle(event, time.monotonic()))

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            task = self._running.pop(request, None)
            if task is not None:
                task.cancel()
                self._dropped.add(task)
                task.add_done_callback(self._dropped.discard)
                self._retries += 1

    async def _attempt(self, request: Request) -> Event:
        """One request, from asking to storing."""
        try:
            data = await self._sources[request.source].read(request.piece)
        except PieceAbsent as error:
            return Failed(request, "absent", str(error))
        except PieceCorrupt as error:
            return Failed(request, "corrupt", str(error))
        except Exception as error:
            return Failed(request, "failed", f"{type(error).__name__}: {error}")
        try:
            await asyncio.to_thread(self._store.put, request.piece, data)
        except PieceCorrupt as error:
            return Failed(request, "corrupt", str(error))
        except OSError as error:
            raise FetchFailed(
                f"piece {request.piece.digest} cannot be stored in {self._store.root}: {error}; free some space"
            ) from error
        return Arrived(request)


def _bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def _ignore(_here: int, _total: int) -> None:
    """Progress that nobody watches."""


async def _end(tasks: list[asyncio.Task[Event]]) -> None:
    """Cancel and see off."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
