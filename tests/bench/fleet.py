"""A simulated day of 10,000 workers: time of one core, memory, events, what the fleet did; and the fluid model against the piece-level one.

    python -m tests.bench fleet [--hours 24] [--scenario docs/examples/scenarios/ten-thousand.toml] [--no-pieces] [--json]

One core. Piece-level: the product's swarm policy on a virtual clock (`simulator/swarm.py`), at 16 and 64 workers with mixed links.
"""

from __future__ import annotations

import json as json_module
import resource
import time
from pathlib import Path

from simulator.fleet.outcome import words
from simulator.fleet.run import simulate
from simulator.fleet.scenario import read_scenario
from simulator.fleet.spread import Class, Swarm, fluid, last_s, piecewise

SCENARIO = "docs/examples/scenarios/ten-thousand.toml"
DELTA, KEYFRAME = 61e6, 10.7e9
MOST_APART = 0.10
MOST_S, MOST_BYTES = 1800.0, 4 << 30


def mixed(workers: int, topology: str = "swarm") -> Swarm:
    """Links of an ordinary crowd: an eighth at 400 Mbit/s up, half at 100, the rest at 40."""
    classes = (
        Class(workers // 8, 400.0, 1000.0),
        Class(workers // 2, 100.0, 500.0),
        Class(workers - workers // 8 - workers // 2, 40.0, 200.0),
    )
    return Swarm(classes, 1000.0, 0.05, topology)  # type: ignore[arg-type]


def agreement() -> list[dict[str, float | str]]:
    """Fluid over piece-level time of the last worker."""
    rows: list[dict[str, float | str]] = []
    for workers in (16, 64):
        for name, size in (("delta 61 MB", DELTA), ("keyframe 10.7 GB", KEYFRAME)):
            pieces, formula = last_s(piecewise(mixed(workers), size)), last_s(fluid(mixed(workers), size))
            rows.append({"workers": workers, "file": name, "piece_s": pieces, "fluid_s": formula, "ratio": formula / pieces})
    return rows


def main(hours: float = 24.0, scenario: str = SCENARIO, no_pieces: bool = False, json: bool = False) -> dict[str, object]:
    """Measure, print, and return the figures. Exits with 1 where a bound of the docs is passed."""
    asked = read_scenario(Path(scenario)).model_copy(update={"hours": hours})
    start, start_cpu = time.perf_counter(), time.process_time()
    outcome = simulate(asked)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = outcome.figures
    report: dict[str, object] = {
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "peak_bytes": peak,
        "events": figures["events"],
        "events_per_s": round(figures["events"] / cpu_s),  # of CPU: what else the machine does is not counted
        "completions_per_s": round(figures["completions"]["leased"] / cpu_s),
        "utilisation": figures["utilisation"],
        "discards": figures["discards"],
        "laws_checked": figures["laws_checked"],
        "workers": figures["workers"],
        "pieces": [] if no_pieces else agreement(),
    }
    if json:
        print(json_module.dumps(report))
    else:
        _print(report, words(outcome), hours)
    apart = [row for row in report["pieces"] if abs(row["ratio"] - 1) > MOST_APART]  # type: ignore[attr-defined]
    if apart or cpu_s > MOST_S or peak > MOST_BYTES:
        raise SystemExit(f"past a bound: {cpu_s:.0f} s of {MOST_S:.0f}, {peak >> 20} MiB of {MOST_BYTES >> 20}, {apart}")
    return report


def _print(report: dict[str, object], lines: list[str], hours: float) -> None:
    for line in lines:
        print(f"  {line}")
    print(
        f"{hours:g} simulated hours in {report['cpu_s']} s of one core ({report['wall_s']} s by the wall), peak {int(str(report['peak_bytes'])) >> 20} MiB;"
        f" {report['events_per_s']} events/s for {report['completions_per_s']} completions/s"
    )
    for row in report["pieces"]:  # type: ignore[attr-defined]
        print(
            f"  {row['workers']} workers, {row['file']}: piece by piece {row['piece_s']:.2f} s, fluid {row['fluid_s']:.2f} s,"
            f" ratio {row['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
