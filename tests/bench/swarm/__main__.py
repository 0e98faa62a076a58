"""How close to the fluid bound a version reaches all workers, over links of given rates: needs root, Linux, tbf.

`python -m tests.bench.swarm --uploads SEED,U1,U2,… [--downloads …] [--rtt-ms N] --mb M --topology swarm|star|chain|tree|libtorrent|plain
[--runs 3] [--uplink-error 1.5] [--processes participants|real] [--json]`, or `--table` for the acceptance table. Rates in Mbit/s, the seeder's first. The last line of output is one JSON
object. Ends with 1 if a ratio lies under 0.98: the shaper is broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys

from tests.bench.swarm import shaper
from tests.bench.swarm.crew import RunFailed
from tests.bench.swarm.lines import Message
from tests.bench.swarm.network import Links, Network, NetworkRefused, links_of, parse_rates, why_not
from tests.bench.swarm.run import BROKEN_BELOW, PROGRAMS, Run, Task, measure, piece_bytes, summary
from tests.bench.swarm.table import acceptance

MEGABYTE = 1_000_000


def carry(links: Links, tasks: list[Task], *, quiet: bool) -> list[Message]:
    """The summary of each task on one network. Raises NetworkRefused, RunFailed."""
    with Network(links) as network:
        shape = shaper.measure(network)
        if not quiet:
            print(f"shaper: {json.dumps(shape)}", flush=True)
        if not shape["ok"]:
            raise RunFailed(f"the shaper is broken: {json.dumps(shape)}")
        return [summary(links, task, shape, [_one(network, task, quiet=quiet) for _ in range(task.repeats)]) for task in tasks]


def _one(network: Network, task: Task, *, quiet: bool) -> Run:
    found = measure(network, task)
    if not quiet:
        print(
            f"{task.topology:10} {found.last_worker_s:8.2f} s  ratio {found.ratio:.3f}  seeder {found.seeder_copies:.2f} copies"
            f"  cpu {found.cpu_s:.1f} s  machine {found.machine_busy:.0%} busy{split_of(found)}",
            flush=True,
        )
    return found


def split_of(found: Run) -> str:
    """Where the time went, when real processes told."""
    if found.product is None:
        return ""
    first, last = zip(*((worker.first_piece_s, worker.last_piece_s) for worker in found.per_worker), strict=True)
    figures = ", ".join(f"{name} {value:.3f}" for name, value in found.product["split"].items())
    return f"\n{'':10} first piece at {min(first):.2f} to {max(first):.2f} s, last at {max(last):.2f} s; {figures}"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.swarm", description=__doc__)
    parser.add_argument("--uploads", help="Mbit/s, the seeder's first: 50,10,50,50")
    parser.add_argument("--downloads", default="", help="Mbit/s, the seeder's first, 0 = unlimited")
    parser.add_argument("--rtt-ms", type=float, default=0.0)
    parser.add_argument("--mb", type=float, default=50.0, help="payload in 1,000,000 bytes")
    parser.add_argument("--topology", choices=sorted(PROGRAMS), default="swarm")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--piece-kib", type=int, default=0, help="default: the published rule")
    parser.add_argument("--uplink-error", type=float, default=1.0, help="rates told to the policy are wrong by up to this factor")
    parser.add_argument(
        "--processes", choices=("participants", "real"), default="participants", help="real: coordinator and workers"
    )
    parser.add_argument("--version", type=int, choices=(0, 1), default=0, help="real: 0 is a cold start, 1 the steady state")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON object")
    parser.add_argument("--table", action="store_true", help="the acceptance table instead")
    parser.add_argument("--topologies", default="", help="with --table: only these, comma-separated")
    parser.add_argument(
        "--row", action="append", default=[], help="with --table: only this row, by its name, as in '50;16x50'; repeatable"
    )
    parser.add_argument("--other-runs", type=int, default=1, help="with --table: runs of each way but the swarm")
    parser.add_argument("--scale", type=float, default=1.0, help="with --table: times the payloads, for a quick look")
    return parser.parse_args()


def main() -> int:
    """Measure, print; the exit status."""
    chosen = options()
    refusal = why_not()
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    if "libtorrent" in (chosen.topology, *chosen.topologies.split(",")) and importlib.util.find_spec("libtorrent") is None:
        print("libtorrent is not installed: pip install 'echo2[bench]', or choose other topologies", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this in the background has it ignored
    try:
        if chosen.table:
            found = acceptance(carry, chosen)
            print(json.dumps(found))
            return 0 if found["ok"] else 1
        return single(chosen)
    except (ValueError, NetworkRefused, RunFailed) as error:
        print(f"swarm benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def single(chosen: argparse.Namespace) -> int:
    """One setting, one topology."""
    if not chosen.uploads:
        raise ValueError("--uploads is missing: give rates in Mbit/s, the seeder's first, as in 50,50,50,50")
    downloads = parse_rates(chosen.downloads) if chosen.downloads else ()
    links = links_of(parse_rates(chosen.uploads), downloads, chosen.rtt_ms)
    payload = int(chosen.mb * MEGABYTE)
    size = chosen.piece_kib * 1024 or piece_bytes(payload, len(links.uploads) - 1)
    is_real = chosen.processes == "real"
    if is_real and (chosen.topology != "swarm" or chosen.uplink_error != 1.0):
        raise ValueError("real processes form a swarm and measure their uplinks: leave out --topology and --uplink-error")
    task = Task(chosen.topology, payload, size, chosen.runs, chosen.uplink_error, is_real=is_real, version=chosen.version)
    found = carry(links, [task], quiet=chosen.json)[0]
    if found["shaper_broken"]:
        print(f"swarm benchmark: a ratio is under {BROKEN_BELOW}: the shaper is broken", file=sys.stderr)
    print(json.dumps(found))
    return 1 if found["shaper_broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
