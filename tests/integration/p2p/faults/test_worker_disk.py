"""A worker whose disk is full at the worst moments of a version: it keeps what it has, doubts no path for it, and goes on with room."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p.adapters.snapshot_dir import digest_of
from tests.integration.worker_node.test_worker import running, settings_for

FULL = OSError(errno.ENOSPC, "No space left on device")
Until = Callable[..., Any]


class Disk:
    """Stands before a function: refuses while it is full."""

    def __init__(self, real: Callable[..., Any], refusal: Callable[[], Exception]) -> None:
        self.is_full = False
        self.refused = 0
        self._real = real
        self._refusal = refusal

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self.is_full:
            return self._real(*arguments, **named)
        self.refused += 1
        raise self._refusal()


def applying() -> Exception:
    """What `assemble` raises on a full disk."""
    from p2p.errors import ApplyFailed

    refusal = ApplyFailed("version 1 of job job is not applied: [Errno 28] No space left on device")
    refusal.__cause__ = FULL
    return refusal


@pytest.mark.parametrize(("name", "refusal"), [("assemble", applying), ("write_durably", lambda: FULL)])
async def test_no_room_for_a_version(
    coordinator: Any,
    make_model: Callable[[int], Path],
    tmp_path: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    refusal: Callable[[], Exception],
) -> None:
    """For its directory, then for its record: the old one stays loaded and stored, the beats say why, the same path is taken again."""
    from worker_node.adapters import swarm

    disk = Disk(getattr(swarm, name), refusal)
    monkeypatch.setattr(swarm, name, disk)
    await coordinator.start()
    first = coordinator.publish(make_model(0), 0)
    asked: list[str] = []
    coordinator.before = lambda route, request: asked.append(request.query_string) if route == "manifest" else None
    versions = tmp_path / "worker" / "weights" / "versions"
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 0")
        disk.is_full = True
        second = coordinator.publish(make_model(1), 1)
        await until(lambda: disk.refused >= 2, "two tries")
        await until(lambda: "No space left on device" in coordinator.beats[-1].activity, "the beats say why")
        await until(lambda: not list(versions.glob("[!.]*-1-*")), "what has no record does not stay")
        assert coordinator.confirms[-1].version == 0
        assert len(list(versions.glob("*.json"))) == 1
        disk.is_full = False
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1", limit_s=40.0)
        assert not any("doubted" in query for query in asked), "a full disk is no fault of the path"
        await until(lambda: "not fetched" not in coordinator.beats[-1].activity, "nothing to tell any more")
        record = next(path for path in versions.glob("*-1-*.json"))
        assert json.loads(record.read_text())["manifest"] == second.to_json()
        assert digest_of(record.with_suffix("")) == second.digest != first.digest
