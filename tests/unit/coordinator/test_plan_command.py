"""`echo2 plan` as a script sees it: exit codes, one JSON document, and errors that name field, value and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli import app
from coordinator.commands.plan import bar
from coordinator.wire.plan import PlanView

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
ASKED = ("required_rate", "kappa", "S", "binding_term", "fleets", "infeasible_because")  # what a script may count on
JOB = """
name = "planned"
model = "nowhere"
[environment]
type = "digit_sort"
[algorithm]
group_size = 4
groups_per_step = 4
[budget]
steps = 100
"""
MARKET = [
    {"id": "a", "usd_per_hour": 0.1, "completions_per_second": 0.5, "count": 4, "up_mbps": 10, "down_mbps": 100},
    {"id": "b", "usd_per_hour": 0.3, "completions_per_second": 1, "count": 2, "up_mbps": 10, "down_mbps": 100},
]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """The command on a job and a market, which tests may change."""

    def do(*options: str, job: str = JOB, market: Any = MARKET) -> Result:
        (tmp_path / "job.toml").write_text(job)
        (tmp_path / "market.json").write_text(market if isinstance(market, str) else json.dumps(market))
        paths = ("--job", str(tmp_path / "job.toml"), "--market", str(tmp_path / "market.json"))
        return CliRunner().invoke(app, ["plan", *paths, *options])

    return do


def test_a_price_file_in_toml(run, tmp_path: Path) -> None:
    """The later --market counts; the plan is that of the same offers in JSON."""
    rows = ["[[offer]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in offer.items()) for offer in MARKET]
    (tmp_path / "prices.toml").write_text("\n".join(rows))
    there = run("--market", str(tmp_path / "prices.toml"), "--json", "--required-rate", "2", market="[]")
    assert json.loads(there.stdout)["fleets"] == json.loads(run("--json", "--required-rate", "2").stdout)["fleets"] != []


def test_one_json_document(run) -> None:
    """The fields that a script may count on, and the schema of POST /plan."""
    result = run("--json", "--train-s", "10")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert set(ASKED) <= set(answer)
    assert answer["required_rate"] == pytest.approx(1.6)
    # 4B: an engine stands still for 1.6 s, at most 5 % of three steps
    assert (answer["kappa"], answer["S"], answer["infeasible_because"]) == (3, 4, None)
    assert [fleet["name"] for fleet in answer["fleets"]] == ["cheapest", "balanced", "fastest"]
    for fleet in answer["fleets"]:
        assert {"usd_per_hour", "completions_per_second", "offers", "reason"} <= set(fleet)
        assert fleet["completions_per_second"] >= 1.6 * 1.15
        assert all({"id", "count"} <= set(offer) for offer in fleet["offers"])
    PlanView.model_validate_json(result.stdout)
    by_name = {one["name"]: one for one in answer["assumptions"]}
    assert by_name["train_s"]["source"] == "given"
    assert by_name["grade_s"]["source"] == "assumed"


def test_a_given_rate(run) -> None:
    """No capacity model, no assumption: four of `a` bring 1.6 x 1.25."""
    answer = json.loads(run("--json", "--required-rate", "1.6", "--headroom", "1.25").stdout)
    assert (answer["required_rate"], answer["headroom"], answer["assumptions"]) == (1.6, 1.25, [])
    cheapest = answer["fleets"][0]
    assert [(one["id"], one["count"]) for one in cheapest["offers"]] == [("a", 4)]
    assert cheapest["usd_per_hour"] == pytest.approx(0.4)
    assert cheapest["completions_per_second"] == 2.0


def test_the_headroom_of_the_job(run) -> None:
    """Where none is given."""
    answer = json.loads(run("--json", "--required-rate", "1", job=JOB + "[workers]\nheadroom = 1.5\n").stdout)
    assert answer["headroom"] == 1.5


def test_no_fleet_is_code_3(run) -> None:
    """With the words in the document, and on the screen."""
    result = run("--json", "--required-rate", "100")
    assert result.exit_code == 3
    answer = json.loads(result.stdout)
    assert answer["fleets"] == []
    assert "find more workers" in answer["infeasible_because"]
    shown = run("--required-rate", "100")
    assert shown.exit_code == 3
    assert "NO FLEET DOES" in shown.stdout
    assert "most_allowed" in shown.stdout


@pytest.mark.parametrize(("options", "told"), [((), True), (("--train-s", "10"), False), (("--required-rate", "1"), False)])
def test_an_assumed_step_time_stands_beside_the_verdict(run, options: tuple[str, ...], told: bool) -> None:
    """The required rate is in proportion to it, so nobody should have to look for it in a table."""
    shown = " ".join(run(*options).stdout.partition("binding:")[0].split())
    assert ("train_s assumed," in shown and "give --train-s" in shown) is told


def test_dotted_overrides(run) -> None:
    """As `echo2 job submit` takes them."""
    result = run("--json", "--required-rate", "1.6", "--set", "budget.usd_per_hour=0.1")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["binding_term"] == "usd_per_hour"


@pytest.mark.parametrize(
    ("options", "files", "words"),
    [
        ((), {"market": "[{]"}, "market.json: the market is not JSON"),
        ((), {"market": [{"id": "a"}]}, "usd_per_hour is missing: give USD per hour"),
        ((), {"market": [MARKET[0], {**MARKET[1], "id": "a"}]}, "give each offer an id of its own"),
        ((), {"market": [{**MARKET[0], "up_mbps": 0}]}, "up_mbps is 0: give the uplink in Mbit/s, above 0"),
        ((), {"job": JOB + "[budget2]\n"}, "budget2 is no known key"),
        ((), {"job": "name ="}, "is not TOML"),
        (("--required-rate", "-1"), {}, "required_rate is -1: give"),
        (("--headroom", "0.5"), {}, "headroom is 0.5: give a number from 1 to 10"),
        (("--train-s", "0"), {}, "train_s is 0 (given): give s a step, above 0"),
        (("--assume", "speed=3"), {}, "there is no assumption 'speed'"),
        (("--assume", "grade_s"), {}, "'grade_s' does not read name=value"),
        (("--assume", "grade_s=much"), {}, "grade_s is 'much': give a number"),
    ],
)
def test_bad_input_is_code_2(run, options: tuple[str, ...], files: dict[str, Any], words: str) -> None:
    """One line that names field, value and fix."""
    result = run(*options, **files)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_market_that_is_not_there(run, tmp_path: Path) -> None:
    """Named, with what to give."""
    result = CliRunner().invoke(
        app, ["plan", "--job", str(EXAMPLES / "job.toml"), "--market", str(tmp_path / "absent.json"), "--required-rate", "1"]
    )
    assert result.exit_code == 2
    assert "name a price file with --market" in " ".join(result.output.split())


def test_the_examples_of_the_docs() -> None:
    """They can be planned for, here with small steps, and people see fleets, bounds and assumptions."""
    files = ("--job", str(EXAMPLES / "job.toml"), "--market", str(EXAMPLES / "market.json"))
    small = ("--train-s", "12", "--set", "algorithm.groups_per_step=2", "--set", "staleness.max=2")
    result = CliRunner().invoke(app, ["plan", *files, *small])
    assert result.exit_code == 0, result.output
    for words in ("cheapest", "fastest", "What another S would give", "Taken for true", "would buy", "█", "> 2"):
        assert words in result.stdout


def test_bars() -> None:
    """Twenty places."""
    assert bar(0.5) == "█" * 10 + "░" * 10
    assert bar(-1) == "░" * 20
    assert bar(2) == "█" * 20


def test_a_long_list_is_cut(run, capsys) -> None:
    """Of refused offers, and of the offers in a fleet."""
    market = [{**MARKET[0], "id": f"o{n}", "count": 1} for n in range(20)] + [
        {**MARKET[0], "id": f"x{n}", "count": 0} for n in range(20)
    ]
    shown = run("--required-rate", "8", market=market)
    assert "and 5 more" in shown.stdout or "and 7 more" in shown.stdout
    assert "and 8 more" in shown.stdout
