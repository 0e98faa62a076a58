"""The market demo's report, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.demo import market, report
from coordinator.demo.job import DemoOptions, demo_job
from coordinator.demo.market import CAST, Act, Played, active_now, cheapest, fastest, is_settled
from coordinator.demo.picture import draw
from coordinator.demo.processes import DemoFailed
from coordinator.demo.run import check_options, summary
from coordinator.wire.job import JobConfig
from tests.unit.coordinator.test_demo import told


def offer(name: str, usd: float, *, active: bool, measured: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "uusd_per_hour": round(usd * 1e6),
        "is_active": active,
        "is_measured": measured,
        "completions_per_s": 10.0,
        "admitted": 0.5,
    }


def seen(*offers: dict[str, Any], required: float | None = 20.0) -> dict[str, Any]:
    return {"jobs": [{"required_rate": required, "offers": list(offers)}]}


SEEN = seen(offer("worker-1", 0.9, active=True), offer("worker-2", 0.2, active=True), offer("worker-3", 0.5, active=False))


def played(**changes: Any) -> Played:
    """A kill at step 3, a raise at step 5; then the learner trains 2 s and waits 0.5 s."""
    steps = range(15)
    values = {
        "acts": (
            Act("kill", 3, "worker-1", ("worker-1", "worker-2"), ("worker-2", "worker-3")),
            Act("raise", 5, "worker-2", ("worker-2", "worker-3"), ("worker-3", "worker-4")),
        ),
        "market": SEEN,
        "history": {"quotes": [{}, {}], "prices": [{"name": "worker-2", "at": 1.0, "uusd_per_hour": 200_000}]},
        "series": {
            "time/step": [(step, 2.0) for step in steps],
            "time/wait_for_batch": [(step, 0.5 if step < 14 else 9.0) for step in steps],
            "market/predicted_idle": [(step, 0.15) for step in steps],
            "market/usd_per_hour": [(0, 2.65), (12, 0.9)],
            "market/required_rate": [(12, 8.0)],
            "market/offered_rate": [(12, 9.0)],
        },
        "active": {0: ("worker-1", "worker-2"), 5: ("worker-2",)},
    }
    return Played(**{**values, **changes})


def job() -> dict[str, Any]:
    return {
        "committed_steps": 15,
        "config": {"algorithm": {"group_size": 4, "groups_per_step": 5}},
        "work": {"groups": {"trained": 75}},
    }


def test_the_report() -> None:
    """20 rollouts in 2.5 s are 8 a second: 0.9 USD/h are 0.03125 USD per 1,000; all six ask 2.65 USD/h."""
    told_ = market.report(played(), job(), 30_000)
    assert told_["predicted_idle"] == pytest.approx(0.15)
    assert told_["measured_idle"] == pytest.approx(0.2)
    assert told_["steps_compared"] == 4  # 10 to 13: from half way after the last act, and not the last one
    assert told_["usd_per_thousand"] == pytest.approx(0.9 / 3600 / 8 * 1000)
    assert told_["usd_per_thousand_all_on"] == pytest.approx(2.65 / 3600 / 8 * 1000)
    assert told_["spent_usd_per_thousand_trained"] == pytest.approx(0.1)
    assert told_["usd_per_hour_highest"] == 2.65
    assert (told_["killed_was_replaced"], told_["raised_was_dropped"]) == (True, True)
    assert told_["headroom_after_kill"] is None  # nothing was looked at between the acts
    rates = {"market/required_rate": [(3, 1.0), (4, 8.0), (9, 1.0)], "market/offered_rate": [(4, 10.0), (9, 1.0)]}
    assert market.report(played(series=rates), job(), 0)["headroom_after_kill"] == 1.25
    assert told_["active_at_end"] == ["worker-1", "worker-2"]
    assert told_["rates_at_end"]["worker-1"] == 5.0
    assert (told_["quotes"], told_["prices"]) == (2, [["worker-2", 1.0, 0.2]])


def test_what_did_not_happen_is_not_claimed() -> None:
    nothing = market.report(played(acts=(), series={}, market={"jobs": []}), {**job(), "work": {"groups": {}}}, 0)
    assert (nothing["killed_was_replaced"], nothing["raised_was_dropped"]) == (False, False)
    assert nothing["measured_idle"] is None
    assert nothing["usd_per_thousand"] is None
    assert nothing["spent_usd_per_thousand_trained"] is None
    assert nothing["rates_at_end"] == {}
    same = Act("kill", 3, "worker-1", ("worker-1", "worker-2"), ("worker-2",))
    assert market.report(played(acts=(same,)), job(), 0)["killed_was_replaced"] is False
    kept = Act("raise", 3, "worker-2", ("worker-2",))  # it was active at every look
    assert market.report(played(acts=(kept,)), job(), 0)["raised_was_dropped"] is False


def test_the_script_looks_at_the_market() -> None:
    assert active_now(SEEN) == ("worker-1", "worker-2")
    assert active_now({"jobs": []}) == ()
    assert cheapest(SEEN) == "worker-2"
    assert (
        fastest(seen(offer("worker-1", 0.9, active=True), {**offer("worker-2", 0.2, active=True), "completions_per_s": 9.0}))
        == "worker-1"
    )
    assert is_settled(SEEN)
    assert not is_settled({"jobs": []})
    assert not is_settled(seen(*SEEN["jobs"][0]["offers"], required=None))
    assert not is_settled(seen(offer("worker-1", 0.9, active=True)))  # everybody is active: nothing was chosen
    assert not is_settled(seen(offer("worker-1", 0.9, active=True, measured=False), offer("worker-3", 0.5, active=False)))


def test_the_raise_waits_for_an_answer_to_the_kill() -> None:
    answered, silent = played().acts[0], Act("kill", 3, "worker-1", ("worker-1", "worker-2"), ("worker-2",))
    assert [market.may_raise(answered, SEEN, share) for share in (0.6, 0.65)] == [False, True]
    assert [market.may_raise(silent, SEEN, share) for share in (0.7, 0.8)] == [False, True]
    assert not market.may_raise(Act("kill", 3, "worker-1", ("worker-1",)), SEEN, 0.9)
    busy = seen(offer("worker-1", 0.9, active=True))  # all are needed: the acts come all the same, later
    assert [market.may_kill(busy, share) for share in (0.5, 0.55)] == [False, True]
    assert [market.may_kill(SEEN, share) for share in (0.3, 0.4)] == [False, True]


def test_the_job_has_a_budget_that_all_workers_fit_into() -> None:
    config = JobConfig.model_validate(demo_job(DemoOptions(market=True, steps=9), "m"))
    assert config.budget.usd_per_hour is not None
    assert sum(one.usd_per_hour for one in CAST) <= config.budget.usd_per_hour
    assert config.workers.activation == "market"


def test_the_market_has_a_script_of_its_own() -> None:
    with pytest.raises(DemoFailed, match="script of its own"):
        check_options(DemoOptions(market=True, churn=True))


def test_words_and_picture(tmp_path: Path) -> None:
    base = told()
    steps = {**base.job, **job(), "config": {**base.job["config"], **job()["config"]}, "work": {**base.job["work"]}}
    built = report.build(told(job=steps, played=played()))
    words = "\n".join(summary(built))
    assert "step 3: kill worker-1, active worker-1, worker-2 -> worker-2, worker-3" in words
    assert "learner idle 15.0% predicted, 20.0% measured over the last 4 steps" in words
    draw(built, played().series, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
