"""A whole worker against the small coordinator: real client, swarm, engine thread and session on loopback."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p.adapters.snapshot_dir import digest_of
from worker_node.adapters import identity
from worker_node.adapters.status_file import Lock, holder, read_status
from worker_node.app import build, run_worker
from worker_node.config import EngineSettings, WorkerSettings
from worker_node.domain import instructions as do
from worker_node.domain.events import Outcome
from worker_node.domain.instructions import Stop
from worker_node.domain.session import EXIT_ENGINE, EXIT_FENCED, EXIT_OK
from worker_node.domain.weights import Forthcoming, Version
from worker_node.errors import CallError, ConfigError, TrustError
from worker_node.runtime import Runtime

Until = Callable[..., Any]


def settings_for(coordinator: Any, state_dir: Path, **changes: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "url": coordinator.url,
        "coordinator_key": coordinator.public,
        "invite_code": f"echo2-invite-1.{coordinator.public}.secretsecretsecret",
        "name": "tester",
        "price_uusd_per_hour": 350_000,
        "state_dir": state_dir,
        "engine": EngineSettings("scripted", slots=8),
        "drain_s": 10.0,
    }
    return WorkerSettings(**{**values, **changes})


@asynccontextmanager
async def running(settings: WorkerSettings) -> AsyncIterator[tuple[Runtime, asyncio.Task[Stop]]]:
    runtime = await build(settings)
    task = asyncio.create_task(runtime.run())
    try:
        yield runtime, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_fetches_confirms_generates_submits_and_drains(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """From nothing to accepted completions over two versions, then a clean leave."""
    await coordinator.start()
    first = coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1, 2, 3))]
    async with running(settings_for(coordinator, tmp_path / "worker")) as (runtime, task):
        await until(lambda: len(coordinator.accepted) == 4, "four completions of L1")
        assert coordinator.joins[0].price_uusd_per_hour == 350_000
        assert coordinator.confirms[0].fetched_bytes > 0
        for (lease_id, _), (done, arrays, digests) in coordinator.accepted.items():
            assert lease_id == "L1"
            assert digests == {"0": first.digest}
            assert (arrays["token_ids"] < 40).all()
            assert (arrays["logprobs"] <= 0).all()
            assert set(arrays["versions"].tolist()) == {0}
            assert (arrays["token_ids"][-1] == 3) == (done.stop_reason == "stop")
        second = coordinator.publish(make_model(1), 1)
        await until(lambda: any(held.version == 1 for beat in coordinator.beats for held in beat.held), "version 1 advertised")
        coordinator.work = [coordinator.lease_of("L2", (0, 1), fence=8)]
        coordinator.more_work.set()
        await until(lambda: ("L2", 1) in coordinator.accepted, "completions of L2")
        assert coordinator.accepted["L2", 1][2] == {"1": second.digest}
        await until(lambda: {h.version for h in coordinator.beats[-1].held} == {1}, "version 0 dropped")
        runtime.request_drain("SIGTERM")
        assert await asyncio.wait_for(task, 10.0) == Stop("SIGTERM", EXIT_OK)
    assert coordinator.left == ["SIGTERM"]
    status = read_status(tmp_path / "worker")
    assert status is not None
    assert (status.ended, status.accepted_here, status.working) == ("SIGTERM", 6, False)
    assert status.tokens_per_s > 0


async def test_what_was_fetched_survives_a_restart(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """The second session asks for no piece and comes back with the same key; every bit on disk is the published one."""
    await coordinator.start()
    manifest = coordinator.publish(make_model(0), 0)
    settings = settings_for(coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: coordinator.confirms, "the first confirmation")
    pieces = coordinator.requests["piece"]
    coordinator.confirms.clear()
    async with running(settings):
        await until(lambda: coordinator.confirms, "the second confirmation")
    assert coordinator.requests["piece"] == pieces > 0
    assert len({join.public_key for join in coordinator.joins}) == 1
    (directory,) = [path for path in (tmp_path / "worker" / "weights" / "versions").iterdir() if path.is_dir()]
    assert digest_of(directory) == manifest.digest


async def test_a_fetch_that_broke_off_resumes_with_what_is_there(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until, refused: Any
) -> None:
    """Pieces that arrived before the end of a session are not asked for again."""
    await coordinator.start()
    manifest = coordinator.publish(make_model(0), 0)
    asked: list[str] = []

    def before(route: str, request: Any) -> None:
        if route == "piece":
            asked.append(request.match_info["digest"])
            if len(asked) > 1:
                raise refused(503, "busy")

    coordinator.before = before
    settings = settings_for(coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: len(asked) > 3, "a fetch that stalls")
    had = asked[0]
    asked.clear()
    coordinator.before = lambda route, request: asked.append(request.match_info["digest"]) if route == "piece" else None
    async with running(settings):
        await until(lambda: coordinator.confirms, "the confirmation")
    assert had not in asked
    assert len(set(asked)) == len(asked) >= 1
    assert coordinator.confirms[0].digest == manifest.digest


async def test_a_wrong_canary_is_reloaded_and_then_right(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """Law 3: no completion leaves before the weights were confirmed; a bad swap heals itself."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1))]
    engine = EngineSettings("scripted", slots=8, faults={"canary": 1})
    async with running(settings_for(coordinator, tmp_path / "worker", engine=engine)):
        await until(lambda: len(coordinator.accepted) == 2, "completions after the second confirmation")
    assert coordinator.requests["confirm"] == 2
    status = read_status(tmp_path / "worker")
    assert status is not None
    assert [note["code"] for note in status.notes] == ["not_confirmed"]


