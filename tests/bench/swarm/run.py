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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from blake3 import blake3

from tests.bench.swarm.bound import bound_s, star_s, wire_bytes
from tests.bench.swarm.crew import Crew, RunFailed
from tests.bench.swarm.lines import Message
from tests.bench.swarm.model import bits_of, model_of
from tests.bench.swarm.network import Counters, Links, Network, alive

PROGRAMS = {
    "swarm": "tests.bench.swarm.participant",
    "star": "tests.bench.swarm.participant",
    "chain": "tests.bench.swarm.participant",
    "tree": "tests.bench.swarm.participant",
    "libtorrent": "tests.bench.swarm.torrent",
    "plain": "tests.bench.swarm.plain",
}
PRODUCT = "tests.bench.swarm.product"  # instead of the participants, whatever they would be
BROKEN_BELOW = 0.98  # nothing is faster than the bound: the shaper let too much through
READY_S = 60.0
PUBLISH_S = 60.0
SIZE_TOLERANCE = 0.02  # of what was asked for and what a real version takes
SCRATCH = "echo2-bench-swarm-"
MEMORY = Path("/dev/shm")
KIB = 1024


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be carried, how, and how often. `uplink_error` 1.5: the policy is told rates up to 1.5 times wrong, each way.

    Real processes cut pieces of their own size, and measure uplinks themselves.
    """

    topology: str
    payload_bytes: int
    piece_bytes: int
    repeats: int = 1
    uplink_error: float = 1.0
    seed: int = 0
    is_real: bool = False  # coordinator, seeder and workers as their users run them
    version: int = 0  # real ones: 0 is a keyframe after a cold start, 1 a delta in the steady state

    @property
    def program(self) -> str:
        """The module that plays each host."""
        return PRODUCT if self.is_real else PROGRAMS[self.topology]


@dataclass(frozen=True, slots=True)
class Worker:
    """What became of one worker; bytes are those on its link, headers included. Real ones also tell when pieces came."""

    host: int
    seconds: float
    bytes_up: int
    bytes_down: int
    cpu_s: float
    first_piece_s: float | None = None
    last_piece_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement. `machine_busy`: the share of this machine's cores in use meanwhile, by whatever it was.

    `product`: with real processes, the coordinator's own figures of the publication.
    """

    payload_bytes: int
    bound_s: float
    last_worker_s: float
    ratio: float
    seeder_bytes: int
    seeder_copies: float
    seeder_cpu_s: float
    cpu_s: float
    machine_busy: float
    per_worker: tuple[Worker, ...]
    product: Message | None = None


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
        "star_bound_s": star_s(chosen.payload_bytes, links.uploads),
        "shaper": shaper,
        "shaper_broken": any(run.ratio < BROKEN_BELOW for run in runs),
        "uplinks_told": None if task.is_real else uplinks_told(links, task),
        "scratch": str(scratch(len(links.uploads) * task.payload_bytes)),
        "runs": [_outline(run) for run in runs],
    }


def _outline(run: Run) -> Message:
    """What tells an outlier's cause: when each worker had its first and its last piece, and when it was done."""
    times = [(worker.first_piece_s, worker.last_piece_s, worker.seconds) for worker in run.per_worker]
    return {"last_worker_s": run.last_worker_s, "ratio": run.ratio, "machine_busy": run.machine_busy, "worker_times_s": times}


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
    timeout_s = _patience_s(network, task)
    with Crew(network, task.program, parts, directory) as crew:
        _meet(crew, READY_S + task.version * timeout_s)
        before = _Spent.now(network, crew)
        published = time.monotonic()
        for host in crew.hosts:
            crew.tell(host, "publish", {})
        public: Message = {"at": published, "payload_bytes": task.payload_bytes}
        if task.is_real:  # long after it was asked for: a learner starts, a snapshot is written and encoded
            public = crew.gather("published", [0], PUBLISH_S + timeout_s)[0]
            _check_size(task, public)
            before = replace(before, cpu_s=crew.cpu_s(), jiffies=_jiffies())
        done = crew.gather("done", crew.workers, timeout_s + 5)
        after = _Spent.now(network, crew)
        product = _check(crew, None if task.version else str(parts[0]["digest"]))
    return _run(network, public, before, after, done, None if product is None else product | _facts(public))


def _facts(public: Message) -> Message:
    """What the publication was, and how long after its first pieces left the whole of it was announced."""
    return {
        "encoding": public["encoding"],
        "piece_bytes": public["piece_bytes"],
        "announced_s": round(public["public_at"] - public["at"], 4),
    }


