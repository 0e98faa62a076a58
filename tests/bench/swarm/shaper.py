"""Measures the network before anything is concluded from it: TCP reaches each rate within 3 %, and connects in the round-trip time."""

from __future__ import annotations

import math
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.bench.swarm.bound import HEADERS
from tests.bench.swarm.network import Links, Network, inside

TOLERANCE = 0.03
MEASURED_S = 1.5
TRIES = 4  # on a busy machine the measurement is slow, not the link: the best one counts
CHUNK = bytes(64 * 1024)


@dataclass(frozen=True, slots=True)
class Rate:
    """One host's link: what TCP from or to it should get and what it got, headers included, in Mbit/s."""

    host: int
    mbit: float
    measured_mbit: float

    @property
    def sound(self) -> bool:
        """Within the tolerance."""
        return abs(self.measured_mbit / self.mbit - 1) <= TOLERANCE


def measure(network: Network) -> dict[str, object]:
    """Every distinct upload and download rate and the round trip; `ok` is whether they are what was asked for."""
    links = network.links
    uploads = [_best_rate(network, host, host, _widest_receiver(links, host)) for host in _distinct(links.uploads)]
    limited = [host for host in _distinct(links.downloads) if links.downloads[host]]
    downloads = [_best_rate(network, host, _widest_sender(links, host), host) for host in limited]
    return {
        "ok": all(rate.sound for rate in (*uploads, *downloads)),
        "tolerance": TOLERANCE,
        "uploads": [asdict(rate) for rate in uploads],
        "downloads": [asdict(rate) for rate in downloads],
        "connect_ms": round(_connect_ms(network), 2),
    }


def expected(links: Links, sender: int, receiver: int) -> float:
    """What TCP should get from one host to another: the narrower of the two links."""
    return min(links.uploads[sender], links.downloads[receiver] or math.inf)


def _distinct(rates: Sequence[float]) -> list[int]:
    """A host for each rate."""
    return list({rate: host for host, rate in reversed(list(enumerate(rates)))}.values())


def _widest_receiver(links: Links, sender: int) -> int:
    return max(_others(links, sender), key=lambda host: links.downloads[host] or math.inf)


def _widest_sender(links: Links, receiver: int) -> int:
    return max(_others(links, receiver), key=lambda host: links.uploads[host])


def _others(links: Links, host: int) -> list[int]:
    return [other for other in range(len(links.uploads)) if other != host]


def _best_rate(network: Network, host: int, sender: int, receiver: int) -> Rate:
    """The first sound measurement of the host's link, or the last of all."""
    for _ in range(TRIES - 1):
        rate = _rate(network, host, sender, receiver)
        if rate.sound or rate.measured_mbit > rate.mbit:
            return rate
    return _rate(network, host, sender, receiver)


def _rate(network: Network, host: int, sender: int, receiver: int) -> Rate:
    """TCP from one host to another, after it had time to find the rate."""
    settle_s = 0.3 + 20 * network.links.rtt_ms / 1e3
    server = inside(network.namespace(receiver), lambda: socket.create_server((network.address(receiver), 0)))
    client = inside(network.namespace(sender), lambda: socket.create_connection(server.getsockname()[:2], timeout=10))
    taken, _ = server.accept()
    taken.settimeout(10)
    stop = threading.Event()
    pump = threading.Thread(target=_send_until, args=(client, stop))
    pump.start()
    try:
        _receive_for(taken, settle_s)
        received, seconds = _receive_for(taken, MEASURED_S)
    finally:
        stop.set()
        taken.close()
        pump.join()
        client.close()
        server.close()
    return Rate(host, expected(network.links, sender, receiver), round(received * HEADERS * 8 / 1e6 / seconds, 3))


def _send_until(client: socket.socket, stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            client.sendall(CHUNK)
    except OSError:
        return  # the other side has seen enough


def _receive_for(taken: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes that came in about so many seconds, and in how many exactly."""
    begun = time.monotonic()
    received = 0
    while time.monotonic() < begun + seconds:
        received += len(taken.recv(1 << 20))
    return received, time.monotonic() - begun


def _connect_ms(network: Network) -> float:
    """Median time of a TCP handshake between the seeder and the last host: one round trip."""
    last = network.hosts - 1
    server = inside(network.namespace(last), lambda: socket.create_server((network.address(last), 0)))

    def connect() -> float:
        begun = time.monotonic()
        socket.create_connection(server.getsockname()[:2], timeout=10).close()
        return time.monotonic() - begun

    with server:
        return statistics.median(inside(network.namespace(0), connect) for _ in range(5)) * 1e3