async def test_a_lost_answer_to_a_submission_loses_nothing(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until, refused: Any
) -> None:
    """Three answers are lost; the completions arrive all the same, and one beat still follows the other."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1, 2))]
    lost = [3]

    def before(route: str, _request: Any) -> None:
        if route == "submit" and lost[0]:
            lost[0] -= 1
            raise refused(503, "busy")

    coordinator.before = before
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: len(coordinator.accepted) == 3, "three completions in spite of three refusals")
    assert lost == [0]


async def test_a_newer_session_with_the_same_key_stops_the_older(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, refused: Any
) -> None:
    """The message says what happened, and the exit code keeps a supervisor from restarting it."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)

    def before(route: str, _request: Any) -> None:
        if route == "heartbeat":
            raise refused(409, "old_session")

    coordinator.before = before
    async with running(settings_for(coordinator, tmp_path / "worker")) as (_, task):
        stop = await asyncio.wait_for(task, 10.0)
    assert stop.exit_code == EXIT_FENCED
    assert "a newer session with this key is active" in stop.reason


async def test_a_broken_engine_ends_the_worker_with_its_own_code(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path
) -> None:
    """The coordinator is told, so that the leases are issued to others at once."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1))]
    engine = EngineSettings("scripted", slots=8, faults={"step": 2})
    async with running(settings_for(coordinator, tmp_path / "worker", engine=engine)) as (_, task):
        stop = await asyncio.wait_for(task, 10.0)
    assert stop.exit_code == EXIT_ENGINE
    assert coordinator.left == [stop.reason]
    assert "scripted fault" in stop.reason


async def test_the_torch_engine_serves_published_bits(coordinator: Any, tmp_path: Path, until: Until) -> None:
    """Published in bf16, fetched as pieces, assembled, loaded: the canary is that of the published bits to 1e-4, and the
    completions' log-probs are the model's own."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    await coordinator.start()
    ids = tuple(range(1, 25))
    coordinator.publish(tmp_path / "model", 0, canary_ids=ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> Any:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()

    coordinator.expected_canary = lambda manifest: tuple(logprobs(list(ids)).tolist())
    coordinator.work = [coordinator.lease_of("L1", (0, 1, 2))]
    engine = EngineSettings("torch", slots=4, device="cpu")
    async with running(settings_for(coordinator, tmp_path / "worker", engine=engine)):
        await until(lambda: len(coordinator.accepted) == 3, "three completions", 60.0)
    assert coordinator.joins[0].engine.kind == "torch"
    for _, arrays, _ in coordinator.accepted.values():
        expected = logprobs([4, 5, *arrays["token_ids"].tolist()])[1:]
        assert np.abs(expected - arrays["logprobs"]).max() < 1e-4


async def test_the_status_file_says_why_a_worker_does_not_work(coordinator: Any, tmp_path: Path, until: Until) -> None:
    """No version published: the reason is there in words, and the file is whole JSON at every look."""
    await coordinator.start()
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until((tmp_path / "worker" / "status.json").exists, "a status file")
        await until(lambda: len(coordinator.beats) >= 2, "beats")
        seen = json.loads((tmp_path / "worker" / "status.json").read_text())
    assert seen["working"] is False
    assert seen["because"]
    assert "secretsecretsecret" not in json.dumps(seen)


async def test_a_stored_version_whose_bits_changed_is_fetched_anew(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """Law 3: a directory is served only after it was verified, also by the next process on the same disk."""
    await coordinator.start()
    manifest = coordinator.publish(make_model(0), 0)
    settings = settings_for(coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: coordinator.confirms, "the first confirmation")
    (directory,) = [path for path in (tmp_path / "worker" / "weights" / "versions").iterdir() if path.is_dir()]
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    coordinator.confirms.clear()
    async with running(settings):
        await until(lambda: coordinator.confirms, "the second confirmation")
    assert coordinator.requests["manifest"] == 2
    assert digest_of(directory) == manifest.digest


async def test_pieces_of_an_abandoned_fetch_make_room_for_the_next(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until, refused: Any
) -> None:
    """A disk that an unfinished version filled must not keep the next one out."""
    await coordinator.start()
    first = coordinator.publish(make_model(0), 0)
    served: list[str] = []

    def before(route: str, request: Any) -> None:
        if route == "piece" and len(served) >= 1:
            raise refused(503, "busy")
        served.append(request.path) if route == "piece" else None

    coordinator.before = before
    settings = settings_for(coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: coordinator.requests["piece"] > 2, "a fetch that stalls with one piece here")
    coordinator.before = lambda route, request: None
    second = coordinator.publish(make_model(1), 1)
    async with running(settings):
        await until(lambda: coordinator.confirms, "the confirmation of the second version")
    here = {path.name for path in (tmp_path / "worker" / "weights" / "pieces").glob("??/*")}
    assert here
    assert here <= {piece.digest for piece in second.all_pieces()}
    assert not here <= {piece.digest for piece in first.all_pieces()}


async def test_a_full_disk_for_the_status_file_does_not_end_the_work(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is for people; completions are what is paid."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker_node.books.write_status", full)
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1))]
    async with running(settings_for(coordinator, tmp_path / "worker")) as (runtime, task):
        await until(lambda: len(coordinator.accepted) == 2, "completions without a status file")
        runtime.request_drain("SIGTERM")
        assert (await asyncio.wait_for(task, 10.0)).exit_code == EXIT_OK


