"""The fluid bound of a setting as a user gives it: megabits, headers included."""

from __future__ import annotations

from collections.abc import Sequence

from p2p.domain.fluid import fluid_bound

HEADERS = 1.046  # Ethernet 14 + IPv4 20 + TCP with timestamps 32, on 1,448 bytes of payload
MEGABIT = 1e6 / 8


def wire_bytes(payload: int) -> float:
    """What a payload costs on a link."""
    return payload * HEADERS


def bound_s(payload: int, uploads: Sequence[float], downloads: Sequence[float]) -> float:
    """Seconds below which no scheme brings `payload` bytes to all; links in Mbit/s, the seeder's first, a download of 0 is unlimited."""
    seeder, *workers = (rate * MEGABIT for rate in uploads)
    return fluid_bound(wire_bytes(payload), seeder, workers, [rate * MEGABIT for rate in downloads[1:] if rate])


def star_s(payload: int, uploads: Sequence[float]) -> float:
    """Seconds if the seeder sends every worker its own copy."""
    return wire_bytes(payload) * (len(uploads) - 1) / (uploads[0] * MEGABIT)
