"""Law 2 under kill -9 of coordinator, learner and worker: nothing accepted is lost, nothing trains twice, every prompt settles."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, scripted_job

STEPS = 12
COORDINATOR_POINTS = [
    "submit.blob_written:3",
    "submit.rows_written:4",
    "grade.before_rows:3",
    "grade.rows_written:5",
    "seal.file_written:3",
    "seal.rows_written:4",
    "step.trained:7",
    "step.before_commit:8",
    "step.committed:6",
    "publish.snapshot_written:3",
    "publish.pieces_written:4",
    "publish.rows_written:5",
    "publish.edges_written:1",
    "checkpoint.written:1",
    "checkpoint.rows_written:2",
    "accounting.measured:2",
    "accounting.posted:1",
    "accounting.posted:3",
    "end.before_rows:1",
    "end.rows_written:1",
]
LEARNER_POINTS = [
    "learner.ready:1",
    "learner.trained:4",
    "learner.trained:8",
    "learner.snapshot.before_rename:3",
    "learner.snapshot.done:4",
    "learner.checkpoint.before_rename:1",
    "learner.checkpoint.done:2",
]
WORKER_POINTS = [
    "worker.fetched:2",
    "worker.swapped:2",
    "worker.confirmed:2",
    "worker.generated:3",
    "worker.submitted.before:2",
    "worker.submitted.after:3",
]
QUICK = {
    "accounting.posted:3",
    "submit.blob_written:3",
    "seal.rows_written:4",
    "step.before_commit:8",
    "learner.trained:8",
    "learner.snapshot.before_rename:3",
}
QUICK |= {"learner.checkpoint.done:2", "worker.fetched:2", "worker.generated:3", "worker.submitted.after:3"}


def cases(points: list[str]) -> list[object]:
    """All points; those beyond three of each kind run with --long."""
    return [point if point in QUICK else pytest.param(point, marks=pytest.mark.long) for point in points]


def check_end(cluster: Cluster, job_id: str, *, steps: int = STEPS) -> None:
    """What must hold after any crash."""
    job = cluster.until_ended(job_id, within_s=240)
    assert (job["state"], job["committed_steps"]) == ("completed", steps), job["reason"]
    audit = cluster.audit(job_id)
    assert audit["ok"], audit["findings"]
    assert job["staleness"]["highest"] <= job["staleness"]["bound"]
    unsettled = cluster.rows("SELECT count(*) FROM groups WHERE job_id = ? AND state IN ('issued', 'ready', 'sealed')", job_id)
    assert unsettled == [(0,)]
    trained = cluster.rows(
        "SELECT step, count(*) FROM groups WHERE job_id = ? AND state = 'trained' GROUP BY step ORDER BY step", job_id
    )
    assert trained == [(step, 2) for step in range(steps)]
    lost = cluster.rows(
        "SELECT count(*) FROM rollouts r JOIN groups g ON g.id = r.group_id "
        "WHERE r.job_id = ? AND r.state NOT IN ('void') AND g.state = 'rejected' AND g.reason = ''",
        job_id,
    )
    assert lost == [(0,)]


def started(tmp_path: Path, model: Path, **crash: str) -> tuple[Cluster, str]:
    """A cluster with a job and two workers, with the crash points armed."""
    cluster = Cluster(tmp_path)
    cluster.start_coordinator(crash_at=crash.get("coordinator"), learner_crash_at=crash.get("learner"))
    job_id = cluster.submit(scripted_job(model))
    cluster.start_worker("one", crash_at=crash.get("worker"))
    cluster.start_worker("two")
    return cluster, job_id


@pytest.mark.long
@pytest.mark.parametrize("point", ["play.before_rows:4", "play.rows_written:6", "submit.rows_written:9"])
def test_coordinator_killed_between_turns(point: str, tmp_path: Path, tiny_model: Path) -> None:
    """Rollouts of several turns go on from their rows: no turn is lost, none is paid twice."""
    job = scripted_job(tiny_model, budget={"steps": 4}, sampling={"max_new_tokens": 60})
    job["environment"] = {"type": "guess_number", "max_turns": 3, "turn_tokens": 8}
    cluster = Cluster(tmp_path)
    with cluster:
        cluster.start_coordinator(crash_at=point)
        job_id = cluster.submit(job)
        cluster.start_worker("one")
        cluster.start_worker("two")
        assert cluster.coordinator is not None
        cluster.until(lambda: cluster.coordinator.poll() == -signal.SIGKILL, f"the coordinator reaches {point}", within_s=150)
        check_end(cluster, job_id, steps=4)
        assert cluster.rows("SELECT count(*) > 0 FROM turns WHERE job_id = ?", job_id) == [(1,)]


@pytest.mark.parametrize("point", cases(COORDINATOR_POINTS))
def test_coordinator_killed_at(point: str, tmp_path: Path, tiny_model: Path) -> None:
    """The coordinator dies at a commit point and is started again."""
    cluster, job_id = started(tmp_path, tiny_model, coordinator=point)
    with cluster:
        assert cluster.coordinator is not None
        cluster.until(lambda: cluster.coordinator.poll() == -signal.SIGKILL, f"the coordinator reaches {point}", within_s=150)
        check_end(cluster, job_id)


@pytest.mark.parametrize("point", cases(LEARNER_POINTS))
def test_learner_killed_at(point: str, tmp_path: Path, tiny_model: Path) -> None:
    """The learner dies at a commit point, perhaps again and again, until a restarted coordinator arms it no more."""
    cluster, job_id = started(tmp_path, tiny_model, learner=point)
    with cluster:
        lost = "SELECT count(*) FROM events WHERE job_id = ? AND kind = 'learner_lost'"
        cluster.until(lambda: cluster.rows(lost, job_id)[0][0] >= 1, f"the learner reaches {point}", within_s=150)
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        check_end(cluster, job_id)


@pytest.mark.parametrize("point", cases(WORKER_POINTS))
def test_worker_killed_at(point: str, tmp_path: Path, tiny_model: Path) -> None:
    """A worker dies at a commit point and comes back with its identity."""
    cluster, job_id = started(tmp_path, tiny_model, worker=point)
    with cluster:
        cluster.until(lambda: cluster.workers["one"].poll() == -signal.SIGKILL, f"the worker reaches {point}", within_s=150)
        check_end(cluster, job_id)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _learner_pid(cluster: Cluster) -> int | None:
    for pid in _children(cluster.coordinator.pid):
        if b"coordinator.learner.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 20))])
def test_killed_at_a_random_moment(seed: int, tmp_path: Path, tiny_model: Path) -> None:
    """Something dies at a moment that nobody chose."""
    draw = random.Random(seed)
    cluster, job_id = started(tmp_path, tiny_model)
    with cluster:
        cluster.until(lambda: cluster.job(job_id)["committed_steps"] >= draw.randint(0, STEPS - 2), "some steps", within_s=150)
        time.sleep(draw.uniform(0.0, 0.5))
        match seed % 3:
            case 0:
                cluster.coordinator.kill()
                cluster.coordinator.wait()
            case 1:
                pid = _learner_pid(cluster)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            case _:
                cluster.workers["one"].kill()
                cluster.workers["one"].wait()
        check_end(cluster, job_id)
