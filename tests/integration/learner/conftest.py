"""The area's factories, and a very small policy on disk."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_FACTORIES = Path(__file__).parents[2] / "factories_learner.py"


def _load() -> ModuleType:
    """tests/factories_learner.py, which is in no package."""
    if "factories_learner" not in sys.modules:
        spec = importlib.util.spec_from_file_location("factories_learner", _FACTORIES)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["factories_learner"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["factories_learner"])
    return sys.modules["factories_learner"]


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """What the tests are made with."""
    return _load()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Path:
    """A model directory that no test may change."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    made.model_directory(directory)
    return directory
