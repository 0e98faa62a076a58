"""A job with adapters and two workers: one is away for some versions and comes back by the adapters; people download them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from p2p.adapters.snapshot_dir import digest_of
from tests.e2e.cluster import BIN, Cluster, scripted_job
from tests.models.tiny import make_tiny_model

STEPS, AWAY_AT = 14, 3
LORA = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]}


@pytest.mark.long
def test_a_worker_that_was_away_comes_back_by_the_adapters(tmp_path: Path) -> None:
    """It holds version 0 beside its own; at a learning rate where deltas grow, the low-rank edge is the shortest way from anywhere."""
    pytest.importorskip("peft")
    model = make_tiny_model(tmp_path / "tiny", width=128)
    with Cluster(tmp_path / "all", variables={"ECHO2_LEARNER_LEAST_STEP_S": "0.7"}) as cluster:
        cluster.start_coordinator()
        job = scripted_job(model, budget={"steps": STEPS}, staleness={"max": 2, "publish_every": 1})
        job["algorithm"]["learning_rate"] = 0.02
        job_id = cluster.submit({**job, "lora": LORA})
        cluster.start_worker("stays")
        cluster.start_worker("away")
        held = "SELECT max(h.version) FROM holdings h JOIN workers w ON w.id = h.worker_id WHERE w.name = ?"
        cluster.until(lambda: (cluster.rows(held, "away")[0][0] or 0) >= AWAY_AT, f"version {AWAY_AT} on both", within_s=120)
        left_at = cluster.job(job_id)["committed_steps"]
        cluster.workers["away"].terminate()
        cluster.workers["away"].wait(60)
        cluster.until(lambda: cluster.job(job_id)["committed_steps"] >= left_at + 5, "five steps more", within_s=120)
        cluster.start_worker("away")
        cluster.until(lambda: (cluster.rows(held, "away")[0][0] or 0) > left_at, "it is back", within_s=120)
        ended = cluster.until_ended(job_id, within_s=240, restart=False)
        assert (ended["state"], ended["committed_steps"]) == ("completed", STEPS), ended["reason"]
        assert cluster.audit(job_id)["ok"]

        back = "SELECT h.version, h.digest, h.fetched_bytes FROM holdings h JOIN workers w ON w.id = h.worker_id "
        back += "WHERE w.name = 'away' AND h.version > ? ORDER BY h.version LIMIT 1"
        [(version, digest, fetched)] = cluster.rows(back, left_at)
        edges = cluster.rows("SELECT version, nbytes FROM edges WHERE job_id = ? AND encoding = 'lowrank'", job_id)
        assert edges, "low-rank edges were made"
        sizes = {nbytes for _, nbytes in edges}
        assert version >= left_at + 3
        assert min(sizes) * 0.9 <= fetched <= max(sizes) * 1.1, "the bytes of a low-rank edge, and no more"
        [(published,)] = cluster.rows("SELECT digest FROM publications WHERE job_id = ? AND version = ?", job_id, version)
        assert published == digest

        out = tmp_path / "adapter"
        command = [str(BIN / "echo2"), "job", "download", job_id, str(STEPS), "--adapter", "-o", str(out)]
        subprocess.run([*command, "--data-dir", str(cluster.home)], check=True, timeout=60)
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4, sorted(LORA["targets"]))
        assert len(tensor_names(out / "adapter_model.safetensors")) == 2 * 4 * 2
        for name in ("stays", "away"):
            for directory in (tmp_path / "all" / name / "weights" / "versions").glob("[!.]*-*-*"):
                if directory.is_dir():
                    assert digest_of(directory)[:32] == directory.name.rpartition("-")[2]


def tensor_names(path: Path) -> list[str]:
    """From the file's header."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]
