"""Run by test_fallback.py in a process in which libp2p cannot be imported."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

for name in ("libp2p", "trio", "multiaddr"):
    sys.modules[name] = None  # type: ignore[assignment]  # what Python itself does for a module that must not be imported
sys.path.insert(0, ".")

from p2p.adapters.control import stack  # noqa: E402
from p2p.adapters.control.fallback import FallbackControl  # noqa: E402
from p2p.adapters.control.https import HttpsControl  # noqa: E402
from p2p.adapters.control.net import ControlConfig, ControlNet  # noqa: E402
from p2p.errors import ControlDown, ControlMissing  # noqa: E402
from tests.integration.p2p.control.over_https import coordinator  # noqa: E402

ECHO, TOPIC, DESK = "/echo2/echo/1", "job-1/haves", "cc" * 32


async def echo(key: str, payload: bytes) -> bytes:
    return bytes.fromhex(key) + payload


async def main() -> None:
    is_there, line = stack.describe()
    assert not is_there
    assert "control messages go through the coordinator's HTTPS" in line
    assert "gcc libgmp-dev python3-dev" in stack.INSTALL
    net = ControlNet(ControlConfig(bytes(range(32)), ("127.0.0.1", 0)))
    with pytest.raises(ControlMissing, match="pip install"):
        await net.start()
    with pytest.raises(ControlDown):
        await net.request(DESK, ECHO, b"", timeout_s=1.0)
    async with coordinator() as server:
        server.desk.handle(ECHO, echo)
        made = [
            FallbackControl(
                ControlNet(ControlConfig(bytes([seed]) * 32)), HttpsControl(server.post_as(key), coordinator=DESK), quick_s=0.1
            )
            for seed, key in ((1, "aa" * 32), (2, "bb" * 32))
        ]
        got: list[tuple[str, bytes]] = []
        for control in made:
            await control.start()
        one, two = made
        two.subscribe(TOPIC, lambda author, payload: got.append((author, payload)), validate=lambda author, payload: True)
        assert one.way.startswith("https (libp2p cannot be used here"), one.way
        assert await one.request(DESK, ECHO, b"x", timeout_s=5.0) == bytes.fromhex("aa" * 32) + b"x"
        await one.publish(TOPIC, b"value")
        ends = time.monotonic() + 10.0
        while got != [("aa" * 32, b"value")]:
            assert time.monotonic() < ends, got
            await asyncio.sleep(0.02)
        for control in made:
            await control.close()
    print("requests, values and errors are right")


asyncio.run(main())
