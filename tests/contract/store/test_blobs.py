"""`ports.Blobs` in a folder: content-addressed, verified, durable when acknowledged."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.store.blobs import HASH_INLINE_BYTES, FileBlobs, Swept
from p2p.adapters.durable import RealFiles


@pytest.fixture
def blobs(tmp_path):
    return FileBlobs(tmp_path / "blobs")


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def _age(path: Path, seconds: float = 1000.0) -> None:
    """Make a file look last touched that long ago."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("size", [0, 1, 1000, HASH_INLINE_BYTES + 1])
async def test_bytes_put_come_back_under_their_digest(blobs, size):
    data = Random(size).randbytes(size)
    digest = await blobs.put(data)
    assert digest == _digest(data)
    assert await blobs.get(digest) == data == blobs.path(digest).read_bytes()


async def test_the_same_bytes_are_one_blob(blobs, tmp_path):
    digests = await asyncio.gather(*(blobs.put(b"same") for _ in range(20)))
    assert set(digests) == {_digest(b"same")}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [_digest(b"same")]


async def test_many_at_once(blobs):
    data = [str(number).encode() for number in range(300)]
    digests = await asyncio.gather(*map(blobs.put, data))
    assert await asyncio.gather(*map(blobs.get, digests)) == data


async def test_an_absent_blob_is_a_key_error(blobs):
    with pytest.raises(KeyError, match="there is no blob"):
        await blobs.get(_digest(b"absent"))


@pytest.mark.parametrize("text", ["", "abc", "../" * 21 + "x", "g" * 64, "A" * 64, "a" * 63 + "/", "a" * 64 + "\n"])
async def test_what_is_no_digest_names_no_path(blobs, text):
    with pytest.raises(ValueError, match="is not a blob digest"):
        blobs.path(text)
    with pytest.raises(ValueError, match="is not a blob digest"):
        await blobs.get(text)


async def test_a_corrupt_blob_is_seen_and_healed_by_the_next_put(blobs):
    digest = await blobs.put(b"precious")
    blobs.path(digest).write_bytes(b"precioux")
    with pytest.raises(ValueError, match="is corrupt: its 8 bytes"):
        await blobs.get(digest)
    await blobs.put(b"precious")
    assert await blobs.get(digest) == b"precious"


async def test_blobs_are_found_by_a_later_process(blobs, tmp_path):
    digest = await blobs.put(b"data")
    assert await FileBlobs(tmp_path / "blobs").get(digest) == b"data"


async def test_free_bytes_is_what_the_disk_says(blobs):
    assert 0 < await blobs.free_bytes() <= os.statvfs("/").f_blocks * os.statvfs("/").f_frsize * 1000


async def test_remove_says_whether_it_was_there(blobs):
    digest = await blobs.put(b"data")
    assert await blobs.remove(digest) is True
    assert await blobs.remove(digest) is False
    with pytest.raises(KeyError):
        await blobs.get(digest)


async def test_a_sweep_keeps_what_is_named_and_what_is_young(blobs):
    kept, old, young = [await blobs.put(data) for data in (b"kept", b"older", b"young")]
    for digest in (kept, old):
        _age(blobs.path(digest))
    before = blobs.path(young).stat().st_mtime - 500
    assert await blobs.sweep({kept}, before=before) == Swept(1, len(b"older"))
    assert [blobs.path(digest).exists() for digest in (kept, old, young)] == [True, False, True]


async def test_a_sweep_removes_old_temporary_files_and_nothing_of_other_people(blobs):
    digest = await blobs.put(b"data")
    shelf = blobs.path(digest).parent
    left = shelf / f".{digest}.0123.tmp"
    left.write_bytes(b"half")
    other = shelf / "README"
    other.write_bytes(b"mine")
    for path in (left, other):
        _age(path)
    assert await blobs.sweep({digest}, before=blobs.path(digest).stat().st_mtime - 500) == Swept(1, 4)
    assert not left.exists()
    assert other.exists()


async def test_a_put_makes_an_old_blob_young_again(blobs):
    digest = await blobs.put(b"data")
    _age(blobs.path(digest))
    before = blobs.path(digest).stat().st_mtime + 500
    await blobs.put(b"data")
    assert await blobs.sweep(set(), before=before) == Swept()


async def test_a_put_during_a_sweep_of_the_same_blob_survives(blobs):
    data = [str(number).encode() for number in range(40)]
    digests = [await blobs.put(one) for one in data]
    for digest in digests:
        _age(blobs.path(digest))
    before = blobs.path(digests[0]).stat().st_mtime + 500
    swept, *again = await asyncio.gather(blobs.sweep(set(), before=before), *(blobs.put(one) for one in data))
    assert again == digests
    assert await asyncio.gather(*map(blobs.get, digests)) == data
    assert 0 <= swept.files <= len(data)


