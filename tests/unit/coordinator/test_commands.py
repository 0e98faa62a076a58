"""What the `echo2` commands read, find and show, without a coordinator."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from coordinator.commands import jobs, pool, serving
from coordinator.commands.connection import find
from coordinator.commands.job_file import JobFileWrong, check_reward_code, missing_names, submit_with_uploads
from coordinator.commands.output import counts
from coordinator.config import Settings, read_settings
from coordinator.errors import CannotServe, CoordinatorError
from coordinator.rest_client import RequestFailed, RestClient

PIN = "ab" * 32


def test_rollouts_query_leaves_room_for_the_unanswered() -> None:
    """At most what the API allows; a step that was trained has none."""
    assert jobs.rollouts_query(None, 10) == {"limit": 310}
    assert jobs.rollouts_query(None, 400) == {"limit": 500}
    assert jobs.rollouts_query(3, 10) == {"limit": 10, "step": 3}


def test_counts() -> None:
    """Words, not Python's spelling of a dict."""
    assert counts({"trained": 3, "void": 1}) == "trained 3, void 1"
    assert counts({}) == "none"


@pytest.mark.parametrize(
    ("uusd", "shown"), [(0, "0.00"), (350_000, "0.35"), (125_000, "0.125"), (2_000_000, "2.00"), (100, "0.0001")]
)
def test_price(uusd: int, shown: str) -> None:
    """Two decimals, more only where they count."""
    assert pool.price(uusd) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://0.0.0.0:7700", "https://THIS-HOST:7700"),
        ("https://[::]:7700", "https://THIS-HOST:7700"),
        ("https://10.0.0.0:7700", "https://10.0.0.0:7700"),
        ("http://127.0.0.1:7700", "http://127.0.0.1:7700"),
    ],
)
def test_a_wildcard_address_is_no_url_for_others(url: str, shown: str) -> None:
    """Nobody can join 0.0.0.0."""
    assert pool.reachable(url) == shown


def test_url_with_a_pinned_certificate(tmp_path: Path) -> None:
    """The fragment is the fingerprint of a self-signed certificate."""
    found = find(f"https://far:7700/#sha256={PIN}", "token", tmp_path)
    assert (found.url, found.certificate_sha256) == ("https://far:7700", PIN)
    assert find("https://far:7700", "token", tmp_path).certificate_sha256 is None


@pytest.mark.parametrize(("url", "words"), [("far:7700", "must start with https://"), ("https://far#sha256=12", "64 hex digits")])
def test_wrong_urls(url: str, words: str, tmp_path: Path) -> None:
    """Told before anything is sent."""
    with pytest.raises(CoordinatorError, match=words):
        find(url, "token", tmp_path)


