"""One measurement: publish to all workers over a network, and what came of it.

The clock starts at publication, when every participant has reported that it is ready and connected, and stops when the last
worker has verified the last byte and has it on disk. What is on the disks is read back afterwards and compared.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from tests.bench.swarm.bound import bound_s, star_s, wire_bytes
from tests.bench.swarm.crew import Crew, RunFailed
from tests.bench.swarm.lines import Message
from tests.bench.swarm.network import Counters, Links, Network, alive

PROGRAMS = {
    "swarm": "tests.bench.swarm.participant",
    "star": "tests.bench.swarm.participant",
    "chain": "tests.bench.swarm.participant",
    "tree": "tests.bench.swarm.participant",
    "libtorrent": "tests.bench.swarm.torrent",
    "plain": "tests.bench.swarm.plain",
}
BROKEN_BELOW = 0.98  # nothing is faster than the bound: the shaper let too much through
READY_S = 60.0
SCRATCH = "echo2-bench-swarm-"
MEMORY = Path("/dev/shm")
KIB = 1024


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be carried, and how. `uplink_error` 1.5: the policy is told rates up to 1.5 times wrong, each way."""

    topology: str
    payload_bytes: int
    piece_bytes: int
    uplink_error: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """What became of one worker; bytes are those on its link, headers included."""

    host: int
    seconds: float
    bytes_up: int
    bytes_down: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement. `machine_busy`: the share of this machine's cores in use meanwhile, by whatever it was."""

    bound_s: float
    last_worker_s: float
    ratio: float
    seeder_bytes: int
    seeder_copies: float
    seeder_cpu_s: float
    cpu_s: float
    machine_busy: float
    per_worker: tuple[Worker, ...]


