"""Measures the network before anything is concluded from it: TCP reaches each upload rate within 3 %, and connects in the round-trip time."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from dataclasses import asdict, dataclass

from tests.bench.swarm.bound import HEADERS
from tests.bench.swarm.network import Network, inside

TOLERANCE = 0.03
MEASURED_S = 1.5
TRIES = 4  # on a busy machine the measurement is slow, not the link: the best one counts
CHUNK = bytes(64 * 1024)


@dataclass(frozen=True, slots=True)
class Rate:
    """One host's upload: what it should be and what TCP got, headers included, in Mbit/s."""

    host: int
    mbit: float
    measured_mbit: float

    @property
    def sound(self) -> bool:
        """Within the tolerance."""
        return abs(self.measured_mbit / self.mbit - 1) <= TOLERANCE


def measure(network: Network) -> dict[str, object]:
    """Every distinct upload rate and the round trip; `ok` is whether they are what was asked for."""
    first = {rate: host for host, rate in reversed(list(enumerate(network.links.uploads)))}
    rates = [_best_rate(network, host) for host in first.values()]
    connect_ms = _connect_ms(network)
    return {
        "ok": all(rate.sound for rate in rates),
        "tolerance": TOLERANCE,
        "uploads": [asdict(rate) for rate in rates],
        "connect_ms": round(connect_ms, 2),
    }


def _best_rate(network: Network, host: int) -> Rate:
    """The first sound measurement, or the last of all."""
    for _ in range(TRIES - 1):
        rate = _rate(network, host)
        if rate.sound or rate.measured_mbit > rate.mbit:
            return rate
    return _rate(network, host)


def _rate(network: Network, host: int) -> Rate:
    """TCP from a host to its neighbour, after it had time to find the rate."""
    settle_s = 0.3 + 20 * network.links.rtt_ms / 1e3
    peer = (host + 1) % network.hosts
    server = inside(network.namespace(peer), lambda: socket.create_server((network.address(peer), 0)))
    client = inside(network.namespace(host), lambda: socket.create_connection(server.getsockname()[:2], timeout=10))
    taken, _ = server.accept()
    taken.settimeout(10)
    stop = threading.Event()
    sender = threading.Thread(target=_send_until, args=(client, stop))
    sender.start()
    try:
        _receive_for(taken, settle_s)
        received, seconds = _receive_for(taken, MEASURED_S)
    finally:
        stop.set()
        taken.close()
        sender.join()
        client.close()
        server.close()
    return Rate(host, network.links.uploads[host], round(received * HEADERS * 8 / 1e6 / seconds, 3))


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
