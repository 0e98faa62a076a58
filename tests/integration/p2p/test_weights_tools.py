"""`echo2 weights`: what `apply` makes is the original byte for byte, or nothing is made and one line says why."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from p2p.adapters.durable import RealFiles
from p2p.adapters.snapshot_dir import digest_of
from p2p.adapters.weights_apply import apply
from p2p.adapters.weights_check import check, summarise
from p2p.adapters.weights_diff import Diffed, diff
from p2p.codec import weights_file as form
from p2p.codec.delta import Delta
from p2p.codec.effort import Effort
from p2p.codec.safetensors import INDEX
from p2p.errors import ApplyFailed, SnapshotError, SwarmError, WeightsFileRefused
from tests.models import tiny

COMMAND = [sys.executable, "-c", "from coordinator.cli import main; main()", "weights"]
# Two versions of the tiny model, each as one file, as shards, and with the tied head written out.
VERSIONS = f"""
{tiny.SOURCE}
from safetensors.torch import load_file, save_file

def save(name):
    for kind, most in (("single", "1GB"), ("sharded", "40KB")):
        model.save_pretrained(out / kind / name, max_shard_size=most)
        w.write_companions(model, out / kind / name)
    tied = out / "tied" / name
    model.save_pretrained(tied)
    w.write_companions(model, tied)
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tied / "model.safetensors", metadata={{"format": "pt"}})

model.config.tie_word_embeddings = True
model.tie_weights()
save("base")
with torch.no_grad():
    for parameter in model.parameters():
        words = parameter.view(torch.int16)
        words.add_((torch.rand(words.shape) < 0.02).to(torch.int16))
save("new")
"""


@pytest.fixture(scope="session")
def tiny_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KIND/base and KIND/new, for the kinds single, sharded and tied."""
    out = tmp_path_factory.mktemp("tiny") / "versions"
    subprocess.run([sys.executable, "-c", VERSIONS, str(out), "0"], check=True, env={"OMP_NUM_THREADS": "1"}, timeout=120)
    return out


def make(base: Path, new: Path, out: Path, effort: Effort = "grouped", threads: int = 1) -> Diffed:
    return diff(base, new, out, encoding="delta", encoder=Delta(effort), threads=threads)


