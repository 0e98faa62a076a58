"""`echo2 simulate`: a what-if of a whole job and fleet on a virtual clock.

The only module of the coordinator that knows the simulator (see the import contract in pyproject.toml). It is imported when the command
is called: a coordinator that serves never loads it.
"""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.commands.output import console, errors, show_json
from coordinator.errors import CoordinatorError
from simulator.fleet.outcome import Outcome, words
from simulator.fleet.run import simulate
from simulator.fleet.scenario import Scenario, ScenarioWrong, read_scenario
from simulator.laws import LawBroken


class SimulationStopped(CoordinatorError):
    """The scenario or the folder cannot be used, or a law was broken; the words say what to do."""


def run(path: Path, *, seed: int | None, out: Path | None, as_json: bool) -> None:
    """Simulate the scenario of a file; show the result, and write it with plots where a folder is named."""
    try:
        scenario = read_scenario(path)
    except ScenarioWrong as wrong:
        raise SimulationStopped(str(wrong)) from wrong
    if seed is not None:
        scenario = scenario.model_copy(update={"seed": seed})
    if not as_json:
        errors.print(f"simulating {scenario.name}: {scenario.workers} workers for up to {scenario.hours:g} h, seed {scenario.seed}")
    try:
        outcome = simulate(scenario)
    except LawBroken as broken:
        raise SimulationStopped(f"a law was broken with seed {scenario.seed}, please report it: {broken}") from broken
    if out is not None:
        _write(scenario, outcome, out)
    if as_json:
        show_json(outcome.as_json())
        return
    for line in words(outcome):
        console.print(line, soft_wrap=True)
    if out is not None:
        console.print(f"result.json, summary.txt and plots are in {out}")


def _write(scenario: Scenario, outcome: Outcome, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(outcome.as_json(), indent=2, sort_keys=True) + "\n")
        (out / "summary.txt").write_text("\n".join(words(outcome)) + "\n")
    except OSError as error:
        raise SimulationStopped(f"--out {out} cannot be written: {error.strerror}") from error
    try:
        from simulator.fleet.plots import draw
    except ImportError:
        errors.print("no plots: they need matplotlib (extra `report`: pip install 'echo2[report]')", style="yellow")
        return
    draw(scenario, outcome, out)
