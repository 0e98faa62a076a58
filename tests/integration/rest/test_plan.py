"""POST /plan: the same answer as the domain gives, measured figures where there are some, refusals in words."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.domain.model import EdgeRow, Group, GroupState, Holding, Rollout, Turn
from coordinator.domain.plan import plan
from coordinator.service import planning
from coordinator.service.plan_view import plan_view, question_of
from coordinator.wire.job import JobConfig
from pricing.offers import read_offers

PLAN = "/api/v1/plan"
MARKET = [
    {"id": "a", "usd_per_hour": 0.1, "completions_per_second": 0.5, "count": 4, "up_mbps": 10, "down_mbps": 100},
    {"id": "b", "usd_per_hour": 0.3, "completions_per_second": 1.0, "count": 2, "up_mbps": 10, "down_mbps": 100},
]


async def test_the_answer_of_the_domain(bench, job_body):
    """The route adds nothing and leaves nothing out."""
    body = {"job": job_body(), "market": MARKET, "assumptions": {"train_s": 10.0}, "headroom": 1.25}
    answer = await bench.ask("POST", PLAN, json=body, role="author", status=200)
    question = question_of(
        JobConfig.model_validate(job_body()),
        read_offers(MARKET),
        given={"train_s": 10.0},
        measured={},
        required_rate=None,
        headroom=1.25,
        now=bench.clock.now(),
    )
    assert answer == plan_view(plan(question), question.facts, by_rate=False).model_dump(mode="json")
    assert answer["required_rate"] == 0.4
    assert answer["fleets"][0]["offers"][0]["id"] in ("a", "b")


async def test_a_given_rate(bench, job_body):
    """Four of `a` bring 1.6 with a headroom of 1.25."""
    body = {"job": job_body(), "market": MARKET, "required_rate": 1.6, "headroom": 1.25}
    answer = await bench.ask("POST", PLAN, json=body, status=200)
    assert [(one["id"], one["count"]) for one in answer["fleets"][0]["offers"]] == [("a", 4)]
    infeasible = await bench.ask("POST", PLAN, json=body | {"required_rate": 100}, status=200)
    assert infeasible["fleets"] == []
    assert "find more workers" in infeasible["infeasible_because"]


async def test_measured_figures(bench, job_body, seeded):
    """The newest job on the same model that trained: 3 s a step of 4 rollouts, its lengths, its delta, its pauses."""
    job, *rows = seeded("someone")
    job = replace(job, config=JobConfig.model_validate(job_body(model="tiny")))
    groups = [Group(f"n-{n}", "j-1", 10 + n, n, (1,), 2, GroupState.REJECTED, 1.0, "no_signal: alike", 0) for n in range(14)]
    lengths = [
        Rollout(f"n-{n}", slot, "j-1", 10 + n, next(r for r in rows if isinstance(r, Rollout)).state, length=10 + 2 * slot,
                accepted_at=bench.clock.now() - 5, graded_at=bench.clock.now() - 4, generate_s=0.5,
                turn=slot, preceding=3 * slot)  # of those in slot 1 this is the second turn
        for n in range(14) for slot in (0, 1)
    ]  # fmt: skip
    edges = [
        EdgeRow("j-1", "k", "d" * 64, 0, "full", None, None, 4000, "{}", "s"),
        EdgeRow("j-1", "d", "d" * 64, 4, "delta", 2, "b" * 64, 320, "{}", "s"),
    ]
    rows = [replace(row, apply_s=0.25) if isinstance(row, Holding) else row for row in rows]
    whole = [
        row for row in rows if isinstance(row, Holding)
    ]  # what a worker begins with is loaded whole: no pause of a publication
    rows += [replace(row, version=0, digest="0" * 64, confirmed_at=row.confirmed_at - 100, apply_s=60.0) for row in whole]
    await bench.put(job, *rows, *groups, *lengths, *edges)
    body = {"job": job_body(model="tiny"), "market": MARKET}
    answer = await bench.ask("POST", PLAN, json=body, status=200)
    facts = {one["name"]: one for one in answer["assumptions"] if one["source"] == "measured"}
    assert facts["train_s"]["value"] == 3.0
    assert facts["apply_s"]["value"] == 0.25
    assert facts["no_signal"]["value"] == 14 / 16
    assert facts["keyframe_bytes"]["value"] == 4000
    assert facts["delta_bytes"]["value"] == pytest.approx(320 / 2**0.68)
    assert facts["mean_tokens"]["value"] == pytest.approx((14 * 10 + 14 * (12 + 3) + 4 * 5) / 32)
    assert facts["tokens_per_s"]["value"] == pytest.approx((14 * 10 + 14 * 12 + 4 * 5) / (32 * 0.5))
    assert facts["grade_s"]["value"] == pytest.approx(30 / 32)
    assert "job j-1" in facts["train_s"]["why"]
    # twice as many rollouts a step take twice as long; another task has other lengths; given figures come first
    other = job_body(model="tiny", algorithm={"group_size": 4, "groups_per_step": 2}, environment={"type": "math"})
    changed = await bench.ask("POST", PLAN, json={"job": other, "market": MARKET, "assumptions": {"apply_s": 1.0}}, status=200)
    again = {one["name"]: one for one in changed["assumptions"]}
    assert (again["train_s"]["value"], again["train_s"]["source"]) == (6.0, "measured")
    assert again["mean_tokens"]["source"] == again["no_signal"]["source"] == "assumed"
    assert (again["apply_s"]["value"], again["apply_s"]["source"]) == (1.0, "given")
    # an author is not told about the jobs of others
    blind = await bench.ask("POST", PLAN, json=body, role="author", status=200)
    assert {one["source"] for one in blind["assumptions"]} == {"assumed"}


async def test_measured_turns(bench, job_body, seeded):
    """14 rollouts of one turn and 14 of two, after whose first the environment placed one token; four more of one turn are seeded."""
    job, *rows = seeded("someone")
    section = {"type": "guess_number", "max_turns": 4}
    job = replace(job, config=JobConfig.model_validate(job_body(model="tiny", environment=section)))
    state = next(row for row in rows if isinstance(row, Rollout)).state
    rollouts = [
        Rollout(f"n-{n}", slot, "j-1", 10 + n, state, length=10 + 2 * slot, accepted_at=bench.clock.now() - 5,
                graded_at=bench.clock.now() - 4, generate_s=0.5, turn=slot, preceding=3 * slot)
        for n in range(14) for slot in (0, 1)
    ]  # fmt: skip
    turns = [Turn(f"n-{n}", 1, 0, "j-1", "l", "w", "b", 0, 2, "stop", 0.1, bench.clock.now() - 9, (7, 7, 9)) for n in range(14)]
    await bench.put(job, *rows, *rollouts, *turns)
    body = {"job": job_body(model="tiny", environment=section), "market": MARKET}
    facts = {one["name"]: one for one in (await bench.ask("POST", PLAN, json=body, status=200))["assumptions"]}
    assert (facts["turns"]["value"], facts["turns"]["source"]) == ((14 + 2 * 14 + 4) / 32, "measured")
    assert facts["placed_share"]["value"] == pytest.approx(14 / (14 * 10 + 14 * (12 + 3) + 4 * 5))
    body["job"] = job_body(model="tiny", environment={**section, "max_turns": 8})
    other = {one["name"]: one for one in (await bench.ask("POST", PLAN, json=body, status=200))["assumptions"]}
    assert (other["turns"]["value"], other["turns"]["source"]) == (4.5, "assumed")


async def test_a_job_that_never_trained_measured_nothing(bench, job_body, seeded):
    """Nor one on another model."""
    job, *_ = seeded("someone")
    await bench.put(replace(job, config=JobConfig.model_validate(job_body(model="tiny")), committed_steps=0))
    answer = await bench.ask("POST", PLAN, json={"job": job_body(), "market": MARKET}, status=200)
    assert {one["source"] for one in answer["assumptions"]} == {"assumed"}


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"market": [MARKET[0], MARKET[0]]}, "market_refused", "market"),
        ({"market": [{**MARKET[0], "id": " "}]}, "market_refused", "market"),
        ({"assumptions": {"speed": 1.0}}, "plan_refused", "assumptions"),
        ({"headroom": 0.5}, "invalid_body", "headroom"),
        ({"market": [{"id": "a"}]}, "invalid_body", "market.0.usd_per_hour"),
        ({"market": [{**MARKET[0], "up_mbps": 0}]}, "invalid_body", "market.0.up_mbps"),
        ({"required_rate": -1}, "invalid_body", "required_rate"),
    ],
)
async def test_refusals(bench, job_body, change, code, field):
    """A problem document that names the field."""
    problem = await bench.ask("POST", PLAN, json={"job": job_body(), "market": MARKET, **change}, status=422)
    assert (problem["code"], problem["field"]) == (code, field)


async def test_a_viewer_may_not(bench, job_body):
    """It takes a core for seconds."""
    await bench.ask("POST", PLAN, json={"job": job_body(), "market": MARKET}, role="viewer", status=403)


async def test_the_same_key_gives_the_same_answer(bench, job_body):
    """Kept as every POST's."""
    body = {"job": job_body(), "market": MARKET, "required_rate": 1.0}
    headers = {"Idempotency-Key": "k-1"}
    first = await bench.ask("POST", PLAN, json=body, headers=headers, status=200)
    assert await bench.ask("POST", PLAN, json=body, headers=headers, status=200) == first
    assert (await bench.ask("POST", PLAN, json=body | {"required_rate": 2.0}, headers=headers, status=422))["code"]


async def test_a_plan_waits_for_its_place_and_not_for_ever(bench, job_body, monkeypatch):
    """One at a time; who waits too long is told when to come again, and the place is free afterwards."""
    monkeypatch.setattr(planning, "PLAN_S", 0.05)
    body = {"job": job_body(), "market": MARKET, "required_rate": 1.0}
    async with bench.deps.plans:
        problem = await bench.ask("POST", PLAN, json=body, status=503)
    assert problem["code"] == "plan_too_slow"
    monkeypatch.setattr(planning, "PLAN_S", 60.0)
    answers = await asyncio.gather(*(bench.ask("POST", PLAN, json=body, status=200) for _ in range(3)))
    assert answers[0] == answers[1] == answers[2]
    assert not bench.deps.plans.locked()
