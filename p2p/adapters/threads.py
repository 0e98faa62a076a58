"""Shards through the codec in several threads, in order, with bounded memory. The codec's work runs without the interpreter's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from p2p.codec import delta
from p2p.codec.delta import Delta
from p2p.codec.layout import Base, Bytes, Chunk, Shard
from p2p.codec.lowrank import LowRank
from p2p.codec.records import Record

In = TypeVar("In")
Out = TypeVar("Out")


def in_order(work: Callable[[In], Out], items: Iterable[In], threads: int) -> Iterator[Out]:
    """`work` of each item, in their order, as soon as it is there. At most threads + 1 items are held; the items are drawn here.

    A failure of `work` or of the items is raised in its place; what was begun ends first.
    """
    source = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="codec") as pool:
        begun: deque[Future[Out]] = deque()
        try:
            for item in source:
                begun.append(pool.submit(work, item))
                if len(begun) > threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for one in begun:
                one.cancel()


def encode_threads(shards: Iterable[tuple[Shard, Bytes]], base: Base, *, effort: Delta, threads: int) -> Iterator[Chunk]:
    """What `effort.encode` gives, byte for byte, from `threads` threads. `base` is asked in the calling thread."""

    def work(item: tuple[Shard, Bytes, Bytes]) -> tuple[Shard, Record]:
        shard, old, new = item
        return shard, effort.record(shard, old, new)

    for shard, record in in_order(work, ((shard, base(shard), new) for shard, new in shards), threads):
        yield from record.chunks(shard)


def encode_lowrank_threads(shards: Iterable[tuple[Shard, Bytes]], base: Base, *, edge: LowRank, threads: int) -> Iterator[Chunk]:
    """What `edge.encode` gives, byte for byte; the shards are checked in `threads` threads, behind the factors. Raises ApplyFailed."""

    def work(item: tuple[Shard, Bytes, Bytes]) -> Shard:
        shard, old, new = item
        edge.check(shard, old, new)
        return shard

    yield edge.head()
    for shard in in_order(work, ((shard, base(shard), new) for shard, new in shards), threads):
        yield from edge.records(shard)


def decode_threads(chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base, *, threads: int) -> Iterator[Bytes]:
    """What `Delta.decode` gives, from `threads` threads. Raises ApplyFailed."""

    def work(item: tuple[str, Shard, Record, Bytes]) -> Bytes:
        place, shard, record, old = item
        return delta.new_bytes(shard, record, old, place)

    held = ((place, shard, record, base(shard)) for place, shard, record in delta.read_records(chunks, plan))
    return in_order(work, held, threads)
