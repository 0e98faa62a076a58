"""The area's factories, as a fixture: tests are imported without a package."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    spec = spec_from_file_location("factories_environments", Path(__file__).parents[2] / "factories_environments.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """tests/factories_environments.py"""
    return _load()
