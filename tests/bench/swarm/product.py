"""The product itself on one host: `echo2 serve` with its learner and seeder on host 0, `echo2-worker join` on the others.

Version 0 is a cold start: workers stand by without a job, then one is submitted whose keyframe is the payload. It cannot be fetched before
the manifest names it, so the clock starts when the coordinator's row makes the version public (`published_at`). Version 1 is the steady state:
all hold version 0 and are connected, a training step changes every weight, and the delta travels while it is being encoded; the clock
starts when the encoder has told its first pieces. It stops at each worker when the record of the version is on its disk, which is written once
every bit of the assembled directory was verified. Scripted engines answer the canary; their rollouts are paced, so that no other
publication disturbs the transfer.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from coordinator.adapters.child import child_environment
from coordinator.commands.connection import Connection, find
from coordinator.commands.job_file import upload_names
from coordinator.rest_client import RestClient
from p2p.domain.manifest import Manifest
from tests.bench.swarm.lines import Message, hear, say
from tests.bench.swarm.model import bits_of
from tests.bench.swarm.network import die_with_parent

PORT, PEER_PORT = 7700, 7800
NETWORKS = ["10.77.0.0/24"]
BEAT_S = 1.0
POLL_S = 0.01
START_S = 50.0
PUBLISH_S = 90.0
CONFIRM_S = 20.0
END_S = 1.5
SPLIT = ("encode_s", "first_piece_s", "transfer_s", "apply_s", "to_last_worker_s")
NEW_TOKENS = 12
TOKENS_PER_S = 3.0  # one worker makes a step's completions: about 10 s, longer than between the first and the last worker's version
BIN = Path(sys.executable).parent
E2E = Path(__file__).parents[2] / "e2e"
T = TypeVar("T")


def job_of(model: str) -> dict[str, Any]:
    """A step takes four completions, and changes every weight; the next one begins when a worker holds its result.

    The reward has variance for any model.
    """
    return {
        "name": "bench",
        "model": model,
        "environment": {"type": f"python:{E2E / 'rewards.py'}:digit_share", "train": str(E2E / "prompts.jsonl")},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-2, "truncated": "keep"},
        "staleness": {"max": 0, "publish_every": 1},
        "sampling": {"max_new_tokens": NEW_TOKENS},
        "checkpoints": {"every_steps": 1000, "eval_every_steps": 1000, "eval_prompts": 0},
        "workers": {"engines": ["scripted"]},
        "budget": {"steps": 1000},
    }


def until(look: Callable[[], T | None], what: str, within_s: float) -> T:
    """What `look` returns at last. Ends this process when it never does."""
    deadline = time.monotonic() + within_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {within_s:.0f} s: {what}")
        time.sleep(POLL_S)
    return found


def monotonic(unix: float) -> float:
    """The moment on the clock that all hosts share."""
    return time.monotonic() - (time.time() - unix)


@contextmanager
def running(name: str, *arguments: str, **variables: str) -> Iterator[None]:
    """One of the installed programs while the context lasts; its log goes to this process's errors."""
    process = subprocess.Popen(
        [str(BIN / name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**child_environment(), **variables},
        preexec_fn=die_with_parent,  # noqa: PLW1509 (no other thread yet)
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()


class Rows:
    """Reads the coordinator's database file beside it."""

    def __init__(self, home: Path) -> None:
        self._url = f"file:{home / 'echo2.sqlite3'}?mode=ro"

    def __call__(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._url, uri=True)) as connection:
            return connection.execute(query, values).fetchall()


def seed(part: Message) -> None:
    """Serve, submit when it is time, say when the version was public and, at the end, what the coordinator's own figures say."""
    home = Path(part["directory"]) / "coordinator"
    model, version, workers = Path(part["model"]), part["version"], part["hosts"] - 1
    variables = {
        "ECHO2_PEER_NETWORKS": json.dumps(NETWORKS),
        "ECHO2_ROOTS": json.dumps([str(model.parent)]),
        "ECHO2_HEARTBEAT_S": str(BEAT_S),
        "ECHO2_ALLOW_SCRIPTED": "true",
    }
    options = ("--data-dir", str(home), "--host", part["address"], "--port", str(PORT), "--tls", "self-signed")
    with running("echo2", "serve", *options, **variables):
        until(lambda: (home / "serve.json").exists() or None, "the coordinator serves", START_S)
        here = find(None, None, home)
        invite = here.run(lambda client: client.post("/invites", {"max_uses": workers, "owner": "bench"}))
        say("ready", url=here.url, invite=invite["code"])
        hear("meet")
        job = ""
        if version:
            job = submit(here, str(model))
            until(lambda: holds(home, job, version - 1, workers), "every worker holds the base", part["timeout_s"])
        say("met")
        hear("publish")
        job = job or submit(here, str(model))
        say("published", **until(lambda: publication(home, job, version), f"version {version} is public", PUBLISH_S))
        hear("check")
        until(lambda: holds(home, job, version, workers), "every worker's canary is confirmed", CONFIRM_S)
        say("checked", **figures(home, job, version))
        sys.stdin.read()


def submit(here: Connection, model: str) -> str:
    """The id of the new job."""
    job = job_of(model)

    async def action(client: RestClient) -> str:
        await upload_names(client, job, Path.cwd())
        return str((await client.post("/jobs", job))["id"])

    return here.run(action)


def rows(home: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Straight from the coordinator's database file, which is beside this process."""
    with closing(sqlite3.connect(f"file:{home / 'echo2.sqlite3'}?mode=ro", uri=True)) as connection:
        return connection.execute(query, values).fetchall()


def metrics(home: Path, job: str, version: int) -> dict[str, float]:
    """What the coordinator counted of a publication, by name."""
    found = rows(home, "SELECT name, value FROM metrics WHERE job_id = ? AND step = ? AND name LIKE 'publish/%'", job, version)
    return {name.removeprefix("publish/"): value for name, value in found}


def publication(home: Path, job: str, version: int) -> Message | None:
    """When the version's first pieces could leave, and the bytes that a worker has to fetch."""
    found = rows(home, "SELECT published_at, manifest FROM publications WHERE job_id = ? AND version = ?", job, version)
    if not found:
        return None
    [(published_at, text)] = found
    counted = metrics(home, job, version)
    manifest = Manifest.from_json(text)
    edge = min(manifest.edges, key=lambda one: one.size)
    known_files = 0 if edge.base_digest is None else sum(piece.size for file in manifest.files for piece in file.pieces)
    return {
        "at": monotonic(published_at) - (counted["encode_s"] - counted["first_piece_s"] if edge.base_digest else 0.0),
        "public_at": monotonic(published_at),
        "payload_bytes": sum(piece.size for piece in manifest.pieces([edge])) - known_files,
        "encoding": edge.encoding,
        "piece_bytes": max(piece.size for piece in edge.pieces),
    }


def holds(home: Path, job: str, version: int, workers: int) -> bool | None:
    """True once so many workers have confirmed the version."""
    [(count,)] = rows(home, "SELECT count(*) FROM holdings WHERE job_id = ? AND version = ?", job, version)
    return True if count == workers else None


def figures(home: Path, job: str, version: int) -> Message:
    """What the coordinator says of the version: its split of the time, what workers fetched, and the bits that it published."""
    counted = metrics(home, job, version)
    [(total, peers)] = rows(
        home,
        "SELECT sum(fetched_bytes), sum(fetched_from_peers_bytes) FROM holdings WHERE job_id = ? AND version = ?",
        job,
        version,
    )
    [(directory,)] = rows(home, "SELECT directory FROM publications WHERE job_id = ? AND version = ?", job, version)
    split = {name: round(counted[name], 4) for name in SPLIT}
    return {"digest": bits_of(Path(directory)), "split": split, "fetched_bytes": total, "fetched_from_peers_bytes": peers}


def work(part: Message) -> None:
    """Join, stand by, take the version; say when it was whole on disk, and when its first and last piece came."""
    state, version = Path(part["directory"]) / "worker", part["version"]
    say("ready")
    front = hear("meet")["hosts"][0]
    options = ["join", front["url"], "--name", f"host-{part['host']}", "--state-dir", str(state), "--engine", "scripted"]
    options += ["--peer-host", part["address"], "--peer-port", str(PEER_PORT), "--slots", "1", "--tokens-per-s", f"{TOKENS_PER_S}"]
    with running("echo2-worker", *options, ECHO2_INVITE=front["invite"]):
        until(lambda: stands_by(state), "the worker stands by", START_S)
        if version:
            until(lambda: record(state, version - 1), "the base is here", part["timeout_s"])
        known = set(pieces(state))
        say("met")
        hear("publish")
        place = until(lambda: record(state, version), f"version {version} is here", PUBLISH_S + part["timeout_s"])
        whole_at = monotonic(place.stat().st_ctime)
        arrivals = [path.stat().st_mtime for path in pieces(state) if path not in known]
        say("done", at=whole_at, first_piece_at=monotonic(min(arrivals)), last_piece_at=monotonic(max(arrivals)))
        hear("check")
        say("checked", digest=bits_of(place.with_suffix("")))
        sys.stdin.read()


def record(state: Path, version: int) -> Path | None:
    """The file that says that the version is whole on this disk."""
    return next((state / "weights/versions").glob(f"*-{version}-*.json"), None)


def pieces(state: Path) -> list[Path]:
    """Those on this disk."""
    return list((state / "weights/pieces").glob(f"??/{'?' * 64}"))


def stands_by(state: Path) -> bool | None:
    """True once the coordinator has answered a heartbeat."""
    status = state / "status.json"
    return True if status.exists() and json.loads(status.read_text())["coordinator_state"] else None


def main() -> None:
    """Host 0 serves."""
    part = hear("part")
    (seed if part["host"] == 0 else work)(part)


if __name__ == "__main__":
    main()