@pytest.mark.parametrize(
    ("served", "url", "words"),
    [
        (None, "https://far:7700", "no token for https://far:7700: .*serve.json is absent, so .*admin.token is not taken"),
        ("https://near:1", "https://far:7700", "no token for https://far:7700: .*admin.token is for https://near:1"),
        ("https://near:1", None, "no token for https://near:1: .*admin.token cannot be read"),
    ],
)
def test_no_token_tells_the_url_and_where_it_was_looked_for(
    served: str | None, url: str | None, words: str, tmp_path: Path
) -> None:
    """A data directory's token is never sent to another coordinator."""
    if served is not None:
        (tmp_path / "serve.json").write_text(json.dumps({"url": served}))
    with pytest.raises(CoordinatorError, match=words):
        find(url, None, tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ECHO2_PORT", "70000", r"setting port \(ECHO2_PORT\) is '70000'"),
        ("ECHO2_ROOTS", "/models", "lists are JSON"),
        ("ECHO2_PEER_NETWORKS", '["10.0.0.0/99"]', r"ECHO2_PEER_NETWORKS.*10\.0\.0\.0/99"),
    ],
)
def test_wrong_variables(variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, with their value."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(CoordinatorError, match=words):
        read_settings()


def test_a_root_must_exist(tmp_path: Path) -> None:
    """A misspelt root would only be found by the first author."""
    with pytest.raises(CannotServe, match="absent is no directory"):
        serving.serve(Settings(data_dir=tmp_path, roots=(tmp_path / "absent",)))


def test_migrate_tells_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    """A store that cannot be reached, and a data directory that cannot be made."""
    with pytest.raises(CannotServe, match="database url names 'mysql'"):
        serving.migrate(read_settings(data_dir=tmp_path, database_url="mysql://x"))
    (tmp_path / "file").touch()
    with pytest.raises(CannotServe, match="cannot be used: Not a directory"):
        serving.migrate(Settings(data_dir=tmp_path / "file" / "data"))


def test_a_taken_port_is_told_before_serving(tmp_path: Path) -> None:
    """By somebody else: the fix. By the coordinator of this data directory: all is well."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = Settings(data_dir=tmp_path, port=port)
        check = serving.check_port(settings)
        assert (check.ok, "in use; choose another" in check.detail) == (False, True)
        (tmp_path / "serve.json").write_text(json.dumps({"pid": os.getpid(), "url": f"http://127.0.0.1:{port}"}))
        assert serving.check_port(settings).ok
    assert serving.check_port(Settings(data_dir=tmp_path, port=0)).ok


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(prompts): ...\nasync def third(): ...", "defines no function 'wanted'; it defines other, third"),
        ("x = 1", "it defines none"),
        ("def wanted(:", r"is no Python that can be read: .*\(rewards\.py, line 1\)"),
    ],
)
def test_reward_code_is_looked_at_before_it_is_sent(code: str, words: str, tmp_path: Path) -> None:
    """And never run."""
    path = tmp_path / "rewards.py"
    path.write_text(code)
    with pytest.raises(JobFileWrong, match=words):
        check_reward_code(path, "wanted", where="environment.type")


@pytest.mark.parametrize(
    "code", ["def wanted(): ...", "async def wanted(): ...", "from math import sqrt as wanted", "wanted = len"]
)
def test_every_way_to_define_a_reward(code: str, tmp_path: Path) -> None:
    """A function, an import or a name."""
    path = tmp_path / "rewards.py"
    path.write_text(code)
    check_reward_code(path, "wanted", where="environment.type")


def test_missing_names(tmp_path: Path) -> None:
    """Those that neither lie beside the job file nor are uploads."""
    (tmp_path / "train.jsonl").touch()
    tree = {
        "model": "upload:" + "0" * 64,
        "environment": {"type": "python:rewards.py:accuracy", "train": "train.jsonl", "eval": "test.jsonl"},
    }
    assert missing_names(tree, tmp_path) == ["test.jsonl", "rewards.py"]


def test_missing_names_of_sources_and_rewards(tmp_path: Path) -> None:
    """All files that the environment names."""
    (tmp_path / "a.jsonl").touch()
    sources = [{"train": "a.jsonl"}, {"train": "b.jsonl", "eval": "c.parquet"}]
    rewards = [{"type": "math"}, {"type": "python:r.py:f"}]
    tree = {"model": "upload:" + "0" * 64, "environment": {"type": "dataset", "sources": sources, "rewards": rewards}}
    assert missing_names(tree, tmp_path) == ["b.jsonl", "c.parquet", "r.py"]


async def test_files_of_sources_and_rewards_are_uploaded(tmp_path: Path) -> None:
    """Each where it is named; the reference takes the name's place."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "r.py").write_text("def f(completions): ...")
    environment = {
        "type": "dataset",
        "sources": [{"train": "a.jsonl"}, {"train": "b.jsonl", "type": "python:r.py:f"}],
        "rewards": [{"type": "python:r.py:f", "weight": 2.0}],
    }
    coordinator = Coordinator(has_model=True)
    tree = {"model": "upload:" + "0" * 64, "environment": environment}
    await submit_with_uploads(coordinator, tree, tmp_path)  # type: ignore[arg-type]
    assert coordinator.uploaded == ["a.jsonl", "b.jsonl", "r.py", "r.py"]
    assert [source["train"].startswith("upload:") for source in environment["sources"]] == [True, True]
    for kind in (environment["sources"][1]["type"], environment["rewards"][0]["type"]):
        assert kind.startswith("python:upload:")
        assert kind.endswith(":f")
    (tmp_path / "r.py").write_text("def g(completions): ...")
    environment["rewards"][0]["type"] = "python:r.py:f"
    with pytest.raises(JobFileWrong, match=r"environment.rewards.0.type: .* defines no function 'f'"):
        await submit_with_uploads(coordinator, tree, tmp_path)  # type: ignore[arg-type]


async def test_events_are_read_from_the_stream() -> None:
    """The number, kind, time and data of each; heartbeats are passed over."""

    async def stream(request: web.Request) -> web.StreamResponse:
        assert request.headers["Last-Event-ID"] == "4"
        first = f"id: 5\nevent: step_committed\ndata: {json.dumps({'at': 1.5, 'step': 0})}\n\n"
        second = f"id: 6\nevent: job_completed\ndata: {json.dumps({'at': 2.5})}\n\n"
        return web.Response(text=f": heartbeat\n\n{first}{second}", content_type="text/event-stream")

    app = web.Application()
    app.router.add_get("/api/v1/jobs/j-1/events", stream)
    async with TestServer(app) as server, RestClient(str(server.make_url("")), "token") as client:
        seen = [event async for event in client.events("j-1", 4)]
    assert seen == [
        {"seq": 5, "kind": "step_committed", "at": 1.5, "data": {"step": 0}},
        {"seq": 6, "kind": "job_completed", "at": 2.5, "data": {}},
    ]


class Coordinator:
    """Takes uploads; refuses names until all are references, if it has no roots."""

    def __init__(self, *, has_model: bool) -> None:
        self.uploaded: list[str] = []
        self._has_model = has_model

    async def upload(self, path: Path, *, kind: str, name: str) -> dict[str, object]:
        self.uploaded.append(name)
        return {"reference": "upload:" + kind, "bytes": path.stat().st_size}

    async def post(self, _path: str, tree: dict[str, Any]) -> dict[str, Any]:
        if not self._has_model and not tree["model"].startswith("upload:"):
            raise RequestFailed("no such name", status=422, code="name_not_allowed")
        return tree


@pytest.mark.parametrize("has_model", [True, False])
async def test_a_model_inside_a_root_is_not_uploaded(has_model: bool, tmp_path: Path) -> None:
    """It may have gigabytes; one that the coordinator lacks is sent after all. What lies beside the job file always is."""
    model = tmp_path / "models" / "m"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").touch()
    tree = {"model": str(model), "environment": {"type": "math", "train": "train.jsonl"}}
    there = Coordinator(has_model=has_model)
    sent, job = await submit_with_uploads(there, tree, tmp_path)  # type: ignore[arg-type]
    assert job["environment"]["train"] == "upload:dataset"
    assert there.uploaded == (["train.jsonl"] if has_model else ["train.jsonl", "m.tar"])
    assert job["model"] == (str(model) if has_model else "upload:model")
    assert len(sent) == len(there.uploaded)
