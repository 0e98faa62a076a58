"""A learner of two ranks in a real job: one is killed in the middle of a step, and the job ends as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from blake3 import blake3

from tests.e2e.cluster import Cluster, scripted_job

STEPS = 10


def run(folder: Path, model: Path, *, is_killed: bool) -> dict[str, Any]:
    """Ten steps with S = 0 and one scripted worker, each taking the learner a second; the state at the end."""
    with Cluster(folder, variables={"ECHO2_LEARNER_LEAST_STEP_S": "1"}) as cluster:
        cluster.start_coordinator()
        job_id = cluster.submit({**scripted_job(model, staleness={"max": 0}, budget={"steps": STEPS}), "learner": {"ranks": 2}})
        cluster.start_worker("one")
        if is_killed:
            under_way = "SELECT step FROM batches WHERE job_id = ? AND state = 'sealed' AND step >= 6"
            cluster.until(lambda: cluster.rows(under_way, job_id), "the seventh step is under way", within_s=240)
            second_rank(cluster).kill()
        job = cluster.until_ended(job_id, within_s=400)
        assert (job["state"], job["committed_steps"]) == ("completed", STEPS), job["reason"]
        assert cluster.audit(job_id)["ok"]
        lost = cluster.rows("SELECT data FROM events WHERE job_id = ? AND kind = 'learner_lost'", job_id)
        [(directory,)] = cluster.rows("SELECT directory FROM checkpoints WHERE job_id = ? AND step = ?", job_id, STEPS)
        state = {path.name: blake3(path.read_bytes()).hexdigest() for path in sorted(Path(directory).glob("*.safetensors"))}
        return {"state": state, "lost": [row[0] for row in lost]}


def second_rank(cluster: Cluster) -> psutil.Process:
    assert cluster.coordinator is not None
    children = psutil.Process(cluster.coordinator.pid).children(recursive=True)
    (found,) = [each for each in children if "--rank" in each.cmdline()]
    return found


@pytest.mark.long
def test_a_killed_rank_is_a_replay(tmp_path: Path, tiny_model: Path) -> None:
    """Killed with six steps committed or a little more, and the checkpoint at five: the same bits as the run that was left alone."""
    straight = run(tmp_path / "straight", tiny_model, is_killed=False)
    killed = run(tmp_path / "killed", tiny_model, is_killed=True)
    assert straight["lost"] == []
    assert len(killed["lost"]) == 1
    assert "rank 1 ended by SIGKILL" in killed["lost"][0]
    assert killed["state"] == straight["state"]
