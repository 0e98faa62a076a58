"""Law 1: which policy versions a step may train on.

Step t (from 0) takes the weights of version t to version t + 1. The staleness of a group in step t is t minus the oldest
version of any of its trained tokens.
"""

from __future__ import annotations


class StalenessError(Exception):
    """A version that cannot be: newer than the step that would train on it, or negative."""


def staleness(step: int, oldest_version: int) -> int:
    """Steps between the version that made the data and the step that trains on it.

    Raises StalenessError for a negative result: a version from the future is a fault, never a pass.
    """
    if step < 0 or oldest_version < 0 or oldest_version > step:
        raise StalenessError(f"version {oldest_version} cannot be trained in step {step}: it must lie in 0..{max(step, 0)}")
    return step - oldest_version


def last_step(version: int, bound: int) -> int:
    """The last step that data of `version` may be trained in: x + S."""
    return version + bound
