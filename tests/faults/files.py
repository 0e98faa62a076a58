"""A disk that forgets what was not synced: a `FileLayer` over real files, with a model of what has reached the platter.

Programs see the real files, as through a page cache. `power_loss` then throws that view away and writes back one that a
disk could show after a crash, drawn by a seeded generator:

* a file's content is the last synced one, or any later write, whole or torn (a prefix, the rest zeros, or cut short);
* each name in a directory stands as last synced or as after any later change, independently of every other name;
* after a failed sync what was pending is lost for good, even though the next sync of the same thing reports success.

That is more than any one file system does to its users. `PowerLoss` is raised by every operation from `crash_at` on.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from p2p.adapters.durable import RealFiles


class PowerLoss(BaseException):
    """The machine stopped at this operation; not an error that code may handle."""


@dataclass
class File:
    """One file. `pending`: contents written since the last sync, in order; the last is what programs see."""

    durable: bytes = b""
    pending: list[bytes] = field(default_factory=list)
    lost: bool = False  # a sync failed: later ones will write nothing

    def write(self, content: bytes) -> None:
        self.pending.append(content)
        self.lost = False

    def sync(self) -> None:
        if self.pending and not self.lost:
            self.durable = self.pending[-1]
            self.pending.clear()

    def fail_sync(self) -> None:
        self.lost = bool(self.pending)


@dataclass
class Directory:
    """One directory: what the disk holds, what programs see, and each name's states since the last sync."""

    durable: dict[str, Node] = field(default_factory=dict)
    live: dict[str, Node] = field(default_factory=dict)
    pending: dict[str, list[Node | None]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def set(self, name: str, node: Node | None) -> None:
        self.pending.setdefault(name, []).append(node)
        self.lost.discard(name)
        if node is None:
            self.live.pop(name, None)
        else:
            self.live[name] = node

    def sync(self) -> None:
        for name in [name for name in self.pending if name not in self.lost]:
            del self.pending[name]
            self.durable.pop(name, None)
            if name in self.live:
                self.durable[name] = self.live[name]

    def fail_sync(self) -> None:
        self.lost = set(self.pending)


Node = File | Directory


class FaultyFiles:
    """See the module. Thread-safe. `root` must exist and be empty; what lies outside is refused."""

    def __init__(self, root: Path, *, crash_at: int | None = None, failing_syncs: frozenset[int] = frozenset()) -> None:
        self.root = root
        self.operations = 0
        self.syncs = 0
        self.crash_at = crash_at
        self.failing_syncs = failing_syncs  # by number, from 0
        self._real = RealFiles()
        self._top = Directory()
        self._lock = threading.RLock()
        self._full = False

    def fill_disk(self, full: bool = True) -> None:
        """From now on writes stop half way with ENOSPC."""
        self._full = full

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        with self._lock:
            self._step()
            content = bytes(data)
            if self._full:
                self._store(path, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, "no space left on device", str(path))
            self._store(path, content)

    def write_chunks(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self.write_file(path, b"".join(bytes(chunk) for chunk in chunks))

    def fsync_file(self, path: Path) -> None:
        self._sync(path)

    def fsync_dir(self, path: Path) -> None:
        self._sync(path)

    def make_dir(self, path: Path) -> None:
        with self._lock:
            self._step()
            if path.name not in self._directory(path.parent).live:
                self._real.make_dir(path)
                self._directory(path.parent).set(path.name, Directory())

    def replace(self, source: Path, target: Path) -> None:
        with self._lock:
            self._step()
            self._real.replace(source, target)
            node = self._node(source)
            self._directory(source.parent).set(source.name, None)
            self._directory(target.parent).set(target.name, node)

    def exchange(self, one: Path, other: Path) -> None:
        with self._lock:
            self._step()
            self._real.exchange(one, other)
            first, second = self._node(one), self._node(other)
            self._directory(one.parent).set(one.name, second)
            self._directory(other.parent).set(other.name, first)

    def remove_file(self, path: Path) -> None:
        with self._lock:
            self._step()
            self._real.remove_file(path)
            if path.name in self._directory(path.parent).live:
                self._directory(path.parent).set(path.name, None)

    def remove_dir(self, path: Path) -> None:
        with self._lock:
            self._step()
            self._real.remove_dir(path)
            self._directory(path.parent).set(path.name, None)

    def remove_tree(self, path: Path) -> None:
        with self._lock:
            self._step()
            self._real.remove_tree(path)
            if path.name in self._directory(path.parent).live:
                self._directory(path.parent).set(path.name, None)

    def power_loss(self, draw: Random) -> None:
        """Put one possible state of the disk in place of the files; the layer itself is of no further use."""
        with self._lock:
            for child in self.root.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            _write_survivors(self.root, self._top, draw)
            self.crash_at = 0

    def _step(self) -> None:
        if self.crash_at is not None and self.operations >= self.crash_at:
            raise PowerLoss
        self.operations += 1

    def _sync(self, path: Path) -> None:
        with self._lock:
            self._step()
            number, self.syncs = self.syncs, self.syncs + 1
            node = self._node(path)
            if number in self.failing_syncs:
                node.fail_sync()
                raise OSError(errno.EIO, "input/output error", str(path))
            node.sync()

    def _store(self, path: Path, content: bytes) -> None:
        self._real.write_file(path, content)
        directory = self._directory(path.parent)
        node = directory.live.get(path.name)
        if node is None:
            node = File()
            directory.set(path.name, node)
        assert isinstance(node, File)
        node.write(content)

    def _node(self, path: Path) -> Node:
        node: Node = self._top
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, Directory)
            node = node.live[part]
        return node

    def _directory(self, path: Path) -> Directory:
        node = self._node(path)
        assert isinstance(node, Directory)
        return node


def _write_survivors(path: Path, directory: Directory, draw: Random) -> None:
    for name in sorted(directory.durable.keys() | directory.pending.keys()):
        node = draw.choice([directory.durable.get(name), *directory.pending.get(name, [])])
        if isinstance(node, File):
            (path / name).write_bytes(_survivor(node, draw))
        elif node is not None:
            (path / name).mkdir()
            _write_survivors(path / name, node, draw)


def _survivor(file: File, draw: Random) -> bytes:
    content = draw.choice([file.durable, *file.pending])
    if content is file.durable and not file.pending:
        return content
    kept = draw.randint(0, len(content))
    return draw.choice([content, content[:kept], content[:kept] + bytes(len(content) - kept)])
