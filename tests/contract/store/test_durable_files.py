"""`p2p.adapters.durable` on a disk that loses what was not synced: an acknowledged file is never lost or torn.

For every moment of power loss and every pattern of failed syncs that hypothesis finds: a path shows its last acknowledged
content, or one that was being written after it, whole.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.adapters import durable
from p2p.adapters.durable import (
    RealFiles,
    hash_file,
    make_directory_durably,
    replace_directory_durably,
    sync_tree,
    write_durably,
)

SYNC_FAILURES = st.frozensets(st.integers(0, 24), max_size=3)
CRASHES = st.integers(0, 60)


@pytest.fixture
def disk():
    """A fresh folder for each example."""
    made = []

    def fresh() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="echo2-disk-")))
        return made[-1]

    yield fresh
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


def test_the_model_loses_what_was_not_synced(faults, disk):
    """The instrument is not blind: writing without syncs loses or tears files."""
    seen = set()
    for seed in range(60):
        root = disk()
        files = faults.FaultyFiles(root)
        files.write_file(root / "a", b"old")
        files.fsync_file(root / "a")
        files.fsync_dir(root)
        files.write_file(root / "tmp", b"newer")
        files.replace(root / "tmp", root / "a")
        files.power_loss(Random(seed))
        seen.add((root / "a").read_bytes())
    assert {b"old", b"newer", b""} <= seen
    assert any(content not in (b"old", b"newer", b"") for content in seen)  # torn


def test_the_model_loses_for_good_what_a_failed_sync_covered(faults, disk):
    lost = 0
    for seed in range(40):
        root = disk()
        files = faults.FaultyFiles(root, failing_syncs=frozenset({0}))
        files.write_file(root / "a", b"data")
        with pytest.raises(OSError, match="input/output"):
            files.fsync_file(root / "a")
        files.fsync_file(root / "a")  # reports success
        files.fsync_dir(root)
        files.power_loss(Random(seed))
        lost += (root / "a").read_bytes() != b"data"
    assert lost > 0


@pytest.mark.parametrize("step", ["fsync_file", "fsync_dir"])
def test_the_property_sees_a_missing_sync(faults, disk, step, monkeypatch):
    """Take one sync out of write_durably: the property below must fail for some seed."""
    monkeypatch.setattr(faults.FaultyFiles, step, lambda self, path: None)
    broken = 0
    for seed in range(60):
        root = disk()
        files = faults.FaultyFiles(root)
        write_durably(root / "a", b"content", files=files)
        files.power_loss(Random(seed))
        broken += not (root / "a").exists() or (root / "a").read_bytes() != b"content"
    assert broken > 0


@settings(max_examples=120, deadline=None)
@given(
    writes=st.lists(st.tuples(st.sampled_from(["a", "b", "x/y", "x/z/q"]), st.binary(max_size=40)), min_size=1, max_size=8),
    crash_at=CRASHES,
    failing=SYNC_FAILURES,
    seed=st.integers(0, 2**32),
)
def test_an_acknowledged_file_is_never_lost_or_torn(faults, writes, crash_at, failing, seed):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = faults.FaultyFiles(root, crash_at=crash_at, failing_syncs=failing)
        allowed: dict[str, list[bytes | None]] = {}
        with suppress(faults.PowerLoss):
            for name, data in writes:
                allowed.setdefault(name, [None]).append(data)  # in doubt until acknowledged
                with suppress(OSError):
                    write_durably(root / name, data, files=files)
                    allowed[name] = [data]
        files.power_loss(Random(seed))
        for name, contents in allowed.items():
            path = root / name
            assert (path.read_bytes() if path.exists() else None) in contents


@settings(max_examples=80, deadline=None)
@given(
    versions=st.lists(
        st.dictionaries(st.sampled_from(["f", "g", "sub/h"]), st.binary(max_size=20), min_size=1), min_size=1, max_size=4
    ),
    crash_at=CRASHES,
    failing=SYNC_FAILURES,
    seed=st.integers(0, 2**32),
    can_exchange=st.booleans(),
)
def test_an_acknowledged_directory_is_never_lost_or_torn(faults, versions, crash_at, failing, seed, can_exchange):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = faults.FaultyFiles(root, crash_at=crash_at, failing_syncs=failing)
        if not can_exchange:
            files.exchange = _cannot_exchange
        allowed: list[dict[str, bytes] | None] = [None]
        with suppress(faults.PowerLoss):
            for number, version in enumerate(versions):
                allowed.append(version)
                with suppress(OSError):
                    temporary = root / f"tmp-{number}"
                    _write_tree(files, temporary, version)
                    replace_directory_durably(temporary, root / "final", files=files)
                    allowed = [version]
        files.power_loss(Random(seed))
        found = _read_tree(root / "final")
        assert found in allowed or (found is None and not can_exchange)


def _write_tree(files, directory, version):
    files.make_dir(directory)
    for name, data in version.items():
        if "/" in name:
            files.make_dir((directory / name).parent)
        files.write_file(directory / name, data)


def _read_tree(directory):
    if not directory.exists():
        return None
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _cannot_exchange(one, other):
    raise OSError(errno.ENOTSUP, "not here", str(other))


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(faults, disk):
    root = disk()
    files = faults.FaultyFiles(root)
    write_durably(root / "a", b"old", files=files)
    files.fill_disk()
    with pytest.raises(OSError, match="no space left"):
        write_durably(root / "a", b"new content", files=files)
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"a": b"old"}


def test_a_directory_whose_entry_could_not_be_synced_is_taken_back(faults, disk):
    root = disk()
    files = faults.FaultyFiles(root, failing_syncs=frozenset({0}))
    with pytest.raises(OSError, match="input/output"):
        make_directory_durably(root / "x" / "y", files=files)
    assert not (root / "x").exists()
    make_directory_durably(root / "x" / "y", files=files)
    files.power_loss(Random(0))
    assert (root / "x" / "y").is_dir()


def test_an_error_of_the_swap_itself_is_not_hidden(faults, disk):
    root = disk()
    files = faults.FaultyFiles(root)
    for name in ("final", "tmp"):
        _write_tree(files, root / name, {"f": name.encode()})

    def fails(one, other):
        raise OSError(errno.EACCES, "not yours", str(other))

    files.exchange = fails
    with pytest.raises(OSError, match="not yours"):
        replace_directory_durably(root / "tmp", root / "final", files=files)
    assert _read_tree(root / "final") == {"f": b"final"}


def test_on_the_real_disk_a_directory_is_replaced_across_folders(tmp_path):
    final = tmp_path / "deep" / "final"
    for content in (b"one", b"two"):
        temporary = tmp_path / "work" / "tmp"
        (temporary / "sub").mkdir(parents=True)
        (temporary / "sub" / "f").write_bytes(content)
        (temporary / "link").symlink_to("nowhere")
        replace_directory_durably(temporary, final)
        assert (final / "sub" / "f").read_bytes() == content
        assert not temporary.exists()
    assert [path.name for path in final.parent.iterdir()] == ["final"]


def test_where_names_cannot_be_swapped_the_directory_is_still_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_exchange", _cannot_exchange)
    for content in (b"one", b"two"):
        (tmp_path / "tmp").mkdir()
        (tmp_path / "tmp" / "f").write_bytes(content)
        replace_directory_durably(tmp_path / "tmp", tmp_path / "final")
    assert _read_tree(tmp_path) == {"final/f": b"two"}


def test_swapping_with_an_absent_name_is_the_systems_error(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        RealFiles().exchange(tmp_path / "one", tmp_path / "absent")


def test_real_files_forgive_what_is_absent_already(tmp_path):
    files = RealFiles()
    files.remove_file(tmp_path / "absent")
    files.remove_tree(tmp_path / "absent")
    files.make_dir(tmp_path)
    sync_tree(tmp_path)


@pytest.mark.parametrize("size", [0, 1, durable.HASH_BLOCK_BYTES, 3 * durable.HASH_BLOCK_BYTES + 7])
def test_hash_file_is_the_blake3_of_its_bytes(tmp_path, size):
    data = Random(size).randbytes(size)
    (tmp_path / "f").write_bytes(data)
    assert hash_file(tmp_path / "f") == blake3(data).hexdigest()