def piece_bytes(payload: int, workers: int) -> int:
    """The published rule: clamp(F/400, 64 KiB, 1 MiB), F/800 from 16 workers on."""
    return max(64 * KIB, min(KIB * KIB, payload // (800 if workers >= 16 else 400)))


def measure(network: Network, task: Task) -> Run:
    """Carry a payload nobody but the seeder has. Raises RunFailed."""
    _sweep_scratch()
    directory = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=scratch(network.hosts * task.payload_bytes)))
    try:
        return _measured(network, task, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def summary(links: Links, task: Task, shaper: Message, runs: list[Run]) -> Message:
    """The median run's figures, and all runs."""
    middle = statistics.median_low(run.last_worker_s for run in runs)
    chosen = next(run for run in runs if run.last_worker_s == middle)
    return {
        "topology": task.topology,
        **asdict(links),
        **asdict(task),
        **asdict(chosen),
        "star_bound_s": star_s(task.payload_bytes, links.uploads),
        "shaper": shaper,
        "shaper_broken": any(run.ratio < BROKEN_BELOW for run in runs),
        "uplinks_told": uplinks_told(links, task),
        "scratch": str(scratch(len(links.uploads) * task.payload_bytes)),
        "runs": [{"last_worker_s": run.last_worker_s, "ratio": run.ratio, "machine_busy": run.machine_busy} for run in runs],
    }


def uplinks_told(links: Links, task: Task) -> list[float]:
    """What the policy is told of the uplinks, in Mbit/s: as last measured, wrong by up to `uplink_error` each way."""
    draw = random.Random(task.seed)
    return [round(rate * task.uplink_error ** draw.uniform(-1, 1), 3) for rate in links.uploads]


def scratch(needed: int) -> Path:
    """Where the hosts' folders are made: in memory if there is ample room.

    Each host would have a disk of its own. One disk for all of them would be measured instead of the network: making their piece
    files took a fifth of all CPU time with 16 workers.
    """
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * needed:
        return MEMORY
    return Path(tempfile.gettempdir())


def _sweep_scratch() -> None:
    """Remove what killed runs left behind."""
    for place in (MEMORY, Path(tempfile.gettempdir())):
        for left in place.glob(f"{SCRATCH}*-*"):
            if not alive(left.name.removeprefix(SCRATCH).partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)


def _measured(network: Network, task: Task, directory: Path) -> Run:
    parts = _parts(network, task, directory)
    with Crew(network, PROGRAMS[task.topology], parts, directory) as crew:
        _meet(crew)
        bound = bound_s(task.payload_bytes, network.links.uploads, network.links.downloads)
        counted, used, busy = _counters(network), crew.cpu_s(), _jiffies()
        published = time.monotonic()
        for host in crew.hosts:
            crew.tell(host, "publish", {})
        done = crew.gather("done", crew.workers, timeout_s=_patience_s(network, task) + 5)
        busy_share = _busy(busy, _jiffies())
        counted_after, used_after = _counters(network), crew.cpu_s()
        _check(crew, str(parts[0]["digest"]))
    spent = {host: round(used_after[host] - used[host], 2) for host in used}
    sent = {host: counted_after[host].up - counted[host].up for host in used}
    got = {host: counted_after[host].down - counted[host].down for host in used}
    workers = tuple(
        Worker(host, round(done[host]["at"] - published, 4), sent[host], got[host], spent[host]) for host in sorted(done)
    )
    last = max(worker.seconds for worker in workers)
    return Run(
        bound_s=round(bound, 4),
        last_worker_s=last,
        ratio=round(last / bound, 4),
        seeder_bytes=sent[0],
        seeder_copies=round(sent[0] / wire_bytes(task.payload_bytes), 3),
        seeder_cpu_s=spent[0],
        cpu_s=round(sum(spent.values()), 2),
        machine_busy=busy_share,
        per_worker=workers,
    )


def _parts(network: Network, task: Task, directory: Path) -> list[Message]:
    """Every host's part; the seeder's payload lies on disk."""
    payload = random.Random(task.seed).randbytes(task.payload_bytes)
    source = directory / "payload.bin"
    source.write_bytes(payload)
    told = uplinks_told(network.links, task)
    timeout_s = _patience_s(network, task)
    parts: list[Message] = []
    for host in range(network.hosts):
        (directory / str(host)).mkdir()
        parts.append(
            {
                "host": host,
                "hosts": network.hosts,
                "address": network.address(host),
                "directory": str(directory / str(host)),
                "topology": task.topology,
                "bytes": task.payload_bytes,
                "piece_bytes": task.piece_bytes,
                "digest": blake3(payload).hexdigest(),
                "uplinks_mbit": told,
                "timeout_s": timeout_s,
            }
        )
    parts[0]["payload"] = str(source)
    return parts


def _patience_s(network: Network, task: Task) -> float:
    """A chain through the slowest uplink, and then some."""
    slowest = min(network.links.uploads)
    return READY_S + 3 * wire_bytes(task.payload_bytes) * 8 / 1e6 / slowest


def _meet(crew: Crew) -> None:
    """Everybody learns what everybody said, and connects."""
    ready = crew.gather("ready", crew.hosts, READY_S)
    hosts = [{**ready[host], "host": host, "address": crew.network.address(host)} for host in crew.hosts]
    for host in crew.hosts:
        crew.tell(host, "meet", {"hosts": hosts})
    crew.gather("met", crew.hosts, READY_S)


def _check(crew: Crew, digest: str) -> None:
    for host in crew.hosts:
        crew.tell(host, "check", {})
    for host, message in crew.gather("checked", crew.hosts, READY_S).items():
        if message["digest"] != digest:
            raise RunFailed(f"host {host} has other bytes on disk than were published: {message['digest']}")


def _counters(network: Network) -> list[Counters]:
    return [network.counters(host) for host in range(network.hosts)]


def _jiffies() -> list[int]:
    with Path("/proc/stat").open() as stat:
        return [int(field) for field in stat.readline().split()[1:9]]


def _busy(before: list[int], after: list[int]) -> float:
    spent = [now - then for then, now in zip(before, after, strict=True)]
    return round(1 - (spent[3] + spent[4]) / max(1, sum(spent)), 2)
