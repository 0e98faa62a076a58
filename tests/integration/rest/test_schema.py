"""schemathesis over every route of /openapi.json: no 500, no hang, every answer as described, 503 only with Retry-After."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from coordinator.api.openapi import document
from coordinator.api.rest import ROUTES

DOCUMENT = document(ROUTES, version="0")
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
HANG_S = 20
EXISTING = {"job_id": "j-1", "worker_id": "w-1", "version": "1", "file": "config.json", "invite_id": "i-1", "token_id": "t-1"}
WHOLE_JOB = {
    "name": "sort",
    "model": "tiny",
    "environment": {"type": "digit_sort"},
    "budget": {"steps": 10},
}
load_all_checks()
CHECKED = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)


class Running:
    """A bench on a loop of its own in a thread: schemathesis and hypothesis are synchronous."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Any) -> Any:
        found: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return found.result(HANG_S)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(HANG_S)
        self.loop.close()


@pytest.fixture(scope="module")
def served(empty_database, tmp_path_factory, bench_maker, row_maker) -> Iterator[tuple[str, dict[str, str]]]:
    """The base URL of a running API with one ended job in it, and an admin's headers."""
    running = Running()
    place = tmp_path_factory.mktemp("schema")
    bench = running.do(bench_maker(empty_database, place))
    running.do(bench.put(*row_maker("someone", place, ended=True)))
    yield str(bench.client.make_url("/")).rstrip("/"), bench.headers()
    running.do(bench.close())
    running.end()


def _operation(path: str, method: str) -> Any:
    return schemathesis.openapi.from_dict(DOCUMENT)[path][method]


def _explore(path: str, method: str, mode: GenerationMode, examples: int, served: tuple[str, dict[str, str]]) -> None:
    base_url, headers = served

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=_operation(path, method).as_strategy(generation_mode=mode), existing=st.booleans())
    def explore(case: Any, existing: bool) -> None:
        if existing and case.path_parameters and mode is GenerationMode.POSITIVE:
            case.path_parameters = {name: EXISTING[name] for name in case.path_parameters}
        if existing and path == "/api/v1/jobs" and method == "post" and mode is GenerationMode.POSITIVE:
            case.body = {**case.body, **WHOLE_JOB} if isinstance(case.body, dict) else case.body
        response = case.call(base_url=base_url, headers=headers, timeout=HANG_S)
        assert response.status_code != 503 or "retry-after" in response.headers
        if response.status_code >= 400 and path != "/readyz":
            problem = response.json()
            assert problem["code"]
            assert problem["field"]
            assert problem["fix"]
        case.validate_response(response, checks=CHECKED)

    explore()


def _has_negatives(path: str, method: str) -> bool:
    operation = DOCUMENT["paths"][path][method]
    return bool(operation["parameters"]) or "requestBody" in operation


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_valid_requests(served, path, method):
    _explore(path, method, GenerationMode.POSITIVE, 16, served)


@pytest.mark.parametrize(("path", "method"), [one for one in OPERATIONS if _has_negatives(*one)])
def test_invalid_requests(served, path, method):
    _explore(path, method, GenerationMode.NEGATIVE, 16, served)


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_many_requests(served, path, method, mode):
    if mode is GenerationMode.POSITIVE or _has_negatives(path, method):
        _explore(path, method, mode, 200, served)


def test_the_schemas_are_valid_and_every_route_is_described():
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    identifiers = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(identifiers) == len(set(identifiers))
