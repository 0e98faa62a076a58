"""What the attacks are aimed at: the protocol's and the REST API's test servers, and whole systems of real processes."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import load_module

_INTEGRATION = Path(__file__).parents[1]
_protocol = load_module("echo2_attack_protocol", _INTEGRATION / "worker_protocol" / "conftest.py")
_rest = load_module("echo2_attack_rest", _INTEGRATION / "rest" / "conftest.py")
_e2e = load_module("echo2_attack_e2e", _INTEGRATION.parent / "e2e" / "conftest.py")

settings = _protocol.settings
limits = _protocol.limits
coordinator = _protocol.coordinator
stranger = _protocol.stranger
rows = _protocol.rows
empty_database = _rest.empty_database
make_bench = _rest.make_bench
bench = _rest.bench
job_body = _rest.job_body
seeded = _rest.seeded
tiny_model = _e2e.tiny_model
