"""Hosts behind rate-limited links: a namespace each, and one for the hub that routes between them.

Every host has a veth to the hub. Its upload is shaped by tbf at the host's end, its download at the hub's. With a round-trip
time the host's packets leave by a TUN instead, and `delay.py` carries them to the hub half of it later; so any two hosts see
the whole of it, and TCP does end to end.
Names carry this process's id: what a killed run left behind is removed at the next start.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

NETNS = Path("/var/run/netns")
PREFIX = "echo2b"
HUB = "10.77.0.254"
MTU = 1500
BURST = 16 * 1024  # bytes that may leave at once
QUEUE_S = 0.05
SEGMENTS = 8  # packets the stack may hand over as one: they must fit into a burst
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
CONGESTION = "cubic"
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
SYSCTLS = {
    "net/ipv4/tcp_congestion_control": CONGESTION,
    "net/ipv4/tcp_no_metrics_save": "1",  # a run does not start from what the one before it learned
    "net/ipv4/tcp_rmem": "4096 131072 33554432",
    "net/ipv4/tcp_wmem": "4096 16384 4194304",
    "net/ipv4/conf/all/rp_filter": "0",  # packets leave by the TUN and come by the veth
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
}
_LIBC = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


class NetworkRefused(Exception):
    """This machine cannot make the network; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Links:
    """Rates in Mbit/s, one a host, the seeder's first; a download of 0 is unlimited."""

    uploads: tuple[float, ...]
    downloads: tuple[float, ...]
    rtt_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes on a host's link since it was made. Up: as the shaper charged them, headers of every packet included.

    Down: as the device counted them, where several packets handed over as one have one header.
    """

    up: int
    down: int


def die_with_parent() -> None:
    """For a child between fork and exec: it must not outlive the benchmark."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace; sockets keep the one they were made in."""
    descriptor = os.open(NETNS / namespace, os.O_RDONLY)
    try:
        if _LIBC.setns(descriptor, CLONE_NEWNET) != 0:
            raise NetworkRefused(f"setns into {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def inside(namespace: str, action: Callable[[], T]) -> T:
    """What `action` returns when a thread runs it in the namespace."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            enter(namespace)
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def why_not() -> str | None:
    """Why no network can be made here; None if it can."""
    if os.geteuid() != 0:
        return "the swarm benchmark makes network namespaces and needs root: run it as root, or with sudo"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
    except NetworkRefused as error:
        return f"no network namespace can be made here: {error}"
    try:
        _ip("-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        _run("tc", "-n", probe, "qdisc", "add", "dev", "probe0", "root", *_tbf(10.0, 0.0))
    except NetworkRefused as error:
        return f"the kernel lacks veth or tbf: {error}"
    finally:
        _ip("netns", "del", probe)
    return None


def namespaces() -> list[str]:
    """The names of all that this machine has, whoever made them."""
    return [path.name for path in NETNS.iterdir()] if NETNS.is_dir() else []


def alive(process_id: str) -> bool:
    """Whether there is such a process."""
    return Path("/proc", process_id).exists()


def sweep() -> list[str]:
    """Remove the namespaces of runs that are dead, with what still runs in them; their names."""
    stale = [name for name in namespaces() if (found := re.fullmatch(rf"{PREFIX}(\d+)-\w+", name)) and not alive(found[1])]
    for name in stale:
        _remove(name)
    return stale


class Network:
    """The hosts 0..N of one benchmark; 0 is the seeder's. A context: leaving it removes everything."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.hosts = len(links.uploads)
        self._delay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove every namespace; the devices in them go too."""
        if self._delay is not None:
            self._delay.kill()
            self._delay.wait()
        for name in (*(self.namespace(host) for host in range(self.hosts)), self.hub):
            with suppress(NetworkRefused):
                _remove(name)

    @property
    def hub(self) -> str:
        """The namespace between the hosts."""
        return f"{PREFIX}{os.getpid()}-hub"

    def namespace(self, host: int) -> str:
        """The host's namespace."""
        return f"{PREFIX}{os.getpid()}-{host}"

    @staticmethod
    def address(host: int) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def start(self, host: int, *command: str, stderr: Path) -> subprocess.Popen[str]:
        """A program on the host, spoken to by lines; it ends with this process."""
        with stderr.open("ab") as errors:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                preexec_fn=die_with_parent,  # noqa: PLW1509 (no other thread holds a lock that the child would need)
            )

    def counters(self, host: int) -> Counters:
        """What the host sent and received so far."""
        name = self.namespace(host)
        shaped, header = ("wan0", 14) if self.links.rtt_ms else ("eth0", 0)
        sent = next(entry for entry in _json("tc", "-n", name, "qdisc", "show", "dev", shaped) if entry["kind"] == "tbf")
        received = _json("ip", "-n", name, "link", "show", "dev", "eth0")[0]["stats64"]["rx"]["bytes"]
        return Counters(sent["bytes"] + sent["packets"] * header, received)

    def _build(self) -> None:
        _allow_congestion_control()
        for name in (self.hub, *(self.namespace(host) for host in range(self.hosts))):
            _ip("netns", "add", name)
            inside(name, _set_sysctls)
            _ip("-n", name, "link", "set", "lo", "up")
        for host in range(self.hosts):
            self._connect(host)
        if self.links.rtt_ms:
            self._delay_packets()
        for host in range(self.hosts):
            self._shape(host)

    def _connect(self, host: int) -> None:
        name, address, port = self.namespace(host), self.address(host), f"v{host}"
        # The hub's shaper charges a packet of several segments for one header only: where it works, packets come one by one.
        segments = 1 if any(self.links.downloads) else SEGMENTS
        sizes = ("mtu", str(MTU), "gso_max_segs", str(segments))
        _ip("link", "add", "eth0", "netns", name, *sizes, "type", "veth", "peer", "name", port, "netns", self.hub, *sizes)
        _ip("-n", name, "addr", "add", f"{address}/32", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", self.hub, "addr", "add", f"{HUB}/32", "dev", port)
        _ip("-n", self.hub, "link", "set", port, "up")
        _ip("-n", self.hub, "route", "add", f"{address}/32", "dev", port)
        _ip("-n", name, "route", "add", "10.77.0.0/24", "via", HUB, "dev", "eth0", "onlink", "src", address, "metric", "100")

    def _delay_packets(self) -> None:
        arguments = [str(self.links.rtt_ms / 2), self.hub, *(self.namespace(host) for host in range(self.hosts))]
        self._delay = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.swarm.delay", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        assert self._delay.stdout is not None
        if self._delay.stdout.readline() != "ready\n":
            raise NetworkRefused("the delay line did not start: see the lines above; it needs /dev/net/tun")
        for host in range(self.hosts):
            name, address = self.namespace(host), self.address(host)
            _ip("-n", name, "route", "add", "10.77.0.0/24", "dev", "wan0", "src", address)
            # For programs that bind to the device of their address, as libtorrent does: what leaves there is turned as well.
            redirect = ("match", "u32", "0", "0", "action", "mirred", "egress", "redirect", "dev", "wan0")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "clsact")
            _run("tc", "-n", name, "filter", "add", "dev", "eth0", "egress", "protocol", "ip", "u32", *redirect)

    def _shape(self, host: int) -> None:
        rtt_s = self.links.rtt_ms / 1e3
        leaves, header = ("wan0", 14) if self.links.rtt_ms else ("eth0", 0)
        upload, download = self.links.uploads[host], self.links.downloads[host]
        _run("tc", "-n", self.namespace(host), "qdisc", "add", "dev", leaves, "root", *_tbf(upload, rtt_s, header))
        if download:
            _run("tc", "-n", self.hub, "qdisc", "add", "dev", f"v{host}", "root", *_tbf(download, rtt_s))


