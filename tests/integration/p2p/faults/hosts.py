"""Bulk nodes on hosts of their own, whose links can be cut: network namespaces, for root only."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TypeVar

import pytest

from tests.bench.swarm.network import Network, inside, links_of, why_not
from tests.integration.p2p.bulk.nodes import Node

NETWORKS = ("10.77.0.0/24",)
needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
T = TypeVar("T")


class Hosts:
    """Use `hosts(...)`. Host 0 is the first."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._cuts: list[tuple[str, ...]] = []

    def on(self, host: int, action: Callable[[], T]) -> T:
        """What `action` returns on that host; the sockets and threads that it makes stay there."""
        return inside(self._network.namespace(host), action)

    def node(self, host: int, root: Path, peer: str, **changes: object) -> Node:
        """A bulk node that listens on the host."""
        address = self._network.address(host)
        return self.on(host, lambda: Node(root, peer, host=address, allowed_networks=NETWORKS, **changes))

    def dial(self, host: int, node: Node, other: Node) -> None:
        """Let the node that is on `host` dial the other."""
        self.on(host, lambda: node.dial(other))

    def cut(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Packets between the two groups are lost without a word, both ways."""
        pairs = [pair for one, other in product(some, others) for pair in ((one, other), (other, one))]
        for one, other in pairs:
            rule = ("from", self._network.address(one), "to", self._network.address(other), "blackhole")
            _ip("-n", self._network.hub, "rule", "add", *rule)
            self._cuts.append(rule)

    def heal(self) -> None:
        """Take every `cut` back."""
        for rule in self._cuts:
            _ip("-n", self._network.hub, "rule", "del", *rule)
        self._cuts.clear()

    def unplug(self, host: int) -> None:
        """The host's cable is out: it sees that itself."""
        _ip("-n", self._network.hub, "link", "set", f"v{host}", "down")

    def plug_in(self, host: int) -> None:
        """Take `unplug` back; the hub's route went with the link."""
        _ip("-n", self._network.hub, "link", "set", f"v{host}", "up")
        _ip("-n", self._network.hub, "route", "replace", f"{self._network.address(host)}/32", "dev", f"v{host}")


@contextmanager
def hosts(count: int, *, mbit: float = 50.0) -> Iterator[Hosts]:
    """So many hosts behind links of so many Mbit/s each way; all of it is gone afterwards."""
    with Network(links_of((mbit,) * count)) as network:
        yield Hosts(network)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
