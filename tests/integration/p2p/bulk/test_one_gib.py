"""A gibibyte between two processes: whole, and with flat memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bulk import measure_node


@pytest.mark.long
def test_a_gibibyte_passes_with_flat_memory(tmp_path: Path) -> None:
    figures = measure_node(tmp_path, 1024)  # checks that every piece came
    assert figures["files_send_grew_mb"] < 32
    assert figures["files_receive_grew_mb"] < 32
