"""What a worker says about itself: working, or not working because ..., and its refusals in words."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_NOTES = 20


@dataclass(frozen=True, slots=True)
class Note:
    """Something that did not go as it should; `at` is on the machine's clock."""

    at: float
    code: str
    reason: str
    blame: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A session at one moment."""

    working: bool
    because: str
    phase: str
    coordinator_state: str
    coordinator_reason: str
    loaded: str
    newest: str
    live_leases: int
    generating: int
    unsent: int
    notes: tuple[Note, ...]


def lasting(seconds: float) -> str:
    """A duration for people; less than none is none."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def activity(
    *,
    generating: int,
    fetching: str,
    swapping: str,
    confirming: str,
    waiting_for: str,
    trouble: str = "",
    swapping_s: float = 0.0,
) -> tuple[bool, str]:
    """(is working, in words): the first of these that is true, most telling first. `trouble` is why the newest version is not here.

    `swapping_s`: how long the swap takes already. In whole minutes, so that the words change seldom.
    """
    why = f"; not fetched: {trouble}" if trouble else ""
    if generating:
        beside = f", fetching {fetching}" if fetching else ""
        return True, f"generating {generating} completions{beside}{why}"
    if swapping:
        since = f" (since {swapping_s // 60:.0f} min)" if swapping_s >= 60 else ""
        return False, f"loading {swapping} into the engine{since}"
    if confirming:
        return False, f"waiting for the coordinator to confirm {confirming}"
    if fetching:
        return False, f"fetching {fetching}{why}"
    return False, f"{waiting_for}{why}"
