"""Bad input gets words, never a 500: syntax, nesting, sizes, slow bodies, wrong routes, and whatever hypothesis thinks of."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.api.rest_table import RestLimits

JOBS = "/api/v1/jobs"
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "json_syntax"),
        (b"{", 400, "json_syntax"),
        (b"nonsense", 400, "json_syntax"),
        (b'"\\ud800"', 400, "json_syntax"),
        (b"\xff\xfe", 400, "json_syntax"),
        (b"[" * 1000, 400, "json_too_deep"),
        (b"[" * 500_000, 400, "json_too_deep"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, 400, "json_too_deep"),
        (b"[]", 422, "invalid_body"),
        (b"null", 422, "invalid_body"),
        (b"1e999", 422, "number_not_finite"),
        (b'{"name": "\\u0000"}', 422, "nul_in_text"),
        (b'{"budget": {"steps": 1, "usd": 1e999}}', 422, "number_not_finite"),
        (b'{"name": "' + b"x" * (1 << 20) + b'"}', 413, "body_too_large"),
        (json.dumps({"name": 10**400}).encode(), 422, "invalid_body"),
    ],
)
async def test_bodies_that_are_none(bench, body, status, code):
    problem = await bench.ask("POST", JOBS, data=io.BytesIO(body), headers=JSON, status=status)
    assert problem["code"] == code


async def test_every_error_of_a_body_is_listed_and_the_first_one_is_the_field(bench, job_body):
    body = job_body(algorithm={"group_size": "8", "lr": 1}, budget={})
    problem = await bench.ask("POST", JOBS, json=body, status=422)
    assert problem["field"] == "algorithm.group_size"
    for path in ("algorithm.group_size", "algorithm.lr", "budget.steps"):
        assert path in problem["detail"]


async def test_a_body_counted_too_large_without_a_declared_length(bench):
    async def chunks():
        for _ in range(3):
            yield b"x" * (1 << 19)

    assert (await bench.ask("POST", JOBS, data=chunks(), headers=JSON, status=413))["code"] == "body_too_large"


async def test_a_body_that_trickles_ends(make_bench):
    bench = await make_bench(limits=RestLimits(json_read_s=0.1))
    never = asyncio.Event()

    async def chunks():
        yield b"{"
        await never.wait()

    assert (await bench.ask("POST", JOBS, data=chunks(), headers=JSON, status=408))["code"] == "body_too_slow"


async def test_encodings_and_media_types(bench):
    problem = await bench.ask("POST", JOBS, data=b"{}", headers={**JSON, "Content-Encoding": "gzip"}, status=415)
    assert (problem["code"], problem["field"]) == ("content_encoding_not_taken", "Content-Encoding")
    problem = await bench.ask("POST", JOBS, data=b"{}", headers={"Content-Type": "text/plain"}, status=415)
    assert (problem["code"], problem["field"]) == ("media_type_not_taken", "Content-Type")


async def test_what_aiohttp_refuses_is_a_problem_too(bench):
    assert (await bench.ask("GET", "/api/v1/nothing", status=404))["code"] == "not_found"
    assert (await bench.ask("PUT", JOBS, status=405))["code"] == "method_not_allowed"
    async with bench.client.put(JOBS) as response:
        assert set(response.headers["Allow"].split(",")) == {"GET", "POST"}
    problem = await bench.ask("POST", JOBS, data=b"{}", headers={**JSON, "Expect": "a miracle"}, status=417)
    assert problem["code"] == "expectation_failed"


async def test_expect_100_continue_is_met(bench, job_body):
    await bench.ask("POST", JOBS, json=job_body(), expect100=True, status=201)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("?limit=0", "limit"),
        ("?limit=x", "limit"),
        ("?limit=1&limit=2", "limit"),
        ("?colour=red", "colour"),
        ("?before=inf", "before"),
        ("?before=nan", "before"),
        ("?state=flying", "state"),
        ("/j-1/metrics?since=-1", "since"),
        ("/j-1/metrics?name=%00", "name"),
        ("/j-1/rollouts?step=99999999999999999999", "step"),
    ],
)
async def test_queries_that_cannot_be(bench, path, field):
    problem = await bench.ask("GET", JOBS + path, status=422)
    assert problem["field"] == field


async def test_ids_that_cannot_be_name_nothing(bench):
    for identifier in ("%00", "..%2f..", "a%20b", "%ff", "x" * 200, "%F0%9F%92%A9"):
        problem = await bench.ask("GET", f"{JOBS}/{identifier}", status=404)
        assert problem["code"] in ("unknown_job", "not_found")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
KNOWN = ["name", "model", "seed", "environment", "algorithm", "staleness", "sampling", "budget", "role", "rights", "reason", "jobs"]
TARGETS = ["/api/v1/jobs", "/api/v1/tokens", "/api/v1/invites", "/api/v1/jobs/j-1/pause", "/api/v1/workers/w-1/drain"]


async def test_no_body_at_all_breaks_it(bench, seeded):
    """Hypothesis drives its own examples here, on the running loop of this test."""
    await bench.put(*seeded("someone"))
    cases = []

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(TARGETS), st.dictionaries(st.sampled_from(KNOWN), ANYTHING, max_size=6) | ANYTHING | st.binary(max_size=64)
    )
    def collect(target, body):
        cases.append((target, body if isinstance(body, bytes) else json.dumps(body).encode()))

    collect()
    for target, body in cases:
        async with bench.client.post(target, data=body, headers={**bench.headers(), **JSON}) as response:
            assert response.status < 500, (target, body, await response.text())
            assert response.status < 300 or response.content_type == "application/problem+json"
