"""Scenario files: what is wrong is named, key by key; the examples in the docs can be read."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from simulator.fleet.scenario import ScenarioWrong, parse_scenario, read_scenario

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "scenarios"
GOOD: dict[str, Any] = {
    "name": "small",
    "hours": 1.0,
    "job": {"group_size": 4, "groups_per_step": 8, "staleness": 3, "train_s": 20.0},
    "snapshot": {"keyframe_bytes": 1e8, "delta_bytes": 1e6},
    "fleet": [{"name": "a", "count": 4, "completions_per_second": 0.5, "slots": 8, "up_mbps": 100, "down_mbps": 100}],
}


def changed(edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    tree = deepcopy(GOOD)
    edit(tree)
    return tree


def test_defaults_are_the_products() -> None:
    """Heartbeat 10 s, lost after 35 s, leases of 30 s to an hour: what `coordinator/config.py` and `service/deps.py` say."""
    scenario = parse_scenario(GOOD)
    assert (scenario.liveness.heartbeat_s, scenario.liveness.lost_after_s) == (10.0, 35.0)
    assert (scenario.liveness.lease_min_s, scenario.liveness.lease_max_s) == (30.0, 3600.0)
    assert scenario.rollouts_per_step == 32
    assert scenario.workers == 4


WRONG: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda t: t["job"].update(stalenes=3), "there is no key job.stalenes"),
    (lambda t: t["fleet"][0].update(usd=1), "there is no key fleet.0.usd"),
    (lambda t: t["job"].pop("train_s"), "job.train_s is missing"),
    (lambda t: t.pop("fleet"), "fleet is missing"),
    (lambda t: t["fleet"][0].update(churn_per_hour=1.0), "fleet.0.churn_per_hour is 1.0: input should be less than 1"),
    (lambda t: t["fleet"][0].update(up_mbps=0), "fleet.0.up_mbps is 0: input should be greater than 0"),
    (lambda t: t["fleet"][0].update(usd_per_hour=float("nan")), "fleet.0.usd_per_hour is nan"),
    (lambda t: t["job"].update(publish_every="often"), "job.publish_every"),
    (
        lambda t: t.update(network={"topology": "ring"}),
        "network.topology is 'ring': input should be 'swarm', 'star', 'chain' or 'tree'",
    ),
    (lambda t: t["fleet"].append(t["fleet"][0]), "the groups are named a, a: give each a name of its own"),
    (lambda t: t["fleet"][0].update(count=100_000) or t["fleet"].append({**t["fleet"][0], "name": "b"}), "200000 workers"),
    (lambda t: t["job"].update(lengths={"mean_tokens": 9000}), "job.lengths.max_tokens is below mean_tokens"),
    (lambda t: t.update(liveness={"heartbeat_s": 40}), "liveness.lost_after_s must exceed heartbeat_s"),
]


@pytest.mark.parametrize(("edit", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_what_is_wrong_is_named(edit: Callable[[dict[str, Any]], None], words: str) -> None:
    """One line that names the key, the value and the fix."""
    with pytest.raises(ScenarioWrong, match=r"s\.toml: ") as wrong:
        parse_scenario(changed(edit), "s.toml")
    assert words in str(wrong.value)


def test_every_fault_gets_its_own_line() -> None:
    """Two faults, two lines."""
    with pytest.raises(ScenarioWrong) as wrong:
        parse_scenario(changed(lambda t: (t["job"].pop("train_s"), t.update(hours=0))))
    assert len(str(wrong.value).splitlines()) == 2


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """Absent, or not TOML."""
    with pytest.raises(ScenarioWrong, match="cannot be read: No such file"):
        read_scenario(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("name = \n")
    with pytest.raises(ScenarioWrong, match="is not TOML"):
        read_scenario(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_can_be_read(path: Path) -> None:
    """What the docs point at."""
    assert read_scenario(path).workers > 0
