"""The worker's own books: measured rate, accepted completions under checked receipts, and the status file they feed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from coordinator.wire import messages as wire
from coordinator.wire.signing import receipt_message, verify, worker_id
from worker_node.adapters.status_file import Status, write_status
from worker_node.config import WorkerSettings
from worker_node.domain import instructions as do
from worker_node.domain.report import Report

_SMOOTHING = 0.5
_LEAST_TOKENS = 32  # fewer tokens than this say nothing about a rate


class Books:
    """Figures of one worker process."""

    def __init__(self, settings: WorkerSettings, public_key: str, *, wall: Callable[[], float] = time.time) -> None:
        self.public_key = public_key
        self.engine = ""
        self.control = ""  # which way control messages go
        self.neighbours = ""
        self.price = settings.price_uusd_per_hour  # as the coordinator knows it
        self.price_refused = ""  # why another one is not taken
        self.tokens_per_s = settings.engine.tokens_per_s
        self.account: wire.Account | None = None
        self.accepted = 0
        self._settings = settings
        self._state_dir: Path = settings.state_dir
        self._wall = wall
        self._started_at = wall()
        self._metered = (0, 0.0)
        self._progress: tuple[int, int] | None = None

    def measure(self, tokens: int, busy_s: float) -> float:
        """Tokens per second while decoding, smoothed over beats; `tokens` and `busy_s` count from the start."""
        made, took = tokens - self._metered[0], busy_s - self._metered[1]
        if made >= _LEAST_TOKENS and took > 0:
            self._metered = (tokens, busy_s)
            rate = made / took
            self.tokens_per_s = rate if self.tokens_per_s <= 0 else self.tokens_per_s + _SMOOTHING * (rate - self.tokens_per_s)
        return self.tokens_per_s

    def take_receipt(self, submission: do.SubmitCompletions, reply: wire.SubmitReply) -> bool:
        """Count what was accepted; False when the coordinator's receipt does not cover it."""
        settled = sorted({*reply.accepted, *reply.duplicates})
        if not settled:
            return True
        self.accepted += len(reply.accepted)
        message = receipt_message(worker_id(self.public_key), submission.lease_id, submission.fence, settled)
        return verify(self._settings.coordinator_key, reply.receipt, message)

    def fetch_progress(self, here: int, needed: int) -> None:
        """Bytes of the running fetch."""
        self._progress = (here, needed)

    def fetch_ended(self) -> None:
        """No fetch runs."""
        self._progress = None

    def write(self, report: Report, *, now: float, ended: str | None = None) -> None:
        """Bring the status file up to date; `now` is the clock of the report's notes."""
        wall = self._wall()
        percent = None
        if self._progress is not None:
            here, needed = self._progress
            percent = round(100.0 * here / max(needed, 1), 1)
        status = Status(
            pid=os.getpid(),
            started_at=self._started_at,
            updated_at=wall,
            url=self._settings.url,
            name=self._settings.name,
            worker_id=worker_id(self.public_key),
            price_uusd_per_hour=self.price,
            price_refused=self.price_refused,
            engine=self.engine,
            working=report.working and ended is None,
            because=report.because if ended is None else ended,
            phase=report.phase,
            coordinator_state=report.coordinator_state,
            coordinator_reason=report.coordinator_reason,
            loaded=report.loaded,
            newest=report.newest,
            live_leases=report.live_leases,
            generating=report.generating,
            unsent=report.unsent,
            tokens_per_s=round(self.tokens_per_s, 2),
            fetch_percent=percent,
            control=self.control,
            neighbours=self.neighbours,
            accepted_here=self.accepted,
            account=None if self.account is None else self.account.model_dump(mode="json"),
            notes=[{**asdict(note), "at": wall - (now - note.at)} for note in report.notes],
            ended=ended,
        )
        write_status(self._state_dir, status)
