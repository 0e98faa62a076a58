"""Snapshot reads on connections of their own, so that no reader waits for the writer or for another reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from coordinator.store.errors import StoreBusy, StoreEnded, StoreError
from coordinator.store.links import Link, connect
from coordinator.store.queries import Queries
from coordinator.store.transaction import Reading

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Bounds of the readers."""

    links: int = 4  # reads at once
    wait_s: float = 30.0  # for a free link
    read_s: float = 30.0  # one read may take this long: an old snapshot keeps the write-ahead log from shrinking
    end_s: float = 5.0  # for ending the transaction


class Readers:
    """A bounded pool of read links, opened when first needed and replaced when they break."""

    def __init__(self, engine: AsyncEngine, queries: Queries, limits: ReaderLimits) -> None:
        self._engine = engine
        self._queries = queries
        self._limits = limits
        self._free: asyncio.LifoQueue[Link | None] = asyncio.LifoQueue()
        for _ in range(limits.links):
            self._free.put_nowait(None)
        self._closed = False

    async def read(self, action: Callable[[Reading], Awaitable[T]]) -> T:
        """Run `action` on one snapshot. Raises what it raised, StoreBusy, or StoreEnded."""
        link = await self._take()
        try:
            if link is None:
                link = await connect(self._engine)
            return await self._run(link, action)
        except BaseException:
            link = await self._recover(link)
            raise
        finally:
            self._free.put_nowait(link)

    async def close(self) -> None:
        """Refuse further reads, wait for those that run, close the links."""
        self._closed = True
        for _ in range(self._limits.links):
            link = await self._free.get()
            if link is not None:
                await link.close()

    async def _take(self) -> Link | None:
        if self._closed:
            raise StoreEnded("the store was closed")
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await self._free.get()
        except TimeoutError:
            raise StoreBusy(f"{self._limits.links} reads run and none ended within {self._limits.wait_s} s") from None

    async def _run(self, link: Link, action: Callable[[Reading], Awaitable[T]]) -> T:
        reading = Reading(link, self._queries)
        try:
            async with asyncio.timeout(self._limits.read_s):
                await link.begin_read()
                result = await action(reading)
                await link.rollback()
        except TimeoutError as error:
            if str(error):
                raise
            raise StoreBusy(f"a read did not finish within {self._limits.read_s} s: ask for fewer rows") from None
        finally:
            reading.end("this read has ended: use the reader that the running action was given")
        return result

    async def _recover(self, link: Link | None) -> Link | None:
        """The link, fit for the next read; or None when it had to be given up."""
        if link is None:
            return None
        try:
            async with asyncio.timeout(self._limits.end_s):
                await link.rollback()
        except (StoreError, TimeoutError):
            pass
        else:
            if not link.is_closed():
                return link
        await link.close()
        return None
