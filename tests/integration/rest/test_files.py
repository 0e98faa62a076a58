"""Uploads: content-addressed, typed, limited; models unpacked without trusting one name in them."""

from __future__ import annotations

import asyncio
import io
import tarfile

import pytest
from blake3 import blake3

from coordinator.api.rest_table import RestLimits

FILES = "/api/v1/files"
BYTES = {"Content-Type": "application/octet-stream"}
LINE = b'{"prompt": "a"}\n'


def tar_of(*members, **links):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, (kind, target) in links.items():
            info = tarfile.TarInfo(name.replace("__", "."))  # keywords cannot hold dots
            info.type, info.linkname = kind, target
            tar.addfile(info)
    return out.getvalue()


GOOD = (("./config.json", b"{}"), ("model.safetensors", b"weights"))


async def _upload(bench, kind, name, data, *, role="admin", status=201, **headers):
    return await bench.ask(
        "POST", f"{FILES}?kind={kind}&name={name}", data=data, headers={**BYTES, **headers}, role=role, status=status
    )


async def test_the_same_bytes_are_one_upload(bench):
    first = await _upload(bench, "dataset", "a.jsonl", LINE)
    second = await _upload(bench, "dataset", "b.jsonl", LINE)
    assert first == second
    assert first["digest"] == blake3(LINE).hexdigest()
    stored = bench.deps.settings.data_dir / "uploads" / first["digest"]
    assert [p.name for p in stored.iterdir()] == ["a.jsonl"]
    assert (stored / "a.jsonl").read_bytes() == LINE
    assert list((bench.deps.settings.data_dir / "tmp").iterdir()) == []


async def test_a_key_with_other_bytes_is_refused(bench):
    await _upload(bench, "dataset", "a.jsonl", LINE, **{"Idempotency-Key": "u"})
    await _upload(bench, "dataset", "a.jsonl", LINE, **{"Idempotency-Key": "u"})
    problem = await _upload(bench, "dataset", "a.jsonl", LINE * 2, status=422, **{"Idempotency-Key": "u"})
    assert problem["code"] == "idempotency_key_reused"


@pytest.mark.parametrize(
    ("kind", "name", "data", "code"),
    [
        ("dataset", "a.txt", LINE, "wrong_suffix"),
        ("dataset", "..%2Fa.jsonl", LINE, "invalid_query"),
        ("dataset", ".jsonl", LINE, "invalid_query"),
        ("binary", "a.jsonl", LINE, "invalid_query"),
        ("dataset", "a.jsonl", b"", "empty_upload"),
        ("model", "m.tar", b"not a tar", "model_tar_refused"),
        ("model", "m.tar", tar_of(("config.json", b"{}")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, ("../escape.json", b"{}")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, ("/etc/config.json", b"{}")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, ("sub/config.json", b"{}")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, ("modeling_evil.py", b"x")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, ("config.json", b"{}")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, tokenizer__json=(tarfile.SYMTYPE, "/etc/passwd")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, tokenizer__json=(tarfile.LNKTYPE, "config.json")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD, tokenizer__json=(tarfile.FIFOTYPE, "")), "model_tar_refused"),
        ("model", "m.tar", tar_of(*GOOD)[:700], "model_tar_refused"),
    ],
)
async def test_uploads_that_are_refused_leave_nothing(bench, kind, name, data, code):
    problem = await _upload(bench, kind, name, data, status=422)
    assert problem["code"] == code
    uploads = bench.deps.settings.data_dir / "uploads"
    assert not uploads.exists() or list(uploads.iterdir()) == []


async def test_a_model_is_unpacked_and_can_be_named(bench, job_body):
    made = await _upload(bench, "model", "m.tar", tar_of(*GOOD, **{".": (tarfile.DIRTYPE, "")}))
    stored = bench.deps.settings.data_dir / "uploads" / made["digest"]
    assert sorted(p.name for p in stored.iterdir()) == ["config.json", "model.safetensors"]
    await bench.ask("POST", "/api/v1/jobs", json=job_body(model=made["reference"]), status=201)


async def test_the_same_bytes_as_another_kind_conflict(bench):
    await _upload(bench, "dataset", "a.jsonl", LINE)
    assert (await _upload(bench, "code", "a.py", LINE, status=409))["code"] == "upload_kind_differs"


async def test_code_needs_the_right(bench):
    assert (await _upload(bench, "code", "r.py", b"x = 1", role="author", status=403))["code"] == "code_right_needed"
    await _upload(bench, "code", "r.py", b"x = 1", role="coder")


async def test_too_large_declared_or_counted(make_bench):
    bench = await make_bench(upload_limit_bytes=100)
    assert (await _upload(bench, "dataset", "a.jsonl", b"x" * 101, status=413))["code"] == "upload_too_large"

    async def chunks():
        for _ in range(11):
            yield b"x" * 10

    assert (await _upload(bench, "dataset", "a.jsonl", chunks(), status=413))["code"] == "upload_too_large"
    assert list((bench.deps.settings.data_dir / "tmp").iterdir()) == []


async def test_a_full_disk_is_said_with_a_delay(bench):
    bench.disk.free = bench.deps.settings.minimum_free_bytes + 10
    async with bench.client.post(f"{FILES}?kind=dataset&name=a.jsonl", data=LINE, headers={**bench.headers(), **BYTES}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["code"] == "disk_full"


async def test_an_upload_that_trickles_ends(make_bench):
    bench = await make_bench(limits=RestLimits(block_s=0.1))
    never = asyncio.Event()

    async def chunks():
        yield b"x"
        await never.wait()

    problem = await _upload(bench, "dataset", "a.jsonl", chunks(), status=408)
    assert problem["code"] == "body_too_slow"
    assert list((bench.deps.settings.data_dir / "tmp").iterdir()) == []


async def test_uploads_at_once_are_bounded(make_bench):
    bench = await make_bench(limits=RestLimits(uploads_at_once=0))
    assert (await _upload(bench, "dataset", "a.jsonl", LINE, status=503))["code"] == "too_many_uploads"


async def test_media_type_and_encoding(bench):
    problem = await bench.ask(
        "POST", f"{FILES}?kind=dataset&name=a.jsonl", data=LINE, headers={"Content-Type": "text/plain"}, status=415
    )
    assert problem["code"] == "media_type_not_taken"
    problem = await _upload(bench, "dataset", "a.jsonl", LINE, status=415, **{"Content-Encoding": "gzip"})
    assert problem["code"] == "content_encoding_not_taken"


async def test_what_a_crash_left_is_removed_at_start_or_replaced(make_bench):
    bench = await make_bench()
    data_dir, digest = bench.deps.settings.data_dir, blake3(LINE).hexdigest()
    for path in (data_dir / "tmp" / "upload-1", data_dir / "uploads" / ".abc.tmp" / "half", data_dir / "uploads" / digest / "odd"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    await _upload(bench, "dataset", "a.jsonl", LINE)
    assert [p.name for p in (data_dir / "uploads" / digest).iterdir()] == ["a.jsonl"]
    await bench.close()
    await make_bench(reuse=True)
    assert list((data_dir / "tmp").iterdir()) == []
    assert [p.name for p in (data_dir / "uploads").iterdir()] == [digest]
