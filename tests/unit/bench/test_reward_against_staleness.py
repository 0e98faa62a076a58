"""What the benchmark concludes from its runs, against hand-made numbers; a real short run; and that the page shows the kept runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bench.reward_against_staleness import LOSSES, Wanted, carried_out, config_of, shared_run
from tests.bench.reward_against_staleness_table import Claim, Difference, claims, difference, rewards, table

DOCS = Path(__file__).parents[3] / "docs"
FRESH = {0: 0.60, 1: 0.62, 2: 0.64}


def run(loss: str, bound: int, seed: int, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "loss": loss,
        "S": bound,
        "seed": seed,
        "reward": reward,
        "kl": 0.0,
        "effective_samples": 1.0,
        "grad_norm_max": 1.0,
        **more,
    }


def runs_of(rows: Mapping[tuple[str, int], Mapping[int, float]]) -> list[dict[str, Any]]:
    return [run(loss, bound, seed, reward) for (loss, bound), row in rows.items() for seed, reward in row.items()]


def test_differences_are_paired_by_seed() -> None:
    """Gaps -0.01, -0.02, -0.03: mean -0.02, deviation 0.01, so 0.01 / sqrt(3) of error, 3.46 of which make the mean."""
    gap = difference({0: 0.59, 1: 0.60, 2: 0.61, 7: 0.0}, FRESH)
    assert gap is not None
    assert (gap.mean, gap.error, gap.pairs) == (pytest.approx(-0.02), pytest.approx(0.0057735), 3)
    assert gap.errors == pytest.approx(-3.4641)
    assert difference({5: 0.1}, FRESH) is None
    assert difference({1: 0.7}, FRESH) == Difference(pytest.approx(0.08), None, 1)


@pytest.mark.parametrize(("low", "holds"), [(0.59, True), (0.57, False)])
def test_a_drop_of_more_than_two_errors_fails_its_claim(low: float, holds: bool) -> None:
    """Gaps of -0.01, 0, +0.01 are 0 errors below; -0.03, -0.02, -0.01 are 3.5."""
    rows = {("dppo", 0): FRESH, ("dppo", 6): {0: low, 1: low + 0.03, 2: low + 0.06}, ("dppo", 11): FRESH, ("plain", 11): FRESH}
    found = claims(rewards(runs_of(rows)), 3)
    assert [claim.holds for claim in found] == [holds, True]
    assert found[0].words.startswith("dppo, S = 6: at most 2 standard errors below S = 0: ")


def test_worse_than_plain_fails_and_missing_runs_decide_nothing() -> None:
    better = {seed: reward + 0.01 for seed, reward in FRESH.items()}
    rows = {("dppo", 0): FRESH, ("dppo", 3): {0: 0.6}, ("dppo", 11): FRESH, ("plain", 11): better}
    assert [claim.holds for claim in claims(rewards(runs_of(rows)), 3)] == [None, False]
    assert claims({}, 3) == (Claim("dppo no worse than plain at S = 11: not enough runs", None),)


def test_the_table_has_a_row_for_each_loss_and_bound() -> None:
    rows = {("dppo", 0): FRESH, ("dppo", 6): {0: 0.59, 1: 0.60, 2: 0.61}}
    assert table(runs_of(rows))[2:] == [
        "| dppo | 0 | 0.620 ± 0.012 (.600 .620 .640) |  |  | 0.0000 | 1.000 | 1.0 |",
        "| dppo | 6 | 0.600 ± 0.006 (.590 .600 .610) | -0.020 ± 0.006 | -3.5 | 0.0000 | 1.000 | 1.0 |",
    ]


def test_a_run_is_shared_only_where_the_dual_clip_never_acted() -> None:
    """Below a ratio of 2 the two losses are the same function."""
    done = [run("plain", 0, 0, 0.6, ratio_max=1.9), run("plain", 0, 1, 0.7, ratio_max=2.1), run("dppo", 0, 2, 0.5, ratio_max=1.0)]
    shared = [shared_run(Wanted("ppo_clip", 0, seed), done) for seed in range(3)]
    assert [one and (one["loss"], one["reward"], one["same_as"]) for one in shared] == [("ppo_clip", 0.6, "plain"), None, None]
    assert shared_run(Wanted("decoupled", 0, 0), done) is None


def test_the_losses_differ_in_nothing_else() -> None:
    """And the default is the product's own, untouched."""
    jobs = {loss: config_of(Wanted(loss, 6, 0)) for loss in LOSSES}
    own = {"loss", "dual_clip"}
    assert len({json.dumps(job.algorithm.model_dump(exclude=own), sort_keys=True) for job in jobs.values()}) == 1
    assert jobs["dppo"].algorithm.model_dump(include={"tv_low", "tv_high", "ratio_cap"}) == {
        "tv_low": 0.2,
        "tv_high": 0.2,
        "ratio_cap": 2.0,
    }
    assert jobs["plain"].algorithm.dual_clip is None
    assert {job.algorithm.learning_rate for job in jobs.values()} == {1e-4}


def test_a_run_lags_by_exactly_s(tmp_path: Path) -> None:
    """Two versions behind from the third step on; data of the sampler's own version is recorded as such."""
    from coordinator.environments.base import EnvironmentSpec
    from coordinator.environments.build import build_environment
    from coordinator.learner import warm_start
    from coordinator.learner.warm_start_lessons import RECIPES, Recipe
    from tests.bench.one_process_job import Lagged, stepped

    model = tmp_path / "model"
    warm_start.make(model, seed=1, progress=lambda *_: None, recipe=Recipe(RECIPES["digit_sort"].lesson, 20))
    config = config_of(Wanted("dppo", 2, 0), steps=4)
    job = Lagged(model, config, build_environment(EnvironmentSpec("digit_sort", 0, str(model))), lag=2, measured_from=3)
    taken = list(stepped(job, tmp_path / "versions"))
    assert [one.figures["off_policy/max"] for one in taken] == [0, 1, 2, 2]
    assert [one.current_reward is None for one in taken] == [True, True, True, False]
    assert taken[0].figures["logprob_gap/all/mean"] < 0.01
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["v1", "v2", "v3"]


def test_the_page_shows_the_kept_runs() -> None:
    """Table and verdicts in docs/staleness.md are those of the runs beside its figure."""
    page = (DOCS / "staleness.md").read_text()
    runs = json.loads((DOCS / "figures" / "reward_against_staleness.json").read_text())["runs"]
    assert "\n".join(table(runs)) in page
    found = claims(rewards(runs), 5)
    assert [
        f"* {'holds' if claim.holds else 'fails' if claim.holds is False else 'open'}: {claim.words}" in page for claim in found
    ] == [True] * len(found)


def test_a_run_is_what_the_file_keeps(tmp_path: Path) -> None:
    """Every figure that table and sharing read, from a run of two steps."""
    from coordinator.learner import warm_start
    from coordinator.learner.warm_start_lessons import RECIPES, Recipe

    model = tmp_path / "model"
    warm_start.make(model, seed=1, progress=lambda *_: None, recipe=Recipe(RECIPES["noisy_digit_sort"].lesson, 5))
    kept = carried_out(Wanted("plain", 1, 3), model, steps=2, last=1)
    assert (kept["loss"], kept["S"], kept["seed"]) == ("plain", 1, 3)
    assert 0.0 <= kept["reward"] <= 1.0
    assert kept["ratio_max"] > 0
    assert len(table([kept])) == 3
