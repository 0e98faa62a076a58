"""The demo's report and view: what is computed from what REST told."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.demo import report
from coordinator.demo.job import DemoOptions, demo_job, recipe_of
from coordinator.demo.processes import DemoFailed
from coordinator.demo.run import check_options, owned, summary
from coordinator.demo.view import sparkline, view
from coordinator.errors import CoordinatorError
from coordinator.wire.job import JobConfig


def told(**changes) -> report.Told:
    """A finished job of three steps."""
    job = {
        "state": "completed",
        "reason": "",
        "committed_steps": 3,
        "config": {"staleness": {"max": 2}, "algorithm": {"group_size": 4}},
        "staleness": {"highest": 1, "histogram": {"0": 4, "1": 2}},
        "work": {
            "groups": {"trained": 6, "rejected": 1},
            "rejected": {"no_signal": 4},
            "refused": {"lease_expired": 2, "no_signal": 1},
        },
        "spent_uusd": 1500,
        "newest_version": 3,
    }
    worker = {
        "name": "a",
        "version": 3,
        "price_uusd_per_hour": 350_000,
        "accepted_rollouts": 9,
        "accepted_tokens": 90,
        "tokens_per_s": 3.0,
        "active_s": 2.0,
        "earned_uusd": 194,
        "holdings": [
            {"version": 3, "fetched_bytes": 100, "fetched_from_peers_bytes": 40},
            {"version": 2, "fetched_bytes": 10, "fetched_from_peers_bytes": 0},
        ],
    }
    series = {
        "reward/all/mean": [(0, 0.1), (1, 0.2), (2, 0.6)],
        "eval/all/mean": [(0, 0.25), (3, 0.75)],
        "time/step": [(0, 1.0), (1, 2.0), (2, 2.0)],
        "time/wait_for_batch": [(0, 50.0), (1, 1.0), (2, 0.0)],
    }
    values = {
        "job": job,
        "workers": [worker, {**worker, "name": "b", "accepted_rollouts": 0, "holdings": []}],
        "series": series,
        "audit": {"ok": True, "counts": {"issued": 7}},
        "wall_s": 12.5,
        "churned": report.Churned(),
    }
    return report.Told(**{**values, **changes})


def test_report() -> None:
    """Each promised field, worked out by hand."""
    built = report.build(told())
    assert built["steps"] == 3
    assert (built["S"], built["max_staleness"]) == (2, 1)
    assert (built["reward_first10"], built["reward_last10"], built["reward_ends_steps"]) == (0.1, 0.6, 1)  # three steps: one each
    assert (built["greedy_before"], built["greedy_after"]) == (0.25, 0.75)
    assert built["workers_contributing"] == 1
    assert built["learner_utilisation"] == pytest.approx(4 / 5)  # step 0 waits for workers to join and is left out
    assert built["admitted"] == 24
    assert built["rejected"] == {"no_signal": 5, "lease_expired": 2}
    assert (built["bytes_to_workers"], built["bytes_from_peers"]) == (110, 40)
    assert built["simulated_cost_usd"] == 0.0015


def test_churn_is_told_and_bytes_are_compared_with_full_snapshots() -> None:
    """The slowest of those alive counts; what each fetched version would have taken as a full snapshot, less what it took."""
    there = told().workers[0]
    workers = [{**there, "version": 3}, {**there, "name": "b", "version": 1}, {**there, "name": "gone", "version": 0}]
    series = {**told().series, "publish/bytes_full": [(0, 900.0), (2, 1000.0), (3, 1000.0)]}
    churned = report.Churned(frozenset({"gone"}), kills=5, rejoins=4, longest_absence=30)
    built = report.build(told(workers=workers, series=series, churned=churned, job={**told().job, "newest_version": 3}))
    assert (built["kills"], built["rejoins"], built["longest_absence"]) == (5, 4, 30)
    assert built["versions_behind"] == 2
    assert built["bytes_saved"] == 3 * (2000 - 110)
    words = "\n".join(summary(built))
    assert "5 times a worker was killed and 4 times one came back" in words
    assert "2 versions behind" in words


def test_the_time_to_the_last_worker_is_split() -> None:
    """Medians over the versions, and a line of the summary."""
    points = {"encode_s": [0.5, 0.1, 0.2], "first_piece_s": [0.1], "transfer_s": [9.0, 3.0, 2.0], "apply_s": [0.3, 0.4, 0.5]}
    points["to_last_worker_s"] = [10.0, 3.5, 2.75]
    series = {f"publish/{name}": list(enumerate(values)) for name, values in points.items()}
    built = report.build(told(series={**told().series, **series}))
    assert built["publish_median"] == {
        "encode_s": 0.2,
        "first_piece_s": 0.1,
        "transfer_s": 3.0,
        "apply_s": 0.4,
        "to_last_worker_s": 3.5,
    }
    words = "\n".join(summary(built))
    assert "reached its last worker 3.50 s after publication (medians: encoding 0.20 s" in words
    assert "slowest transfer 3.00 s, apply 0.40 s" in words


def test_nothing_measured_is_null() -> None:
    """No step, no figure: null, not zero."""
    built = report.build(told(series={}))
    assert built["publish_median"]["transfer_s"] is None
    assert built["reward_last10"] is None
    assert built["learner_utilisation"] is None
    assert built["greedy_before"] is None


def test_moving_average() -> None:
    """The mean with up to width - 1 points before."""
    assert report.moving_average([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0, 1.0), (1, 2.0), (2, 4.0)]


def test_sparkline_is_bounded() -> None:
    """Any number of points fits the line; 0 is empty, 1 is full."""
    assert len(sparkline([(n, 0.5) for n in range(1000)], 72)) <= 72
    assert sparkline([(0, 0.0), (1, 1.0)]) == " █"
    assert sparkline([]) == ""


def test_the_countdown_recipe_is_a_job_of_its_own() -> None:
    """Its task and twice as many problems a step; the default recipe stays digit sorting."""
    options = DemoOptions(steps=7, recipe="countdown", environment="countdown")
    config = JobConfig.model_validate(demo_job(options, "/m"))
    assert (config.environment.type, config.rollouts_per_step, config.algorithm.learning_rate) == ("countdown", 256, 1e-4)
    plain = JobConfig.model_validate(demo_job(DemoOptions(steps=7), "/m"))
    assert (plain.environment.type, plain.rollouts_per_step) == ("digit_sort", 128)
    assert recipe_of("countdown").steps == 200


@pytest.mark.parametrize("staleness", [0, 3])
def test_demo_job_is_a_job(staleness: int) -> None:
    """The demo's job passes the job file's own validation."""
    config = JobConfig.model_validate(demo_job(DemoOptions(steps=7, staleness=staleness), "/m"))
    assert (config.staleness.max, config.budget.steps, config.rollouts_per_step) == (staleness, 7, 128)


@pytest.mark.parametrize(("steps", "ends"), [(0, 1), (1, 1), (3, 1), (8, 4), (20, 10), (150, 10)])
def test_first_and_last_never_overlap(steps: int, ends: int) -> None:
    """A short run compares its two halves, not a mean with itself."""
    assert report.ends_of(steps) == ends


def test_summary_speaks_in_words() -> None:
    """Ages as counts, the reason for groups left out in words, and the worker that was killed."""
    lines = "\n".join(summary(report.build(told(churned=report.Churned(frozenset({"worker-1"}), kills=1)))))
    assert "groups by age 0: 4  1: 2" in lines
    assert "5 in groups whose rewards were all equal (no_signal), 2 lease_expired" in lines
    assert "worker-1 was killed on the way" in lines
    assert "first and last step)" in lines


def frame(workers: list[dict[str, object]], *, killed: set[str], width: int) -> list[str]:
    """The live view's lines on a terminal of this width."""
    job = {
        "name": "demo",
        "state": "running",
        "committed_steps": 2,
        "planned_steps": 9,
        "staleness": {"bound": 3, "histogram": {"1": 3, "0": 16}},
        "newest_version": None,
    }
    series = {"time/step": [(0, 1.0), (1, 1.0)], "time/wait_for_batch": [(0, 99.0), (1, 3.0)]}
    out = Console(width=width, file=io.StringIO(), color_system=None)
    out.print(view(job, workers, series, elapsed_s=3.0, killed=killed))
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_frame_has_one_line_for_each_worker() -> None:
    """Long words are cut, figures are not; a killed worker says so; the learner's share is the report's."""
    row = {"state": "active", "version": 2, "tokens_per_s": 1234.5, "price_uusd_per_hour": 350_000, "accepted_rollouts": 77}
    workers = [{**row, "name": f"worker-{n}", "activity": "word " * 40, "reason": ""} for n in (1, 2)]
    lines = frame(workers, killed={"worker-2"}, width=80)
    assert len(lines) == 6 + 6
    one, two = (line for line in lines if "worker-" in line)
    assert all(figure in one for figure in ("active", "1234", "$0.35/h", "77", "…"))
    assert "killed" in two
    assert "SIGKILL, as asked" in two
    assert any("learner busy: 25%" in line and "newest version: none yet" in line for line in lines)
    assert any("0: 16  1: 3" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": Path("absent")}, "--model absent is no Hugging Face directory"),
        ({"train": Path("absent.jsonl"), "environment": "math"}, "--train absent.jsonl does not exist"),
        ({"environment": "mth"}, "--environment 'mth' must be digit_sort, countdown, math or python:FILE:FUNCTION"),
        ({"recipe": "chess"}, "--recipe 'chess' must be digit_sort or countdown"),
        ({"environment": "countdown"}, "is not what the toy of --recipe digit_sort was taught: use --recipe countdown"),
        ({"environment": "countdown", "recipe": "countdown", "train": Path("p.jsonl")}, "countdown makes its own problems"),
        ({"environment": "math"}, "--environment math needs prompts"),
        ({"train": Path("p.jsonl")}, "digit_sort makes its own problems"),
        ({"environment": "python:absent.py:f", "train": Path("p.jsonl")}, "there is no file absent.py here"),
        ({"environment": "python:r.py:g", "train": Path("p.jsonl")}, "defines no function 'g'; it defines f"),
    ],
)
def test_wrong_options_cost_no_time(
    changes: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told before a model is made."""
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "1="}\n')
    Path("r.py").write_text("def f(prompts, completions): return None\n")
    with pytest.raises(CoordinatorError, match=re.escape(words)):
        check_options(DemoOptions(**changes))  # type: ignore[arg-type]


def test_a_folder_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    """`work` is emptied only when a demo made it."""
    kept = tmp_path / "work" / "thesis.tex"
    kept.parent.mkdir()
    kept.write_text("years of work")
    with pytest.raises(DemoFailed, match="is not from a demo and would be overwritten"), owned(tmp_path):
        pass
    assert kept.read_text() == "years of work"
    (kept.parent / "coordinator.log").touch()
    with owned(tmp_path) as work:
        assert list(work.iterdir()) == []


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second is told to wait or to go elsewhere; a folder that cannot be made is one line too."""
    with owned(tmp_path), pytest.raises(DemoFailed, match="another demo runs in"), owned(tmp_path):
        pass
    with pytest.raises(DemoFailed, match="cannot be used: "), owned(Path("/proc/no/such")):
        pass
