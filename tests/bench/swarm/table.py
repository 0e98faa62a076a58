"""The acceptance table: each row a set of links, the target of the swarm, and the other ways for comparison."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.swarm.crew import RunFailed
from tests.bench.swarm.lines import Message
from tests.bench.swarm.network import Links, links_of
from tests.bench.swarm.run import Task, piece_bytes

TOPOLOGIES = ("swarm", "star", "chain", "tree", "libtorrent")
MOST_COPIES = 1.1
REAL_WORKERS = 5  # more coordinator and worker processes than that and two cores measure themselves: participants stand in for them
Carry = Callable[..., list[Message]]


@dataclass(frozen=True, slots=True)
class Row:
    """Uploads in Mbit/s, seeder first; the largest ratio that passes."""

    uploads: tuple[float, ...]
    target: float
    mb: float = 50.0
    rtt_ms: float = 0.0

    @property
    def name(self) -> str:
        """As in `50;50,50,50`."""
        seeder, *workers = (f"{rate:g}" for rate in self.uploads)
        peers = f"{len(workers)}x{workers[0]}" if len(workers) > 4 and len(set(workers)) == 1 else ",".join(workers)
        return f"{seeder};{peers}" + (f" rtt {self.rtt_ms:g}" if self.rtt_ms else "")

    @property
    def seeder_is_limit(self) -> bool:
        """Whether one copy through the seeder's uplink takes as long as anything else: then it may not send much more."""
        return self.uploads[0] <= sum(self.uploads) / (len(self.uploads) - 1)


ROWS = (
    Row((50, 50, 50, 50), 1.12),
    Row((50, 10, 50, 50), 1.12),
    Row((50, 50, 50, 10), 1.12),
    Row((50, 5, 5, 50), 1.12),
    Row((20, 100, 100, 100, 100), 1.12),
    Row((30, 8, 60, 60, 25), 1.12),
    Row((50, *[50] * 16), 1.2),
    Row((20, 20, 20, 20), 1.25, mb=20.0, rtt_ms=100.0),
)


def acceptance(carry: Carry, chosen: Namespace) -> Message:
    """Every row by every way; prints each row as it comes. `--processes real`: real ones carry the swarm's rows of few workers."""
    wanted = _chosen(chosen.row)
    ways = tuple(chosen.topologies.split(",")) if chosen.topologies else TOPOLOGIES
    print(f"{'uploads':28}{'target':>8}" + "".join(f"{way:>12}" for way in ways) + "   seeder copies", flush=True)
    begun = time.monotonic()
    rows = [_row_or_why_not(carry, row, ways, chosen) for row in wanted]
    took_s = round(time.monotonic() - begun)
    return {
        "ok": all(row["ok"] for row in rows),
        "runs": chosen.runs,
        "other_runs": chosen.other_runs,
        "took_s": took_s,
        "rows": rows,
    }


def _chosen(names: Sequence[str]) -> list[Row]:
    """The rows of these names, all without any. Raises ValueError for a name that is none."""
    known = {row.name: row for row in ROWS}
    for name in names:
        if name not in known:
            raise ValueError(f"--row {name!r} is no row: the rows are {', '.join(known)}")
    return [known[name] for name in names or known]


def _row_or_why_not(carry: Carry, row: Row, ways: tuple[str, ...], chosen: Namespace) -> Message:
    """A row that cannot be measured must not cost the others."""
    try:
        return _row(carry, row, ways, chosen)
    except RunFailed as error:
        print(f"{row.name:28}{row.target:8.2f}  not measured: {str(error)[:300]}", flush=True)
        return {"uploads": row.name, "target": row.target, "ok": False, "error": str(error)}


def _row(carry: Carry, row: Row, ways: tuple[str, ...], chosen: Namespace) -> Message:
    is_real = chosen.processes == "real" and len(row.uploads) <= REAL_WORKERS + 1
    payload = int(row.mb * chosen.scale * 1e6)
    size = piece_bytes(payload, len(row.uploads) - 1)
    links: Links = links_of(row.uploads, (), row.rtt_ms)
    tasks = [
        Task(way, payload, size, chosen.runs, is_real=is_real, version=chosen.version)
        if way == "swarm"
        else Task(way, payload, size, chosen.other_runs)
        for way in ways
    ]
    found = dict(zip(ways, carry(links, tasks, quiet=True), strict=True))
    broken = any(result["shaper_broken"] for result in found.values())
    swarm = found.get("swarm")
    met = swarm is None or (swarm["ratio"] <= row.target and (not row.seeder_is_limit or swarm["seeder_copies"] <= MOST_COPIES))
    ratios = "".join(f"{found[way]['ratio']:12.3f}" for way in ways)
    copies = " ".join(f"{found[way]['seeder_copies']:.2f}" for way in ways)
    verdict = "broken shaper" if broken else "met" if met else "MISSED"
    print(f"{row.name:28}{row.target:8.2f}{ratios}   {copies}  {verdict}{'  (real)' if is_real else ''}", flush=True)
    return {"uploads": row.name, "target": row.target, "ok": met and not broken, "seeder_is_limit": row.seeder_is_limit, **found}
