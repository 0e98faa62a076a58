"""What a job produced: metrics, rollouts, checkpoints, audit."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.audit import audit
from coordinator.domain.model import CheckpointRow, Publication, PublicationState, Turn
from coordinator.service import operator_views

JOB = "/api/v1/jobs/j-1"


async def test_metrics_by_name_and_since(bench, seeded):
    await bench.put(*seeded("someone"))
    names = (await bench.ask("GET", f"{JOB}/metrics", status=200))["names"]
    assert [(n["name"], n["step"]) for n in names] == [("eval/all/mean", 1), ("reward/all/mean", 4)]
    series = await bench.ask("GET", f"{JOB}/metrics?name=reward/all/mean")
    assert [point["step"] for point in series["points"]] == [0, 1, 2, 3, 4]
    since = series["points"][2]["at"]
    later = await bench.ask("GET", f"{JOB}/metrics?name=reward/all/mean&since={since}")
    assert [point["step"] for point in later["points"]] == [3, 4]
    newest = await bench.ask("GET", f"{JOB}/metrics?name=reward/all/mean&limit=2")
    assert [point["step"] for point in newest["points"]] == [3, 4]
    assert (await bench.ask("GET", f"{JOB}/metrics?name=nothing"))["points"] == []


async def test_rollouts_of_a_step_and_the_newest(bench, seeded):
    await bench.put(*seeded("someone"))
    found = (await bench.ask("GET", f"{JOB}/rollouts?step=0", status=200))["rollouts"]
    assert [(r["group_number"], r["slot"], r["reward"], r["completion"]) for r in found] == [
        (0, 0, 0.0, "text 0.0"),
        (0, 1, 1.0, "text 0.1"),
        (1, 0, 0.0, "text 1.0"),
        (1, 1, 1.0, "text 1.1"),
    ]
    assert [r["prompt"] for r in found] == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]
    assert found[0]["prompt_ids"] == [1, 2]
    assert (found[0]["worker_id"], found[0]["stop_reason"], found[0]["outcome"]) == ("w-1", "stop", "trained")
    assert len((await bench.ask("GET", f"{JOB}/rollouts?limit=3"))["rollouts"]) == 3
    assert (await bench.ask("GET", f"{JOB}/rollouts?step=7"))["rollouts"] == []


async def test_checkpoints_list_and_download_with_ranges(bench, seeded, tmp_path):
    await bench.put(*seeded("someone"))
    await bench.put(CheckpointRow("j-1", 2, str(tmp_path / "gone"), 1.0))
    listed = (await bench.ask("GET", f"{JOB}/checkpoints", status=200))["checkpoints"]
    assert [(c["version"], c["source"]) for c in listed] == [(1, "publication")]
    assert listed[0]["files"] == [{"name": "config.json", "bytes": 8}, {"name": "model.safetensors", "bytes": 100}]
    path = f"{JOB}/checkpoints/1/model.safetensors"
    assert await bench.ask("GET", path, status=200) == bytes(range(100))
    async with bench.client.get(path, headers={**bench.headers(), "Range": "bytes=10-19"}) as response:
        assert response.status == 206
        assert await response.read() == bytes(range(10, 20))
        assert response.headers["Content-Range"] == "bytes 10-19/100"


async def test_adapters_are_listed_apart_and_downloaded_by_their_names(bench, seeded, tmp_path):
    """Below the version's directory, so that who loads the model does not meet them."""
    await bench.put(*seeded("someone"))
    folder = tmp_path / "snapshots" / "v1" / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(b"12345678")
    (folder / "secret.txt").write_bytes(b"x")
    (listed,) = (await bench.ask("GET", f"{JOB}/checkpoints", status=200))["checkpoints"]
    assert listed["adapter"] == [{"name": "adapter_config.json", "bytes": 2}, {"name": "adapter_model.safetensors", "bytes": 8}]
    assert [file["name"] for file in listed["files"]] == ["config.json", "model.safetensors"]
    assert await bench.ask("GET", f"{JOB}/checkpoints/1/adapter_model.safetensors", status=200) == b"12345678"
    for name in ("secret.txt", "adapter", "adapter%2fadapter_config.json"):
        await bench.ask("GET", f"{JOB}/checkpoints/1/{name}", status=404)


async def test_only_model_files_can_be_downloaded(bench, seeded, tmp_path):
    await bench.put(*seeded("someone"))
    (tmp_path / "snapshots" / "v1" / "tokenizer.json").symlink_to("/etc/passwd")
    for name in ("secret.txt", "..%2f..%2frows.db", "tokenizer.json", "absent.json", "%2fetc%2fpasswd"):
        await bench.ask("GET", f"{JOB}/checkpoints/1/{name}", status=404)
    for version in ("2", "-1", "x", "1.0", "9" * 30):
        await bench.ask("GET", f"{JOB}/checkpoints/{version}/config.json", status=404)


async def test_a_rolled_back_version_is_not_offered(bench, seeded):
    rows = seeded("someone")
    lost = [replace(r, state=PublicationState.ROLLED_BACK) if isinstance(r, Publication) else r for r in rows]
    await bench.put(*lost)
    assert (await bench.ask("GET", f"{JOB}/checkpoints"))["checkpoints"] == []


async def test_the_audit_reads_long_rows_page_by_page(bench, seeded, monkeypatch):
    """It says the same whatever the page, also where more turns than fit in one were accepted at the same moment."""
    at = [5.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 7.0]
    turns = [Turn("g-0", 0, n, "j-1", "l-1", "w-1", "b", 0, 1, "stop", 0.1, accepted, (7, 8)) for n, accepted in enumerate(at)]
    await bench.put(*seeded("someone"), *turns)
    whole = await bench.ask("GET", f"{JOB}/audit", role="viewer", status=200)
    assert (whole["counts"]["turns"], whole["counts"]["rollouts"], whole["counts"]["groups"]) == (8, 4, 2)
    assert f"g-0 slot 0 is at turn 0 and has rows of turns {list(range(8))} before it" in whole["findings"]
    monkeypatch.setattr(operator_views, "ROWS_AT_ONCE", 2)
    asked = []
    monkeypatch.setattr(operator_views, "audit", lambda *rows: asked.append(rows) or audit(*rows))
    assert await bench.ask("GET", f"{JOB}/audit", role="viewer", status=200) == whole
    ((_, groups, rollouts, *_, counted),) = asked
    assert not any(group.prompt_ids or group.prompt_text for group in groups)
    assert not any(rollout.text for rollout in rollouts)
    assert sum(turn.tokens for turn in counted) == 16


async def test_the_audit_recomputes_from_rows(bench, seeded):
    await bench.put(*seeded("someone"))
    view = await bench.ask("GET", f"{JOB}/audit", role="viewer", status=200)
    assert set(view) == {"ok", "findings", "counts"}
    assert view["counts"]
    assert view["ok"] == (view["findings"] == [])
