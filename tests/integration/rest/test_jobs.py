"""Jobs over REST: submitting, reading, changing, and the states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.domain.model import (
    Event,
    Group,
    GroupState,
    Invite,
    Job,
    JobState,
    Lease,
    LeaseState,
    Metric,
    Rollout,
    RolloutState,
    Worker,
    WorkerState,
)

JOBS = "/api/v1/jobs"


async def test_a_submitted_job_is_queued_and_listed(bench, job_body):
    made = await bench.ask("POST", JOBS, json=job_body(), status=201)
    assert (made["state"], made["committed_steps"], made["planned_steps"]) == ("queued", 0, 10)
    assert [job["id"] for job in (await bench.ask("GET", JOBS))["jobs"]] == [made["id"]]
    row = await bench.deps.store.read(lambda r: r.get(Job, made["id"]))
    assert row.model_dir == str((bench.root / "tiny").resolve())
    assert row.config.algorithm.group_size == 2


async def test_figures_of_a_running_job(bench, seeded):
    await bench.put(*seeded("someone"))
    job = await bench.ask("GET", f"{JOBS}/j-1", status=200)
    assert job["staleness"] == {"bound": 2, "publish_every": "auto", "histogram": {"0": 2}, "highest": 0, "steps_counted": 1}
    assert job["learner"]["utilisation"] == 3.0 / 4.0
    assert job["rate"] == {"accepted_per_s": 4 / 60, "window_s": 60.0, "required_per_s": 4 / 3.0}
    assert job["work"]["groups"] == {"trained": 2}
    assert job["work"]["accepted_tokens"] == 20
    assert job["work"]["workers_serving"] == 1
    assert (job["reward"]["step"], job["reward"]["value"]) == (4, 0.4)
    assert job["eval"]["value"] == 0.75
    assert job["newest_version"] == 1
    assert (job["spent_uusd"], job["reserved_uusd"]) == (0, 0), "nothing was quoted, so nothing is owed"


async def test_pages_go_back_in_time(bench, seeded):
    for number in range(3):
        job = seeded("someone")[0]
        await bench.put(Job(**{**{f: getattr(job, f) for f in job.__slots__}, "id": f"j-{number}", "created_at": 100.0 + number}))
    first = await bench.ask("GET", f"{JOBS}?limit=2")
    assert [j["id"] for j in first["jobs"]] == ["j-2", "j-1"]
    second = await bench.ask("GET", f"{JOBS}?limit=2&before={first['next_before']}")
    assert [j["id"] for j in second["jobs"]] == ["j-0"]
    assert second["next_before"] is None
    assert (await bench.ask("GET", f"{JOBS}?state=paused"))["jobs"] == []


async def test_pause_resume_cancel_with_reasons(bench, seeded):
    await bench.put(*seeded("someone"))
    await bench.put(
        Group("g-9", "j-1", 2, 2, (1,), 2, GroupState.ISSUED, 1.0),
        Rollout("g-9", 0, "j-1", 2, RolloutState.LEASED, "l-9", "w-1"),
        Rollout("g-9", 1, "j-1", 2, RolloutState.OPEN),
        Lease("l-9", "j-1", "g-9", "w-1", 1, (0,), 1, "d" * 64, 3, 2e9, 1, LeaseState.LIVE, 1.0),
    )
    paused = await bench.ask("POST", f"{JOBS}/j-1/pause", json={"reason": "the room is hot"}, status=200)
    assert (paused["state"], paused["resume_state"], paused["reason"]) == (
        "paused",
        "running",
        "paused by admin: the room is hot",
    )
    assert (await bench.ask("POST", f"{JOBS}/j-1/pause", status=409))["code"] == "illegal_state"
    assert (await bench.ask("POST", f"{JOBS}/j-1/resume", status=200))["state"] == "running"
    cancelled = await bench.ask("POST", f"{JOBS}/j-1/cancel", json={"reason": "enough"}, status=200)
    assert cancelled["state"] == "cancelled"
    group = await bench.deps.store.read(lambda r: r.get(Group, "g-9"))
    lease = await bench.deps.store.read(lambda r: r.get(Lease, "l-9"))
    assert group.state is GroupState.VOID
    assert "enough" in group.reason
    assert lease.state is LeaseState.CANCELLED
    for verb in ("pause", "resume", "cancel"):
        assert (await bench.ask("POST", f"{JOBS}/j-1/{verb}", status=409))["code"] == "illegal_state"


async def test_patch_changes_s_kappa_and_budget(bench, seeded):
    await bench.put(*seeded("someone"))
    body = {"staleness_max": 5, "publish_every": 3, "budget": {"steps": 20, "usd": 1.5}}
    job = await bench.ask("PATCH", f"{JOBS}/j-1", json=body, status=200)
    assert (job["staleness"]["bound"], job["staleness"]["publish_every"], job["planned_steps"]) == (5, 3, 20)
    row = await bench.deps.store.read(lambda r: r.get(Job, "j-1"))
    assert row.config.budget.usd == 1.5
    assert row.state is JobState.RUNNING


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({}, "nothing_to_change", "body"),
        ({"budget": {"steps": 0}}, "invalid_body", "budget.steps"),
        ({"staleness_max": 65}, "invalid_body", "staleness_max"),
        ({"stalenes_max": 1}, "invalid_body", "stalenes_max"),
    ],
)
async def test_a_patch_that_cannot_be(bench, seeded, body, code, field):
    await bench.put(*seeded("someone"))
    problem = await bench.ask("PATCH", f"{JOBS}/j-1", json=body, status=422)
    assert (problem["code"], problem["field"]) == (code, field)


async def test_a_patch_below_what_is_committed_or_of_an_ended_job_is_refused(bench, seeded, job_body):
    job, *rows = seeded("someone")
    values = {f: getattr(job, f) for f in job.__slots__}
    await bench.put(Job(**{**values, "committed_steps": 4}), *rows)
    problem = await bench.ask("PATCH", f"{JOBS}/j-1", json={"budget": {"steps": 3}}, status=422)
    assert problem["code"] == "steps_already_committed"
    await bench.put(Job(**{**values, "state": JobState.COMPLETED}))
    assert (await bench.ask("PATCH", f"{JOBS}/j-1", json={"staleness_max": 1}, status=409))["code"] == "job_ended"


@pytest.mark.parametrize(
    ("sections", "code", "field"),
    [
        ({"model": "absent"}, "name_not_allowed", "model"),
        ({"model": "train.jsonl"}, "name_not_allowed", "model"),
        ({"environment": {"type": "chess"}}, "unknown_environment", "environment.type"),
        ({"environment": {"type": "math"}}, "train_needed", "environment.train"),
        ({"environment": {"type": "math", "train": "rewards.py"}}, "wrong_suffix", "environment.train"),
        ({"environment": {"type": "python:rewards.py:not-a-name"}}, "unknown_environment", "environment.type"),
        ({"environment": {"type": "guess_number"}}, "wrong_turns", "environment.max_turns"),
        ({"environment": {"type": "code", "train": "train.jsonl"}}, "wrong_rows", "environment.train"),
        ({"nam": "x"}, "invalid_body", "nam"),
    ],
)
async def test_a_job_that_cannot_be(bench, job_body, sections, code, field):
    problem = await bench.ask("POST", JOBS, json=job_body(**sections), status=422)
    assert (problem["code"], problem["field"]) == (code, field)


async def test_unknown_keys_get_the_nearest_one(bench, job_body):
    problem = await bench.ask("POST", JOBS, json=job_body(sampling={"top_p": 0.9}), status=422)
    assert "training takes no sampling filters" in problem["fix"]
    problem = await bench.ask("POST", JOBS, json=job_body(algorithm={"groupsize": 2}), status=422)
    assert "did you mean algorithm.group_size?" in problem["fix"]


async def test_a_running_job_that_nobody_serves_says_why(bench, seeded):
    rows = seeded("someone")
    await bench.put(*rows)
    assert (await bench.ask("GET", f"{JOBS}/j-1"))["warnings"] == []
    (box,) = (row for row in rows if isinstance(row, Worker))
    await bench.put(replace(box, state=WorkerState.STANDBY, engine={"kind": "scripted"}))
    (words,) = (await bench.ask("GET", f"{JOBS}/j-1"))["warnings"]
    assert words == "no worker serves it, of 1 connected: it takes engines torch, vllm (workers.engines), and box has scripted"
    await bench.put(Invite("i-1", "h", "alice", 1, 0.0, 9e9, jobs=("j-9",)))
    (words,) = (await bench.ask("GET", f"{JOBS}/j-1"))["warnings"]
    assert "that of box names others" in words


async def test_what_a_running_job_does_and_what_it_masks(bench, seeded):
    await bench.put(*seeded("someone"), Metric("j-1", "is_truncated/all/mean", 0, 1.0, 0.75))
    await bench.put(Event("j-1", 6, 1.0, "evaluating", {"version": 1, "prompts": 256}))
    job = await bench.ask("GET", f"{JOBS}/j-1")
    assert job["doing"] == "evaluating step 1: 256 held-out prompts"
    assert job["warnings"][0].startswith("75% of the rollouts of step 0 hit sampling.max_new_tokens (1024) and are masked")
    await bench.put(Event("j-1", 7, 2.0, "evaluated", {"version": 1}))
    assert (await bench.ask("GET", f"{JOBS}/j-1"))["doing"] == ""


async def test_python_needs_the_right(bench, job_body):
    body = job_body(environment={"type": "python:rewards.py:accuracy"})
    problem = await bench.ask("POST", JOBS, role="author", json=body, status=403)
    assert (problem["code"], problem["field"]) == ("code_right_needed", "environment.type")
    await bench.ask("POST", JOBS, role="coder", json=body, status=201)


async def test_a_spend_limit_counts_all_live_budgets(bench, job_body):
    await bench.token("poor", "author", spend_limit_uusd=2_000_000)
    assert (await bench.ask("POST", JOBS, role="poor", json=job_body(), status=403))["code"] == "budget_needed"
    first = await bench.ask("POST", JOBS, role="poor", json=job_body(budget={"steps": 1, "usd": 1.5}), status=201)
    problem = await bench.ask("POST", JOBS, role="poor", json=job_body(budget={"steps": 1, "usd": 0.6}), status=403)
    assert problem["code"] == "spend_limit_passed"
    await bench.ask("PATCH", f"{JOBS}/{first['id']}", role="poor", json={"budget": {"steps": 1, "usd": 2.0}}, status=200)
    await bench.ask("PATCH", f"{JOBS}/{first['id']}", role="poor", json={"budget": {"steps": 1, "usd": 2.1}}, status=403)


async def test_authors_see_and_change_their_own_jobs_only(bench, job_body):
    mine = await bench.ask("POST", JOBS, role="author", json=job_body(), status=201)
    assert (await bench.ask("GET", JOBS, role="coder"))["jobs"] == []
    assert len((await bench.ask("GET", JOBS, role="viewer"))["jobs"]) == 1
    path = f"{JOBS}/{mine['id']}"
    for method, route in (
        ("GET", ""),
        ("PATCH", ""),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/cancel"),
        ("GET", "/events"),
        ("GET", "/metrics"),
        ("GET", "/rollouts"),
        ("GET", "/checkpoints"),
        ("GET", "/checkpoints/0/config.json"),
        ("GET", "/audit"),
    ):
        body = {"json": {"staleness_max": 1}} if method == "PATCH" else {}
        problem = await bench.ask(method, path + route, role="coder", status=404, **body)
        assert problem["code"] == "unknown_job", route
    await bench.ask("POST", path + "/cancel", role="author", status=200)


async def test_a_job_names_uploads(bench, job_body):
    data = b'{"prompt": "1", "answer": "1"}\n'
    made = await bench.ask(
        "POST",
        "/api/v1/files?kind=dataset&name=t.jsonl",
        data=data,
        headers={"Content-Type": "application/octet-stream"},
        status=201,
    )
    body = job_body(environment={"type": "math", "train": made["reference"]})
    await bench.ask("POST", JOBS, json=body, status=201)
    problem = await bench.ask("POST", JOBS, json=job_body(model=made["reference"]), status=422)
    assert problem["code"] == "name_not_allowed"
