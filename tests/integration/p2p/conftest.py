from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """tests/factories_p2p.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("factories_p2p", Path(__file__).parents[2] / "factories_p2p.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