async def test_a_put_whose_caller_leaves_is_finished(blobs):
    task = asyncio.create_task(blobs.put(b"data"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await blobs.put(b"data")  # waits for the first
    assert await blobs.get(_digest(b"data")) == b"data"


class Counting(RealFiles):
    """Counts directory syncs, and can hold the first one up."""

    def __init__(self) -> None:
        self.directories = 0

    def fsync_dir(self, path: Path) -> None:
        self.directories += 1
        super().fsync_dir(path)


async def test_puts_into_one_shelf_share_directory_syncs(tmp_path):
    files = Counting()
    blobs = FileBlobs(tmp_path / "blobs", files)
    same_shelf = [data for data in (str(n).encode() for n in range(8000)) if _digest(data).startswith("00")][:24]
    before = files.directories
    await asyncio.gather(*map(blobs.put, same_shelf))
    assert files.directories - before < len(same_shelf)


async def test_a_full_disk_is_an_error_and_leaves_nothing(faults, tmp_path):
    root = tmp_path / "blobs"
    root.mkdir()
    files = faults.FaultyFiles(root)
    blobs = FileBlobs(root, files)
    files.fill_disk()
    with pytest.raises(OSError, match="no space left"):
        await blobs.put(b"data")
    assert [path for path in root.rglob("*") if path.is_file()] == []
    files.fill_disk(False)
    assert await blobs.get(await blobs.put(b"data")) == b"data"


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_after_a_failed_sync_the_blob_is_written_anew(faults, tmp_path, failing):
    """Sync 0 is the sub-folder's own name, 1 the blob's content, 2 the blob's name."""
    for seed in range(12):
        root = tmp_path / str(seed)
        root.mkdir()
        files = faults.FaultyFiles(root, failing_syncs=frozenset({failing}))
        blobs = FileBlobs(root, files)
        with pytest.raises(OSError, match="input/output"):
            await blobs.put(b"data")
        digest = await blobs.put(b"data")
        files.power_loss(Random(seed))
        assert blobs.path(digest).read_bytes() == b"data"


async def test_an_acknowledged_blob_outlives_a_second_put_that_fails(faults, tmp_path):
    for seed in range(12):
        root = tmp_path / str(seed)
        root.mkdir()
        files = faults.FaultyFiles(root, failing_syncs=frozenset({4}))
        blobs = FileBlobs(root, files)
        digest = await blobs.put(b"data")  # syncs 0, 1, 2
        with pytest.raises(OSError, match="input/output"):
            await blobs.put(b"data")  # 3, and 4 fails
        files.power_loss(Random(seed))
        assert blobs.path(digest).read_bytes() == b"data"


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.binary(max_size=30), min_size=1, max_size=10),
    crash_after=st.integers(0, 50),
    failing=st.frozensets(st.integers(0, 30), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_an_acknowledged_blob_is_never_lost_or_torn(faults, data, crash_after, failing, seed):
    """Concurrent puts, failing syncs, power loss at any operation: what was acknowledged is there, what is there is whole."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = faults.FaultyFiles(root, failing_syncs=failing)
        acknowledged: set[str] = set()

        async def put(blobs, one):
            with suppress(OSError, faults.PowerLoss):
                acknowledged.add(await blobs.put(one))

        async def run():
            blobs = FileBlobs(root, files)
            files.crash_at = files.operations + crash_after
            await asyncio.gather(*(put(blobs, one) for one in data))

        asyncio.run(run())
        files.power_loss(Random(seed))
        named = {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.name.endswith(".tmp")}
        assert acknowledged <= set(named)
        assert all(_digest(content) == name for name, content in named.items())


class FailsOnce(RealFiles):
    """The first sync of the sub-folder "00" waits for `release` and fails."""

    def __init__(self) -> None:
        self.syncing, self.release = threading.Event(), threading.Event()
        self.count = 0

    def fsync_dir(self, path: Path) -> None:
        if path.name != "00" or self.count:
            return super().fsync_dir(path)
        self.count += 1
        self.syncing.set()
        assert self.release.wait(10)
        raise OSError(errno.EIO, "input/output error", str(path))


async def test_a_put_whose_entry_was_new_when_a_sync_failed_is_not_acknowledged_by_the_next_sync(tmp_path):
    files = FailsOnce()
    blobs = FileBlobs(tmp_path / "blobs", files)
    one, two = [data for data in (str(n).encode() for n in range(8000)) if _digest(data).startswith("00")][:2]
    first = asyncio.create_task(blobs.put(one))
    await asyncio.to_thread(files.syncing.wait, 10)
    second = asyncio.create_task(blobs.put(two))
    while not blobs.path(_digest(two)).exists():
        await asyncio.sleep(0)
    files.release.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(outcome, OSError) for outcome in outcomes)
    assert await blobs.put(two) == _digest(two)
