"""The newest verdicts, for those who ask: heartbeats, the lease desk, REST. A restart empties it, and the first look fills it again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.domain.market import JobMarket, Verdict
from coordinator.domain.model import QuoteRow
from coordinator.wire.market import GainView

UNDECIDED = "standby: the market has not decided yet whether this worker is needed"


@dataclass(frozen=True, slots=True)
class Shown:
    """A job's newest verdict, and what it foretells."""

    at: float
    market: JobMarket
    verdict: Verdict
    quotes: Mapping[str, QuoteRow]  # open ones by worker
    predicted_idle: float | None = None
    measured_idle: float | None = None


@dataclass(slots=True)
class MarketBoard:
    """Verdicts by job id; and when it was last simulated what changes would buy, one simulation at a time."""

    shown: dict[str, Shown] = field(default_factory=dict)
    gains: dict[str, tuple[float, tuple[GainView, ...]]] = field(default_factory=dict)
    rehearsing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def why_not(self, job_id: str, worker_id: str) -> str:
        """Why the worker has no quote for the job, in words."""
        shown = self.shown.get(job_id)
        return UNDECIDED if shown is None else shown.verdict.standby.get(worker_id, UNDECIDED)
