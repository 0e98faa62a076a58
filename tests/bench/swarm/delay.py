"""Carries the packets of every host to the hub a fixed time after they left: `delay.py MILLISECONDS HUB HOST...` (namespaces).

Each host gets a TUN `wan0`, the hub one a host. All packets wait equally long, so one queue in order of arrival will do.
Prints `ready`, and ends with its parent.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

from tests.bench.swarm.network import MTU, enter

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
AT_ONCE = 32  # packets taken from one host before the others are looked at
QUEUE = 4000  # packets; the rate is limited before, so it only has to hold a burst


def open_tun(namespace: str, device: str) -> int:
    """A TUN in the namespace, up; the thread stays there."""
    enter(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", device, "mtu", str(MTU), "txqueuelen", str(QUEUE), "up"], check=True)
    return tun


def carry(exits: dict[int, int], delay_s: float) -> None:
    """Forever: what is read at a key is written to its value `delay_s` later."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    entries = list(exits)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select(entries, [], [], timeout)[0]
        for entry in readable:
            take(entry, exits[entry], delay_s, waiting)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, way_out, packet = waiting.popleft()
            try:
                os.write(way_out, packet)
            except BlockingIOError:
                continue  # the hub's queue is full: lost, as on any link


def take(entry: int, way_out: int, delay_s: float, waiting: deque[tuple[float, int, bytes]]) -> None:
    """Move what a host has sent into the queue."""
    for _ in range(AT_ONCE):
        try:
            packet = os.read(entry, 2048)
        except BlockingIOError:
            return
        waiting.append((time.monotonic() + delay_s, way_out, packet))


def main() -> None:
    """Open every TUN, then carry."""
    delay_s, hub, hosts = float(sys.argv[1]) / 1e3, sys.argv[2], sys.argv[3:]
    exits = {open_tun(host, "wan0"): open_tun(hub, f"w{number}") for number, host in enumerate(hosts)}
    os.nice(-10)  # a packet held too long because another process had the core would be a slower link
    print("ready", flush=True)
    carry(exits, delay_s)


if __name__ == "__main__":
    main()
