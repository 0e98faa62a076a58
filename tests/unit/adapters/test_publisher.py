"""The encoder child: killed or refused by the disk is no verdict on the snapshot, and the next request has a child of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.clock import SystemClock
from coordinator.adapters.publisher import ProcessPublisher
from coordinator.service.job_ports import PublishFailed, PublishInterrupted


@pytest.fixture
async def publisher(tmp_path: Path):
    made = ProcessPublisher(tmp_path / "pieces", Ed25519PrivateKey.generate(), SystemClock(), deadline_s=30.0)
    yield made
    await made.close()


async def test_a_killed_encoder_is_an_interruption(publisher: ProcessPublisher, tmp_path: Path) -> None:
    asked = asyncio.create_task(publisher.publish(tmp_path / "absent", job_id="j", version=0, canary_ids=(1, 2)))
    async with asyncio.timeout(10):
        while publisher._child is None:
            await asyncio.sleep(0.001)
    publisher._child.kill()
    with pytest.raises(PublishInterrupted, match="ended"):
        await asked
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!")
    with pytest.raises(PublishFailed, match="version 0 could not be encoded"):
        await publisher.publish(folder, job_id="j", version=0, canary_ids=(1, 2))