def _check_size(task: Task, public: Message) -> None:
    if task.version == 0 and abs(public["payload_bytes"] / task.payload_bytes - 1) > SIZE_TOLERANCE:
        raise RunFailed(f"version 0 takes {public['payload_bytes']} bytes, {task.payload_bytes} were asked for: see model.py")


@dataclass(frozen=True, slots=True)
class _Spent:
    """What was used up to now."""

    counters: list[Counters]
    cpu_s: dict[int, float]
    jiffies: list[int]

    @classmethod
    def now(cls, network: Network, crew: Crew) -> _Spent:
        jiffies = _jiffies()
        return cls([network.counters(host) for host in range(network.hosts)], crew.cpu_s(), jiffies)


def _run(
    network: Network, public: Message, before: _Spent, after: _Spent, done: dict[int, Message], product: Message | None
) -> Run:
    payload, published = public["payload_bytes"], public["at"]
    bound = bound_s(payload, network.links.uploads, network.links.downloads)
    spent = {host: round(after.cpu_s[host] - before.cpu_s[host], 2) for host in range(network.hosts)}
    sent = [now.up - then.up for then, now in zip(before.counters, after.counters, strict=True)]
    got = [now.down - then.down for then, now in zip(before.counters, after.counters, strict=True)]

    def since(message: Message, key: str) -> float | None:
        return round(message[key] - published, 4) if key in message else None

    workers = tuple(
        Worker(
            host,
            round(told["at"] - published, 4),
            sent[host],
            got[host],
            spent[host],
            since(told, "first_piece_at"),
            since(told, "last_piece_at"),
        )
        for host, told in sorted(done.items())
    )
    last = max(worker.seconds for worker in workers)
    return Run(
        payload_bytes=payload,
        bound_s=round(bound, 4),
        last_worker_s=last,
        ratio=round(last / bound, 4),
        seeder_bytes=sent[0],
        seeder_copies=round(sent[0] / wire_bytes(payload), 3),
        seeder_cpu_s=spent[0],
        cpu_s=round(sum(spent.values()), 2),
        machine_busy=_busy(before.jiffies, after.jiffies),
        per_worker=workers,
        product=product,
    )


def _parts(network: Network, task: Task, directory: Path) -> list[Message]:
    """Every host's part; the seeder's payload lies on disk."""
    source = _source(task, directory)
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
                "digest": source["digest"],
                "uplinks_mbit": told,
                "timeout_s": timeout_s,
                "version": task.version,
            }
        )
    parts[0] |= source
    return parts


def _source(task: Task, directory: Path) -> Message:
    """Where the payload lies, and the digest that everybody ends with."""
    if task.is_real:
        model = model_of(task.payload_bytes, task.seed, f"{SCRATCH}{os.getpid()}-")
        return {"model": str(model), "digest": bits_of(model)}
    payload = random.Random(task.seed).randbytes(task.payload_bytes)
    path = directory / "payload.bin"
    path.write_bytes(payload)
    return {"payload": str(path), "digest": blake3(payload).hexdigest()}


def _patience_s(network: Network, task: Task) -> float:
    """A chain through the slowest uplink, or the seeder alone for all, and then some."""
    slowest_s = wire_bytes(task.payload_bytes) * 8 / 1e6 / min(network.links.uploads)
    return READY_S + max(3 * slowest_s, 2 * star_s(task.payload_bytes, network.links.uploads))


def _meet(crew: Crew, timeout_s: float) -> None:
    """Everybody learns what everybody said, and connects."""
    ready = crew.gather("ready", crew.hosts, READY_S)
    hosts = [{**ready[host], "host": host, "address": crew.network.address(host)} for host in crew.hosts]
    for host in crew.hosts:
        crew.tell(host, "meet", {"hosts": hosts})
    crew.gather("met", crew.hosts, timeout_s)


def _check(crew: Crew, digest: str | None) -> Message | None:
    """Everybody has the right bytes (the seeder's, if they were not known beforehand); what a real coordinator says of the run."""
    for host in crew.hosts:
        crew.tell(host, "check", {})
    checked = crew.gather("checked", crew.hosts, READY_S)
    for host, message in checked.items():
        if message["digest"] != (digest or checked[0]["digest"]):
            raise RunFailed(f"host {host} has other bytes on disk than were published: {message['digest']}")
    figures = {key: value for key, value in checked[0].items() if key not in ("event", "digest")}
    return figures or None


def _jiffies() -> list[int]:
    with Path("/proc/stat").open() as stat:
        return [int(field) for field in stat.readline().split()[1:9]]


def _busy(before: list[int], after: list[int]) -> float:
    spent = [now - then for then, now in zip(before, after, strict=True)]
    return round(1 - (spent[3] + spent[4]) / max(1, sum(spent)), 2)