async def test_old_versions_that_cannot_be_removed_do_not_end_the_work(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing clean-up is told and left to the next start."""

    def stuck(_: Path) -> None:
        raise OSError(5, "Input/output error")

    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")) as (_, task):
        await until(lambda: coordinator.confirms, "the first confirmation")
        monkeypatch.setattr("worker_node.adapters.swarm._remove", stuck)
        coordinator.publish(make_model(1), 1)
        await until(lambda: {c.version for c in coordinator.confirms} == {0, 1}, "the second confirmation")
        beats = len(coordinator.beats)
        await until(lambda: len(coordinator.beats) > beats + 2, "beats after it")
        assert not task.done()


async def test_a_second_worker_on_one_state_directory_is_refused_before_it_touches_anything(
    coordinator: Any, tmp_path: Path
) -> None:
    """One key, one process: the second changes neither the key nor the coordinator that is remembered."""
    settings = settings_for(coordinator, tmp_path / "worker", url="http://127.0.0.1:9")
    identity.make_state_dir(settings.state_dir)
    lock = Lock(settings.state_dir)
    lock.take()
    try:
        with pytest.raises(ConfigError, match="another worker already runs"):
            await run_worker(settings)
        assert {path.name for path in settings.state_dir.iterdir()} == {"lock"}
        assert holder(settings.state_dir) == os.getpid()
    finally:
        lock.release()
    assert holder(settings.state_dir) is None


async def test_an_impostor_in_between_does_not_end_a_worker_that_had_joined(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """At first it is a wrong URL, and fatal; later nobody but the coordinator can end a session."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")) as (runtime, task):
        await until(lambda: coordinator.confirms, "the confirmation")
        coordinator.identity_key = "0" * 64
        runtime._client._trust = None  # as after a certificate that changed
        seen = len(coordinator.beats)
        await asyncio.sleep(0.3)
        assert not task.done()
        coordinator.identity_key = None
        await until(lambda: len(coordinator.beats) > seen + 1, "beats again")


@pytest.mark.parametrize(
    "error",
    [TrustError("another certificate"), OSError(28, "No space left on device"), CallError(Outcome.TRY_AGAIN, "tls", "changed")],
)
async def test_trouble_with_network_trust_or_disk_is_no_internal_fault(
    coordinator: Any,
    make_model: Callable[[int], Path],
    tmp_path: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """Whatever is under way when it comes: the worker goes on when it is over."""

    async def fails(*_: Any, **__: Any) -> None:
        raise error

    def cannot_keep(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker_node.runtime.warm_up", cannot_keep)
    monkeypatch.setattr("worker_node.runtime.ACCOUNT_EVERY_S", 0.05)
    await coordinator.start()
    base = coordinator.publish(make_model(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")) as (runtime, task):
        await until(lambda: coordinator.confirms, "the confirmation")
        coordinator.encode(make_model(1), 1)
        version = Version("job", 1, coordinator.manifests[1].digest)
        await runtime._swarm.offer(version, epoch=runtime._epoch)
        with monkeypatch.context() as patched:
            for call in ("heartbeat", "lease", "manifest", "batches", "account"):
                patched.setattr(runtime._client, call, fails)
            patched.setattr(runtime._swarm, "_fetch", fails)
            news = Forthcoming("job", 2, base.digest, "a" * 64)
            for instruction in (do.Weigh(version), do.FetchManifest(version), do.FetchPieces(version), do.Prefetch(news)):
                runtime._perform(instruction)
            await asyncio.sleep(0.3)
            assert not task.done()
        seen = len(coordinator.beats)
        await until(lambda: len(coordinator.beats) > seen + 1, "beats again")
        assert not any("internal fault" in note.reason for note in runtime._session.report().notes)
