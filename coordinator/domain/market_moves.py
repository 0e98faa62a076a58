"""When a worker that other jobs could use is worth loading this job's weights (pure).

A worker that changes jobs brings nothing while it fetches and loads another model. Where the pool suffices for all jobs that is free: it
was let go. Where it does not, somebody goes short meanwhile, so it must then work for at least `REPAID` times as long; and a set that was
put together so recently is left alone until it has.
"""

from __future__ import annotations

from pricing.offers import BYTES_PER_MBIT

REPAID = 4.0  # times the seconds of loading: a move costs a fifth of the time from order to end at most
USUAL_MBPS = 100.0  # of a link that was not measured


def load_s(start_bytes: float, down_mbps: float | None, apply_s: float) -> float:
    """Seconds from the order to the first lease: the whole snapshot over its downlink, and the time to apply a version."""
    return start_bytes / ((down_mbps or USUAL_MBPS) * BYTES_PER_MBIT) + apply_s


def why_it_stays(loading_s: float, left_s: float) -> str:
    """Why the worker does not come to a job that goes on for `left_s` more; empty when it pays."""
    if loading_s * (1 + REPAID) <= left_s:
        return ""
    return (
        f"another job has it, and it would load this job's weights for {loading_s:.0f} s of the {left_s:.0f} s that are left:"
        f" that pays where at least {REPAID:g} times as much is left for work"
    )


def settling_s(loads: list[float], *, usual_s: float) -> float:
    """How long a set is left alone after it changed: until the slowest of its workers has repaid its loading. `loads` empty: as usual."""
    return max([usual_s, *((1 + REPAID) * one for one in loads)])