def parse_rates(text: str) -> tuple[float, ...]:
    """Rates from `50,10,2.5`. Raises ValueError."""
    return tuple(float(part) for part in text.split(","))


def links_of(uploads: Sequence[float], downloads: Sequence[float] = (), rtt_ms: float = 0.0) -> Links:
    """The links, checked. Raises ValueError with one line for a user."""
    downloads = tuple(downloads) or (0.0,) * len(uploads)
    if not 2 <= len(uploads) <= 200:
        raise ValueError(f"uploads has {len(uploads)} rates: give 2 to 200, the seeder's first, as in 50,50,50")
    if len(downloads) != len(uploads):
        raise ValueError(
            f"downloads has {len(downloads)} rates, uploads {len(uploads)}: give as many, the seeder's first, 0 = unlimited"
        )
    if any(rate < 0.1 or rate > 10_000 for rate in uploads) or any(rate and not 0.1 <= rate <= 10_000 for rate in downloads):
        raise ValueError("a rate is outside 0.1 to 10,000 Mbit/s: correct --uploads or --downloads")
    if not 0 <= rtt_ms <= 2000:
        raise ValueError(f"rtt-ms is {rtt_ms}: give 0 to 2,000")
    return Links(tuple(uploads), downloads, rtt_ms)


def _tbf(mbit: float, rtt_s: float, header: int = 0) -> list[str]:
    """A bucket whose queue holds 50 ms, or two round trips of the rate."""
    queue = int(mbit * 1e6 / 8 * max(QUEUE_S, 2 * rtt_s)) + BURST
    overhead = ["overhead", str(header)] if header else []
    return ["tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", str(BURST), "limit", str(queue), *overhead]


def _allow_congestion_control() -> None:
    """Namespaces other than the first may only use what the machine lists; cubic joins that list, and stays on it."""
    allowed = ALLOWED.read_text().split()
    if CONGESTION not in allowed:
        ALLOWED.write_text(" ".join([*allowed, CONGESTION]))


def _set_sysctls() -> None:
    for name, value in SYSCTLS.items():
        path = Path("/proc/sys") / name
        if path.exists():
            path.write_text(value)


def _remove(namespace: str) -> None:
    """Delete a namespace of ours; what still runs inside was started there and is ended."""
    inhabitants = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for process_id in inhabitants.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process_id), signal.SIGKILL)
    _ip("netns", "del", namespace)


def _json(program: str, *arguments: str) -> Any:
    """What `ip` or `tc` says in JSON, with statistics."""
    done = subprocess.run([program, "-j", "-s", *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NetworkRefused(f"{command[0]} is not installed: install iproute2") from None
    if done.returncode != 0:
        raise NetworkRefused(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
