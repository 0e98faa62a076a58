"""Model tars from hostile hands: whatever the bytes, nothing is written outside, and every refusal is in words."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.service.model_tar import MOST_MEMBERS, is_model_file, unpack_model
from coordinator.service.operator_errors import RequestRefused

GOOD = [("config.json", b"{}"), ("model.safetensors", b"w" * 700)]


def tar_bytes(members, *, mode="w", form=tarfile.PAX_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def unpack(tmp_path, data, *, limit=10_000):
    source, target = tmp_path / "in.tar", tmp_path / "out"
    source.write_bytes(data)
    target.mkdir(exist_ok=True)
    unpack_model(source, target, limit_bytes=limit)
    return target


def test_a_good_one(tmp_path):
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        place = tmp_path / str(form)
        place.mkdir()
        target = unpack(place, tar_bytes(GOOD, form=form))
        assert {path.name: path.read_bytes() for path in target.iterdir()} == dict(GOOD)


def test_limits(tmp_path):
    with pytest.raises(RequestRefused, match="more than 500 bytes"):
        unpack(tmp_path, tar_bytes(GOOD), limit=500)


def test_too_many_members(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for _ in range(MOST_MEMBERS + 1):
            info = tarfile.TarInfo(".")
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
    with pytest.raises(RequestRefused, match="members"):
        unpack(tmp_path, out.getvalue())


def test_compressed_and_sparse_are_refused(tmp_path):
    with pytest.raises(RequestRefused, match="uncompressed tar"):
        unpack(tmp_path, tar_bytes(GOOD, mode="w:gz"))
    info = tarfile.TarInfo("tokenizer.json")
    info.type = tarfile.GNUTYPE_SPARSE
    header = info.tobuf(format=tarfile.GNU_FORMAT)
    with pytest.raises(RequestRefused):
        unpack(tmp_path, header + b"\0" * 1024)


def test_a_huge_extension_header_is_not_read(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    with pytest.raises(RequestRefused, match="header record"):
        unpack(tmp_path, info.tobuf(format=tarfile.GNU_FORMAT))


def test_a_pax_path_does_not_slip_through(tmp_path):
    with pytest.raises(RequestRefused, match="not a file of"):
        unpack(tmp_path, tar_bytes([("a/" * 150 + "config.json", b"{}")]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_tars_are_refused_or_harmless(tmp_path_factory, data):
    place = tmp_path_factory.mktemp("tar")
    damaged = bytearray(tar_bytes(GOOD))
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(0, 1600))] = data.draw(st.integers(0, 255))
    with suppress(RequestRefused):
        unpack(place, bytes(damaged))
    assert all(is_model_file(path.name) for path in (place / "out").iterdir())
    assert {path.name for path in place.iterdir()} == {"in.tar", "out"}
