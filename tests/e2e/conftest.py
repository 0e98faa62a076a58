"""One tiny model for all end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
