"""Kill -9 and SIGSTOP at processes of a running job: work resumes, nothing accepted is lost, and the audit is sound."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import Cluster, scripted_job

ENCODER, GRADER, LEARNER = "adapters.encode_child", "environments.child", "learner.process"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        made.start_coordinator()
        made.start_worker("w1")
        yield made


def children(cluster: Cluster, module: str) -> list[psutil.Process]:
    """Processes of the coordinator that run `module`."""
    assert cluster.coordinator is not None
    found = []
    for process in psutil.Process(cluster.coordinator.pid).children(recursive=True):
        try:
            if any(module in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def steps(cluster: Cluster, job: str) -> int:
    return int(cluster.job(job)["committed_steps"])


def has_ended(cluster: Cluster, job: str) -> bool:
    return cluster.job(job)["state"] in ("completed", "failed", "cancelled")


def ends_sound(cluster: Cluster, job: str, planned: int, *, within_s: float = 90) -> None:
    ended = cluster.until_ended(job, within_s=within_s, restart=False)
    assert (ended["state"], ended["committed_steps"]) == ("completed", planned), ended["reason"]
    result = cluster.audit(job)
    assert result["ok"], result["findings"]


@pytest.mark.long
@pytest.mark.parametrize("turns", [1, pytest.param(4, marks=pytest.mark.long)])
def test_encoder_graders_and_learner_are_killed(cluster: Cluster, tiny_model: Path, turns: int) -> None:
    """Each of the coordinator's children, all of a kind at once, at different steps. None of it may end the job."""
    planned = 5 + 10 * turns
    job = cluster.submit(scripted_job(tiny_model, budget={"steps": planned}))
    killed = dict.fromkeys((ENCODER, GRADER, LEARNER), 0)
    for _ in range(turns):
        for module in killed:
            at = steps(cluster, job)
            cluster.until(lambda at=at: steps(cluster, job) > at or has_ended(cluster, job), "a step is committed", within_s=60)
            for process in children(cluster, module):
                process.kill()
                killed[module] += 1
    ends_sound(cluster, job, planned)
    assert all(count >= turns for count in killed.values()), killed


@pytest.mark.long
def test_an_encoder_that_is_killed_while_it_encodes_is_started_again(cluster: Cluster, tiny_model: Path) -> None:
    """Stopped first, so that it has the request and no answer yet."""
    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 10}))
    cluster.until(lambda: steps(cluster, job) >= 2, "two steps")
    (encoder,) = children(cluster, ENCODER)
    encoder.suspend()
    time.sleep(1.0)
    encoder.kill()
    ends_sound(cluster, job, 10)


def stop_for(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_a_coordinator_that_stood_still_loses_no_worker_and_no_work(cluster: Cluster, tiny_model: Path) -> None:
    """Longer than silence is borne (1.75 s at this beat): what it did not hear meanwhile is not the workers' fault."""
    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 12}))
    cluster.until(lambda: steps(cluster, job) >= 2, "two steps")
    assert cluster.coordinator is not None
    stop_for(cluster.coordinator.pid, 6.0)
    ends_sound(cluster, job, 12)
    assert cluster.workers["w1"].poll() is None
    lost = cluster.rows("SELECT count(*) FROM leases WHERE state = 'abandoned' AND reason LIKE '%was not heard%'")
    assert lost == [(0,)], "leases were taken from a worker that never stopped"


@pytest.mark.long
@pytest.mark.parametrize(("who", "seconds"), [("learner", 60.0), ("worker", 60.0), ("coordinator", 90.0)])
def test_a_process_that_stands_still_for_long(cluster: Cluster, tiny_model: Path, who: str, seconds: float) -> None:
    cluster.start_worker("w2")
    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 40}))
    cluster.until(lambda: steps(cluster, job) >= 3, "three steps")
    assert cluster.coordinator is not None
    find: dict[str, Callable[[], int]] = {
        "learner": lambda: children(cluster, LEARNER)[0].pid,
        "worker": lambda: cluster.workers["w1"].pid,
        "coordinator": lambda: cluster.coordinator.pid if cluster.coordinator else 0,
    }
    stop_for(find[who](), seconds)
    ends_sound(cluster, job, 40, within_s=120)
    if who == "worker":
        rejoined = "SELECT count(*) FROM worker_sessions WHERE epoch = 2 AND ended_at IS NULL"
        cluster.until(lambda: cluster.rows(rejoined) == [(1,)], "the one that stood still joins again by itself")
