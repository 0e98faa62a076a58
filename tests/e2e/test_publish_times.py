"""What a publication's time is spent on, as the coordinator's metrics tell it, and that a worker receives while the encoder works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.swarm.model import model_of
from tests.e2e.cluster import Cluster, scripted_job

PAYLOAD = 90_000_000  # of the keyframe: 135 MB of bf16, five shards
FIGURES = ("encode_s", "first_piece_s", "transfer_s", "apply_s", "to_last_worker_s")


@pytest.mark.long
def test_a_worker_receives_a_delta_while_it_is_being_encoded(tmp_path: Path) -> None:
    """Version 1 differs in every weight. Its first piece is on the worker's disk before the version is public."""
    model = model_of(PAYLOAD, 0, "echo2-test-model-")
    job = scripted_job(
        model,
        algorithm={"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-2},
        staleness={"max": 0, "publish_every": 1},
        checkpoints={"every_steps": 100},
        budget={"steps": 100},
    )
    with Cluster(tmp_path, variables={"ECHO2_ROOTS": f'["{model.parent}"]'}) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w", options=("--tokens-per-s", "5"))
        job_id = cluster.submit(job)
        cluster.until(lambda: confirmed(cluster, job_id, 0), "the worker holds version 0", within_s=180)
        old = set(pieces(tmp_path / "w"))
        cluster.until(lambda: confirmed(cluster, job_id, 1), "the worker holds version 1", within_s=180)
        arrivals = sorted(path.stat().st_mtime for path in pieces(tmp_path / "w") if path not in old)
        [(published_at,)] = cluster.rows("SELECT published_at FROM publications WHERE job_id = ? AND version = 1", job_id)
        told = dict(cluster.rows("SELECT name, value FROM metrics WHERE job_id = ? AND step = 1 AND name LIKE 'publish/%'", job_id))
    figures = {name: told[f"publish/{name}"] for name in FIGURES}
    assert arrivals[0] < published_at, figures
    assert all(value > 0 for value in figures.values()), figures
    assert figures["first_piece_s"] < figures["encode_s"]
    assert told["publish/bytes"] > 50_000_000, "the delta is large: the overlap is one of several shards"


def confirmed(cluster: Cluster, job_id: str, version: int) -> bool:
    [(count,)] = cluster.rows("SELECT count(*) FROM holdings WHERE job_id = ? AND version = ?", job_id, version)
    return bool(count)


def pieces(state: Path) -> list[Path]:
    """Those on the worker's disk."""
    return list((state / "weights/pieces").glob(f"??/{'?' * 64}"))
