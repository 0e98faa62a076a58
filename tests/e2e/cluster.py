"""A real coordinator, its learner and workers as processes on loopback, for end-to-end and crash tests."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.commands.connection import find
from coordinator.commands.job_file import upload_names
from coordinator.rest_client import RequestFailed, RestClient

HERE = Path(__file__).parent
START_S = 60.0
BIN = Path(sys.executable).parent


def scripted_job(model: Path, **changes: Any) -> dict[str, Any]:
    """A job for scripted engines: small groups, checkpoint every 5 steps. Keyword sections are merged in."""
    job: dict[str, Any] = {
        "name": "crash",
        "model": str(model),
        "environment": {"type": f"python:{HERE / 'rewards.py'}:digit_share", "train": str(HERE / "prompts.jsonl")},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "learning_rate": 1e-3, "truncated": "keep"},
        "staleness": {"max": 2},
        "sampling": {"max_new_tokens": 12},
        "checkpoints": {"every_steps": 5, "eval_every_steps": 100, "eval_prompts": 0},
        "workers": {"engines": ["scripted", "torch"]},
        "budget": {"steps": 12},
    }
    for section, values in changes.items():
        job[section] = {**job[section], **values} if isinstance(values, Mapping) else values
    return job


class Cluster:
    """Use as a context manager; every process it started is gone afterwards."""

    def __init__(self, folder: Path, *, variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.home = folder / "coordinator"
        self._variables = {
            "ECHO2_HEARTBEAT_S": "0.5",
            "ECHO2_ALLOW_SCRIPTED": "true",
            "ECHO2_RESTART_GRACE_S": "5",
            "ECHO2_LIBP2P": "false",  # half a second of CPU in every process; test_control_plane.py has it on
            **(variables or {}),
        }
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._invites: dict[str, str] = {}
        self._port = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        processes = [*self.workers.values(), *([self.coordinator] if self.coordinator else [])]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def start_coordinator(self, *, crash_at: str | None = None, learner_crash_at: str | None = None) -> None:
        """Start `echo2 serve` and wait until it is ready; a restart keeps the port, so that workers find it again."""
        variables = dict(self._variables)
        if crash_at:
            variables["ECHO2_CRASH_AT"] = crash_at
        if learner_crash_at:
            variables["ECHO2_LEARNER_CRASH_AT"] = learner_crash_at
        (self.home / "serve.json").unlink(missing_ok=True)
        command = [str(BIN / "echo2"), "serve", "--data-dir", str(self.home), "--port", str(self._port), "--tls", "self-signed"]
        self.coordinator = self._spawn(command, "coordinator", variables)
        self.until((self.home / "serve.json").exists, "the coordinator serves")
        self._port = int(json.loads((self.home / "serve.json").read_text())["url"].rpartition(":")[2])

    def start_worker(
        self,
        name: str,
        *,
        engine: str = "scripted",
        crash_at: str | None = None,
        options: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start `echo2-worker join`; a known name comes back with its identity."""
        if name not in self._invites:
            self._invites[name] = self.run(lambda c: c.post("/invites", {}))["code"]
        url = json.loads((self.home / "serve.json").read_text())["url"]
        command = [str(BIN / "echo2-worker"), "join", url, "--name", name, "--price", "0.25", "--engine", engine]
        command += ["--state-dir", str(self.folder / name), *options]
        if crash_at:
            command += ["--crash-at", crash_at]
        self.workers[name] = self._spawn(command, name, {"ECHO2_INVITE": self._invites[name], **(variables or {})})

    def _spawn(self, command: list[str], name: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def run(self, action: Callable[[RestClient], Any]) -> Any:
        """One REST call."""
        return find(None, None, self.home).run(action)

    def submit(self, job: dict[str, Any]) -> str:
        """Upload what the job names and submit it; the job's id."""

        async def action(client: RestClient) -> str:
            await upload_names(client, job, Path.cwd())
            return (await client.post("/jobs", job))["id"]

        return str(find(None, None, self.home).run(action))

    def job(self, job_id: str) -> dict[str, Any]:
        """The job as REST shows it."""
        return dict(self.run(lambda c: c.get(f"/jobs/{job_id}")))

    def audit(self, job_id: str) -> dict[str, Any]:
        """The audit as REST shows it."""
        return dict(self.run(lambda c: c.get(f"/jobs/{job_id}/audit")))

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Straight from the database file (SQLite)."""
        connection = sqlite3.connect(f"file:{self.home / 'echo2.sqlite3'}?mode=ro", uri=True)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    def until(self, condition: Callable[[], object], what: str, *, within_s: float = START_S) -> None:
        """Poll; fail with the logs' last words."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except (RequestFailed, TimeoutError, OSError):
                pass  # the coordinator is down or on its way up: that is what these tests are about
            time.sleep(0.1)
        raise AssertionError(f"not within {within_s} s: {what}\n{self.last_words()}")

    def last_words(self) -> str:
        """The tails of all logs."""
        tails = []
        for path in sorted(self.folder.glob("*.log")) + sorted((self.home / "logs").glob("*.log")):
            tails.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:]))
        return "\n".join(tails)

    def until_ended(self, job_id: str, *, within_s: float, restart: bool = True) -> dict[str, Any]:
        """Wait for the job's end, restarting the coordinator and workers that died on the way (without crash points)."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if restart:
                self.revive()
            try:
                job = self.job(job_id)
            except (RequestFailed, OSError):
                time.sleep(0.2)
                continue
            if job["state"] in ("completed", "failed", "cancelled"):
                return job
            time.sleep(0.2)
        raise AssertionError(f"job {job_id} did not end within {within_s} s\n{self.last_words()}")

    def revive(self) -> None:
        """Start again what died."""
        if self.coordinator is not None and self.coordinator.poll() is not None:
            self.start_coordinator()
        for name, process in list(self.workers.items()):
            if process.poll() is not None:
                self.start_worker(name)
