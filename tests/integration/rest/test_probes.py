"""Probes, Prometheus, the dashboard's content policy, and the headers of every response."""

from __future__ import annotations

import base64
import hashlib
import re

from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.middleware import SECURITY_HEADERS


async def test_health_and_readiness(bench):
    assert await bench.ask("GET", "/healthz", role=None, status=200) == {"status": "ok"}
    ready = await bench.ask("GET", "/readyz", role=None, status=200)
    assert ready["ready"]
    bench.disk.free = 0
    async with bench.client.get("/readyz") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "5"
        checks = {check["name"]: check["ok"] for check in (await response.json())["checks"]}
    assert checks == {"store": True, "disk": False}


async def test_a_closed_store_is_not_ready_and_not_a_500(bench):
    await bench.deps.store.close()
    async with bench.client.get("/readyz") as response:
        assert response.status == 503
    async with bench.client.get("/api/v1/jobs", headers=bench.headers()) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]


async def test_prometheus_is_for_this_host_or_a_token(bench, seeded):
    await bench.put(*seeded("someone"))
    bench.deps.control.asked["https"] += 2
    bench.deps.lag.seen.extend([0.25, 7.5, 0.0])
    text = (await bench.ask("GET", "/metrics", role=None, status=200)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {(s.name, s.labels.get("state", "")): s.value for f in families.values() for s in f.samples}
    asked = {s.labels["way"]: s.value for s in families["echo2_control_requests"].samples}
    assert asked == {"libp2p": 0, "https": 2}
    assert samples[("echo2_workers", "active")] == 1
    assert samples[("echo2_job_learner_utilisation", "")] == 0.75
    assert samples[("echo2_job_committed_steps", "")] == 1
    assert samples[("echo2_event_loop_lag_seconds", "")] == 7.5
    forwarded = {"X-Forwarded-For": "203.0.113.7"}
    await bench.ask("GET", "/metrics", role=None, headers=forwarded, status=401)
    await bench.ask("GET", "/metrics", role="viewer", headers=forwarded, status=200)


async def test_the_dashboard_is_one_page_whose_parts_the_policy_names(bench):
    async with bench.client.get("/") as response:
        assert response.status == 200
        policy, html = response.headers["Content-Security-Policy"], await response.text()
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not re.search(r"""(src|href)\s*=|style\s*=\s*["']|\son\w+\s*=\s*["']|@import|url\(""", html)
    assert "innerHTML" not in html


async def test_every_response_carries_the_security_headers(bench):
    for path in ("/", "/healthz", "/api/v1/jobs", "/nothing"):
        async with bench.client.get(path) as response:
            for name in SECURITY_HEADERS:
                assert response.headers[name], (path, name)