def call(*arguments: str | Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    words = [str(argument) for argument in arguments]
    return subprocess.run([*before, *COMMAND, *words], capture_output=True, text=True, timeout=60, check=False, env=environment)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def sealed(data: bytes) -> bytes:
    """The file with its own digest put right again, as one who tampers would."""
    return data[:-32] + blake3(data[:-32]).digest()


@pytest.mark.parametrize(
    ("base", "new"),
    [
        ("single", "single"),
        ("sharded", "sharded"),
        ("tied", "tied"),
        ("single", "sharded"),
        ("sharded", "tied"),
        ("tied", "single"),
    ],
)
def test_a_real_model_comes_back_byte_for_byte(tiny_versions: Path, tmp_path: Path, base: str, new: str) -> None:
    base_dir, new_dir = tiny_versions / base / "base", tiny_versions / new / "new"
    written = make(base_dir, new_dir, tmp_path / "v.delta")
    applied = apply(base_dir, tmp_path / "v.delta", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(new_dir)
    assert (written.without_base, written.not_carried) == ((), ())
    assert applied.head.result_digest == digest_of(new_dir) == digest_of(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "v.delta"]
    files = [path for path in new_dir.iterdir() if path.suffix == ".safetensors"]
    assert len(files) > 1 if new == "sharded" else len(files) == 1
    assert written.nbytes < sum(path.stat().st_size for path in files) / 5
    assert all(file.packed is None for file in written.head.files if file.name != "model.safetensors.index.json")


@pytest.mark.parametrize("effort", ["fast", "grouped", "dense", "auto"])
def test_every_effort_is_read_by_the_same_program_and_counted_right(tiny_versions: Path, tmp_path: Path, effort: Effort) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta", effort)
    apply(base, tmp_path / "v.delta", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(new)
    old, young = (np.frombuffer((at / "model.safetensors").read_bytes(), np.uint8) for at in (base, new))
    start = 8 + struct.unpack_from("<Q", old)[0]
    summary = summarise(tmp_path / "v.delta")
    assert summary.changed == np.count_nonzero(old[start:].view("<u2") != young[start:].view("<u2"))
    assert summary.parameters * 2 == len(old) - start == summary.raw_bytes
    assert summary.whole == 0
    assert effort == "auto" or set(summary.modes) == {effort}


def test_threads_change_nothing_in_the_file(made: ModuleType, tmp_path: Path) -> None:
    """Seven dtypes, so as many shards."""
    dtypes = ("BF16", "F16", "F32", "I64", "U8", "BOOL", "F8_E4M3")
    for name, seed in (("base", 1), ("new", 2)):
        made.write_model(tmp_path / name, {dtype: made.bits(dtype, (500,), seed) for dtype in dtypes})
    make(tmp_path / "base", tmp_path / "new", tmp_path / "one.delta")
    make(tmp_path / "base", tmp_path / "new", tmp_path / "three.delta", threads=3)
    assert (tmp_path / "one.delta").read_bytes() == (tmp_path / "three.delta").read_bytes()


def test_odd_files_come_back_too(made: ModuleType, tmp_path: Path) -> None:
    """A header that leaves the tensors unaligned, no bytes, scalars, every bit pattern, shapes and types that the base has not."""
    shared = {
        "empty": made.bits("BF16", (0, 4)),
        "scalar": made.bits("F32", ()),
        "nan": ("BF16", (3,), b"\xff\x7f\x01\x80\xff\xff"),
    }
    base = {**shared, "w": made.weights((300,), 1), "gone": made.bits("I8", (7,)), "other": made.bits("F16", (9,))}
    new = {**shared, "w": made.weights((300,), 2), "added": made.bits("F64", (3,)), "other": made.bits("BF16", (9,), 5)}
    made.write_model(tmp_path / "base", base)
    for padding in range(1, 8):
        made.write_model(tmp_path / "new", new, metadata={"x": "é" * padding}, files={"config.json": b"{}", "merges.txt": b""})
        written = make(tmp_path / "base", tmp_path / "new", tmp_path / "v.delta")
        assert written.without_base == ("added", "other")
        apply(tmp_path / "base", tmp_path / "v.delta", tmp_path / f"out{padding}")
        assert contents(tmp_path / f"out{padding}") == contents(tmp_path / "new")


def test_what_is_not_carried_is_named_and_changed_small_files_travel(tiny_versions: Path, tmp_path: Path) -> None:
    base = tiny_versions / "single" / "base"
    new = shutil.copytree(tiny_versions / "single" / "new", tmp_path / "new")
    (new / "config.json").write_bytes((new / "config.json").read_bytes() + b"\n")
    (new / "training_args.bin").write_bytes(b"pickle")
    (new / "model.safetensors.index.json").write_text("{}")  # of no meaning beside the single file
    (new / "onnx").mkdir()
    written = make(base, new, tmp_path / "v.delta")
    assert written.not_carried == ("model.safetensors.index.json", "onnx/", "training_args.bin")
    assert [file.name for file in written.head.files if file.packed] == ["config.json"]
    apply(base, tmp_path / "v.delta", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == (new / "config.json").read_bytes()


def test_a_wrong_base_is_named_and_nothing_is_left(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    other = shutil.copytree(base, tmp_path / "other")
    (other / "config.json").write_text("{}")
    for wrong, words in ((other, "another version"), (new, "the version that it makes")):
        with pytest.raises(WeightsFileRefused, match=f"{words}, digest {digest_of(wrong)}; .* digest {digest_of(base)}"):
            apply(wrong, tmp_path / "v.delta", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "v.delta"]


def test_a_damaged_file_is_refused_wherever_the_damage_is(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    data = (tmp_path / "v.delta").read_bytes()
    places = np.random.default_rng(0).integers(0, len(data), 20)
    damaged = [data[: int(place)] for place in (0, 5, 14, 40, *places)]
    damaged += [data[: int(place)] + bytes([data[place] ^ 4]) + data[int(place) + 1 :] for place in (3, 8, len(data) - 1, *places)]
    damaged.append(data + b"\0")
    for changed in damaged:
        (tmp_path / "bad.delta").write_bytes(changed)
        with pytest.raises(WeightsFileRefused, match=r"bad\.delta is refused"):
            apply(base, tmp_path / "bad.delta", tmp_path / "out")
        assert check(tmp_path / "bad.delta").problem
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_tampered_with_and_sealed_again_makes_nothing(tiny_versions: Path, tmp_path: Path) -> None:
    """Its own digest is right then; what it makes is not what it says, at whatever byte, or it is no stream at all."""
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    data = (tmp_path / "v.delta").read_bytes()
    start = form.PREFIX.size + form.head_length(data)
    for place in [start, start + 1, start + 5, *np.random.default_rng(1).integers(start, len(data) - 32, 60)]:
        changed = bytearray(data)
        changed[place] ^= 1 << (int(place) % 8)
        (tmp_path / "bad.delta").write_bytes(sealed(bytes(changed)))
        with pytest.raises(SwarmError):
            apply(base, tmp_path / "bad.delta", tmp_path / "out")
    for changed in (data[:-40] + data[-32:], data[:-32] + b"\0" + data[-32:]):
        (tmp_path / "bad.delta").write_bytes(sealed(bytes(changed)))
        with pytest.raises(ApplyFailed):
            apply(base, tmp_path / "bad.delta", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.delta", "v.delta"]


def rewritten(data: bytes, change: Callable[[Any], None]) -> bytes:
    """The file with another head, sealed."""
    length = form.head_length(data)
    fields = json.loads(form.unpack(data[form.PREFIX.size : form.PREFIX.size + length], "head", most=1 << 30))
    change(fields)
    packed = form.pack(json.dumps(fields).encode())
    return sealed(form.PREFIX.pack(form.MAGIC, form.VERSION, len(packed)) + packed + data[form.PREFIX.size + length :])


def test_heads_that_lie_make_nothing(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    data = (tmp_path / "v.delta").read_bytes()
    lies: list[tuple[Callable[[Any], None], str]] = [
        (lambda head: head["weights"][0].__setitem__(0, "../model.safetensors"), "weights"),
        (lambda head: head["files"][0].__setitem__(0, "/etc/passwd"), "files"),
        (lambda head: head["weights"][0].__setitem__(2, "0" * 64), "gives model.safetensors with digest"),
        (lambda head: head.__setitem__("result_digest", "0" * 64), "gives a version with digest"),
        (lambda head: head["files"][0].__setitem__(2, "0" * 64), "holds"),
        (lambda head: head["files"][0].__setitem__(3, 1 << 20), "past its end"),
        (lambda head: head["files"][0].__setitem__(3, 100), "does not decompress"),
        (lambda head: head.__setitem__("encoding", "zip"), "known are"),
    ]
    for change, words in lies:
        (tmp_path / "bad.delta").write_bytes(rewritten(data, change))
        with pytest.raises(SwarmError, match=words):
            apply(base, tmp_path / "bad.delta", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.delta", "v.delta"]


def test_bombs_are_refused_by_their_declared_size(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    data = (tmp_path / "v.delta").read_bytes()
    bomb = zstandard.ZstdCompressor().compress(bytes(form.MAX_HEAD_BYTES + 1))
    start = form.PREFIX.size + form.head_length(data)
    (tmp_path / "head.delta").write_bytes(sealed(form.PREFIX.pack(form.MAGIC, form.VERSION, len(bomb)) + bomb + data[start:]))
    packed = rewritten(data, lambda head: head["files"][0].__setitem__(3, len(bomb)))
    start = form.PREFIX.size + form.head_length(packed)
    (tmp_path / "file.delta").write_bytes(sealed(packed[:start] + bomb + packed[start:]))
    for name in ("head.delta", "file.delta"):
        with pytest.raises(WeightsFileRefused, match=f"declares {form.MAX_HEAD_BYTES + 1} bytes; at most"):
            apply(base, tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_that_exists_is_written_over(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    make(base, new, tmp_path / "v.delta", "dense")  # an older delta may be
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for used in (base, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(WeightsFileRefused, match="exists already: choose a name that is free"):
            apply(base, tmp_path / "v.delta", used)
    for used in (base / "model.safetensors", tmp_path / "file", tmp_path):
        with pytest.raises(WeightsFileRefused, match="is no weights delta file: choose another name"):
            make(base, new, used)
    for action in (
        lambda: make(base, new, tmp_path / "no/v.delta"),
        lambda: apply(base, tmp_path / "v.delta", tmp_path / "no/out"),
    ):
        with pytest.raises(WeightsFileRefused, match="there is no directory"):
            action()
    (tmp_path / "empty").mkdir()
    apply(base, tmp_path / "v.delta", tmp_path / "empty")
    assert contents(tmp_path / "empty") == contents(new)


def test_directories_without_safetensors_are_refused_by_what_they_hold(tiny_versions: Path, tmp_path: Path) -> None:
    new = tiny_versions / "single" / "new"
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    with pytest.raises(SnapshotError, match=r"pickles holds no weights; what is read is model\.safetensors"):
        make(pickles, new, tmp_path / "v.delta")
    (pickles / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(SnapshotError, match=r"pickles holds pytorch_model\.bin; what is read is model\.safetensors"):
        make(new, pickles, tmp_path / "v.delta")
    with pytest.raises(SnapshotError, match="is no directory"):
        make(tmp_path / "absent", new, tmp_path / "v.delta")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pickles"]


def test_shards_and_indexes_that_do_not_belong_together_are_named_with_the_fix(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "sharded" / name for name in ("base", "new"))
    shard = sorted(path.name for path in new.glob("*.safetensors"))[1]

    def short(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-9])

    def replaced_by_a_directory(path: Path) -> None:
        path.unlink()
        path.mkdir()

    spoilt: list[tuple[str, Callable[[Path], Any], str]] = [
        (shard, Path.unlink, f"names {shard}, and no such file lies beside it: copy or download all shards"),
        (shard, replaced_by_a_directory, f"names {shard}, and no such file lies beside it: copy or download all shards"),
        (shard, short, f"{shard}: the tensors end at byte .* after its header: copy or download it again"),
        (INDEX, Path.unlink, f"holds model-.*; what is read is .* with {INDEX}: save the model with save_pretrained"),
        (INDEX, lambda path: path.write_text("["), "is not an index of safetensors files: .*; copy it again"),
        (INDEX, lambda path: path.write_text('{"weight_map": {}}'), "holds no tensors: save the model again"),
    ]
    for number, (name, spoil, words) in enumerate(spoilt):
        broken = shutil.copytree(new, tmp_path / str(number))
        spoil(broken / name)
        with pytest.raises(SnapshotError, match=words):
            make(base, broken, tmp_path / "v.delta")
        assert re.search(words, check(broken).problem or "")
    assert not (tmp_path / "v.delta").exists()


class Failing(RealFiles):
    """A disk that fails at one operation."""

    def __init__(self, operation: str, code: int) -> None:
        self._operation, self._code = operation, code

    def _fail(self, operation: str, path: Path) -> None:
        if operation == self._operation:
            raise OSError(self._code, os.strerror(self._code), str(path))

    def make_dir(self, path: Path) -> None:
        self._fail("make_dir", path)
        super().make_dir(path)

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        self._fail("write_file", path)
        super().write_file(path, data)

    def fsync_file(self, path: Path) -> None:
        self._fail("fsync_file", path)
        super().fsync_file(path)

    def replace(self, source: Path, target: Path) -> None:
        self._fail("replace", target)
        super().replace(source, target)


@pytest.mark.parametrize(
    ("operation", "code"),
    [("make_dir", errno.EROFS), ("write_file", errno.ENOSPC), ("fsync_file", errno.EIO), ("replace", errno.EACCES)],
)
def test_a_disk_that_fails_keeps_nothing(tiny_versions: Path, tmp_path: Path, operation: str, code: int) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    make(base, new, tmp_path / "v.delta")
    with pytest.raises(OSError, match=os.strerror(code)):
        apply(base, tmp_path / "v.delta", tmp_path / "out", files=Failing(operation, code))
    assert [path.name for path in tmp_path.iterdir()] == ["v.delta"]


def test_the_command_line(tiny_versions: Path, tmp_path: Path) -> None:
    """The whole way as a person goes it, and as a script does."""
    base, new = (tiny_versions / "sharded" / name for name in ("base", "new"))
    shutil.copytree(new, tmp_path / "new")
    (tmp_path / "new" / "training_args.bin").touch()
    made_file = call("diff", base, tmp_path / "new", "-o", tmp_path / "v.delta", "--effort", "dense", "--threads", "2")
    assert made_file.returncode == 0, made_file.stderr
    assert "not carried" in made_file.stderr
    assert "training_args.bin" in made_file.stderr
    assert digest_of(new) in made_file.stdout
    applied = call("apply", base, tmp_path / "v.delta", "-o", tmp_path / "out", "--json")
    assert json.loads(applied.stdout)["digest"] == digest_of(new)
    assert contents(tmp_path / "out") == contents(new)
    figures = json.loads(call("inspect", tmp_path / "v.delta", "--json").stdout)
    assert figures["bytes"] == (tmp_path / "v.delta").stat().st_size
    assert figures["ratio"] == pytest.approx(figures["raw_bytes"] / figures["bytes"])
    assert figures["bytes_per_parameter"] == pytest.approx(figures["bytes"] / figures["parameters"])
    assert 0.015 < figures["changed_share"] < 0.025
    assert list(figures["modes"]) == ["dense"]
    verified = call("verify", tmp_path / "v.delta", base, tmp_path / "out")
    assert (verified.returncode, verified.stdout.count("sound")) == (0, 3)
    assert f"applies to {base}; gives {tmp_path / 'out'}" in verified.stdout
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "v.delta").write_bytes((tmp_path / "v.delta").read_bytes()[:-1])
    broken = call("verify", tmp_path / "v.delta", tmp_path / "out", tmp_path / "absent", "--json")
    assert broken.returncode == 1
    assert [bool(one["problem"]) for one in json.loads(broken.stdout)] == [True, False, True]


def test_the_command_line_fails_in_one_line(tiny_versions: Path, tmp_path: Path) -> None:
    base, new = (tiny_versions / "single" / name for name in ("base", "new"))
    failures = (
        (("diff", base, tmp_path / "absent", "-o", tmp_path / "v.delta"), "is no directory"),
        (("diff", base, new, "-o", tmp_path / "v.delta", "--effort", "most"), "must be one of fast, grouped, dense, auto"),
        (("apply", base, base / "model.safetensors", "-o", tmp_path / "out"), "not a weights delta file"),
    )
    for arguments, words in failures:
        failed = call(*arguments)
        assert failed.returncode == 1
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def _namespaces() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0


@pytest.mark.skipif(not _namespaces(), reason="a small disk takes a user namespace of its own")
def test_a_full_disk_is_one_line_and_leaves_nothing(made: ModuleType, tmp_path: Path) -> None:
    """A file system of two pages: neither the file nor the directory fits."""
    base, new = (
        made.write_model(tmp_path / name, {"w": made.weights((20_000,), seed)}) for seed, name in enumerate(("base", "new"))
    )
    make(base, new, tmp_path / "v.delta")
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o size=8k none {tmp_path}/disk && "$@"; code=$?; ls -A {tmp_path}/disk; exit $code'
    small = ("unshare", "-rm", "sh", "-c", script, "sh")
    diffed = call("diff", base, new, "-o", tmp_path / "disk/v.delta", before=small)
    applied = call("apply", base, tmp_path / "v.delta", "-o", tmp_path / "disk/out", before=small)
    assert "disk/v.delta is full: make room" in diffed.stderr
    assert "8192 are free on its disk: make room" in applied.stderr
    for done in (diffed, applied):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
