"""Put on PYTHONPATH by test_control_plane.py: Python loads it at its start, and it makes libp2p fail as CONTROL_FAULT says.

`missing`: the packages cannot be imported. `killed FILE`: once the file exists, the trio thread dies of an exception, again and again.
`closed FILE`: once the file exists, the network ends for good and its port is closed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

PACKAGES = ("libp2p", "trio", "multiaddr")


def networks() -> list[Any]:
    """The control networks of this process."""
    return [one for one in gc.get_objects() if type(one).__name__ == "ControlNet"]


async def fail() -> None:
    raise RuntimeError("killed by a test")


def kill(net: Any) -> None:
    running = net._running
    if running is not None:
        running.soon(lambda: running._nursery.start_soon(fail))


def close(net: Any) -> None:
    net._stop.set()
    if net._running is not None:
        net._running.end()


def strike(fault: str, file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)
    if fault == "closed":
        for net in networks():
            close(net)
    while fault == "killed":
        for net in networks():
            kill(net)
        time.sleep(1.0)


match os.environ.get("CONTROL_FAULT", "").split():
    case ["missing"]:
        for name in PACKAGES:
            sys.modules[name] = None  # type: ignore[assignment]  # what Python itself does for a module that must not be imported
    case [("killed" | "closed") as fault, file]:
        threading.Thread(target=strike, args=(fault, Path(file)), daemon=True).start()
    case _:
        pass
