"""Resume exactness: a run that was killed and replayed ends with the very bits of a run that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors.numpy import load_file

from tests.e2e.cluster import Cluster, scripted_job


def run(folder: Path, model: Path, *, learner_crash_at: str | None) -> dict[str, Any]:
    """Ten steps with S = 0 and one scripted worker; what the run left."""
    with Cluster(folder) as cluster:
        cluster.start_coordinator(learner_crash_at=learner_crash_at)
        job_id = cluster.submit(scripted_job(model, staleness={"max": 0}, budget={"steps": 10}))
        cluster.start_worker("one")
        job = cluster.until_ended(job_id, within_s=240)
        assert (job["state"], job["committed_steps"]) == ("completed", 10), job["reason"]
        order = cluster.rows(
            "SELECT g.step, r.group_number, r.slot, g.prompt_index, r.text, r.reward, r.oldest_version FROM rollouts r "
            "JOIN groups g ON g.id = r.group_id WHERE r.job_id = ? AND g.state = 'trained' ORDER BY r.group_number, r.slot",
            job_id,
        )
        [(directory,)] = cluster.rows("SELECT directory FROM checkpoints WHERE job_id = ? AND step = 10", job_id)
        state = {path.name: blake3(path.read_bytes()).hexdigest() for path in sorted(Path(directory).glob("*.safetensors"))}
        batches = {path.name: load_file(path) for path in sorted((cluster.home / "batches" / job_id).glob("*.safetensors"))}
        lost = cluster.rows("SELECT count(*) FROM events WHERE job_id = ? AND kind = 'learner_lost'", job_id)
        return {"order": order, "state": state, "batches": batches, "lost": lost[0][0]}


def test_seven_kill_three_equals_ten(tmp_path: Path, tiny_model: Path) -> None:
    """Killed in the eighth step, seven committed and the checkpoint at five: weights, optimiser and data order are the same bits."""
    straight = run(tmp_path / "straight", tiny_model, learner_crash_at=None)
    killed = run(tmp_path / "killed", tiny_model, learner_crash_at="learner.trained:8")
    assert (straight["lost"], killed["lost"]) == (0, 1)
    assert len(straight["state"]) >= 2, "weights and optimiser state are files of their own"
    assert killed["state"] == straight["state"]
    assert killed["order"] == straight["order"]
    assert killed["batches"].keys() == straight["batches"].keys()
    for name, arrays in straight["batches"].items():
        for key, array in arrays.items():
            assert array.tobytes() == killed["batches"][name][key].tobytes(), f"{name}: {key}"
