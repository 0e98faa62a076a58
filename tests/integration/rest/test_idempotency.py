"""The same key and body: one effect, one answer; also at the same time, and across a restart."""

from __future__ import annotations

import asyncio

from coordinator.api.rest_table import RestLimits
from coordinator.domain.model import IdempotencyRecord, Job
from coordinator.service.idempotency import KEPT_S

JOBS = "/api/v1/jobs"
KEY = {"Idempotency-Key": "k-1"}


async def _jobs(bench):
    return await bench.deps.store.read(lambda reader: reader.count(Job))


async def test_a_repeated_post_has_one_effect_and_one_answer(bench, job_body):
    first = await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    bench.clock.time += 60
    second = await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    assert first == second
    assert await _jobs(bench) == 1
    async with bench.client.post(JOBS, json=job_body(), headers=bench.headers(**KEY)) as response:
        assert response.headers["Idempotency-Replayed"] == "true"


async def test_another_body_or_route_is_refused(bench, job_body):
    made = await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    problem = await bench.ask("POST", JOBS, json=job_body(seed=1), headers=KEY, status=422)
    assert (problem["code"], problem["field"]) == ("idempotency_key_reused", "Idempotency-Key")
    await bench.ask("POST", f"{JOBS}/{made['id']}/pause", headers=KEY, status=422)
    assert await _jobs(bench) == 1


async def test_keys_are_per_token_and_optional(bench, job_body):
    for role in ("admin", "author"):
        await bench.ask("POST", JOBS, role=role, json=job_body(), headers=KEY, status=201)
    for _ in range(2):
        await bench.ask("POST", JOBS, json=job_body(), status=201)
    assert await _jobs(bench) == 4


async def test_concurrent_requests_with_one_key_wait_for_the_first(bench, job_body):
    answers = await asyncio.gather(*(bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201) for _ in range(8)))
    assert len({answer["id"] for answer in answers}) == 1
    assert await _jobs(bench) == 1


async def test_a_request_that_waits_too_long_is_told_when_to_come_back(make_bench, job_body):
    bench = await make_bench(limits=RestLimits(same_key_wait_s=0.05))
    await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    record = (await bench.deps.store.read(lambda r: r.select(IdempotencyRecord)))[0]
    await bench.put(IdempotencyRecord(record.token_id, "k-1", record.route, record.body_hash, bench.clock.time))
    async with bench.client.post(JOBS, json=job_body(), headers=bench.headers(**KEY)) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["code"] == "same_key_in_flight"


async def test_a_refusal_is_kept_too_but_not_one_that_time_changes(bench, job_body):
    await bench.ask("POST", JOBS, json=job_body(model="later"), headers=KEY, status=422)
    (bench.root / "later").mkdir()
    (bench.root / "later" / "config.json").write_text("{}")
    await bench.ask("POST", JOBS, json=job_body(model="later"), headers=KEY, status=422)
    await bench.ask("POST", JOBS, json=job_body(model="later"), headers={"Idempotency-Key": "k-2"}, status=201)


async def test_a_failed_request_frees_its_key(bench, job_body, monkeypatch):
    from coordinator.service import operator_jobs

    async def broken(*_, **__):
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(operator_jobs, "submit", broken)
        await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=503)
    await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)


async def test_it_survives_a_restart_and_takes_over_what_was_in_flight(make_bench, job_body):
    bench = await make_bench()
    first = await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    record = (await bench.deps.store.read(lambda r: r.select(IdempotencyRecord)))[0]
    await bench.put(IdempotencyRecord(record.token_id, "k-9", record.route, record.body_hash, bench.clock.time))
    texts = bench.texts
    await bench.deps.store.close()
    again = await make_bench(reuse=True, started_at=bench.clock.time + 1)
    again.texts, again.clock.time = texts, bench.clock.time + 2
    assert await again.ask("POST", JOBS, json=job_body(), headers=KEY, status=201) == first
    await again.ask("POST", JOBS, json=job_body(), headers={"Idempotency-Key": "k-9"}, status=201)
    assert await _jobs(again) == 2


async def test_answers_are_kept_for_a_day_and_no_longer(bench, job_body):
    first = await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    bench.clock.time += KEPT_S + 1
    second = await bench.ask("POST", JOBS, json=job_body(), headers=KEY, status=201)
    assert first["id"] != second["id"]


async def test_no_secret_lies_in_the_store(bench):
    body = {"name": "eve", "role": "viewer"}
    first = await bench.ask("POST", "/api/v1/tokens", json=body, headers=KEY, status=201)
    assert await bench.ask("POST", "/api/v1/tokens", json=body, headers=KEY, status=201) == first
    record = (await bench.deps.store.read(lambda r: r.select(IdempotencyRecord)))[0]
    assert record.status == 201
    assert first["token"].split("_", 2)[2] not in record.response


async def test_a_key_that_is_none(bench, job_body):
    for key in ("", "a b", "x" * 201):
        problem = await bench.ask("POST", JOBS, json=job_body(), headers={"Idempotency-Key": key}, status=422)
        assert problem["code"] == "idempotency_key_malformed"
