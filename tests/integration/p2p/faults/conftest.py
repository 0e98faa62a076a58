"""A worker beside the small coordinator of the worker's own tests."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import load_module

_worker = load_module("echo2_faults_worker", Path(__file__).parents[2] / "worker_node" / "conftest.py")

coordinator = _worker.coordinator
make_model = _worker.make_model
until = _worker.until
