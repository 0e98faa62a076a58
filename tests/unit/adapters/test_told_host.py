"""What workers are told about where the seeder is."""

from __future__ import annotations

import pytest

from coordinator.config import read_settings
from coordinator.errors import CoordinatorError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"host": "127.0.0.1"}, "127.0.0.1"),
        ({"host": "0.0.0.0", "behind_proxy": True}, "0.0.0.0"),
        ({"host": "127.0.0.1", "behind_proxy": True}, None),
        ({"host": "127.0.0.1", "behind_proxy": True, "public_host": "192.0.2.7"}, "192.0.2.7"),
        ({"host": "10.0.0.5", "public_host": "2001:db8::1"}, "2001:db8::1"),
        ({"host": "::1"}, "::1"),
    ],
)
def test_workers_are_told_where_they_can_go(given: dict[str, object], told: str | None) -> None:
    """Behind a proxy a loopback is nobody's to dial; a public address stands for whatever was bound."""
    assert read_settings(**given).told_host == told


def test_a_name_is_no_public_host() -> None:
    with pytest.raises(CoordinatorError, match="ECHO2_PUBLIC_HOST"):
        read_settings(public_host="gpu.example")
