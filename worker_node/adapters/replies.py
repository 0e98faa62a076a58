"""Refusals: problem documents (RFC 9457) turned into what they mean for a session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from coordinator.wire.messages import Problem
from worker_node.domain.events import Outcome

FAILURES = (aiohttp.ClientError, OSError)

# Codes that say more than their status. Every other 4xx is a definite no to the one request.
OUTCOMES: Mapping[str, Outcome] = {
    "old_session": Outcome.FENCED,
    "unknown_session": Outcome.REJOIN,
    "unknown_worker": Outcome.REJOIN,
    "worker_gone": Outcome.REJOIN,
    "protocol_version": Outcome.FATAL,
    "wrong_worker_id": Outcome.FATAL,
    "bad_signature": Outcome.FATAL,
    "clock_skew": Outcome.TRY_AGAIN,
    "before_restart": Outcome.TRY_AGAIN,
    "replayed": Outcome.TRY_AGAIN,
}
_TEMPORARY = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A problem document, or what little a reply without one says."""

    status: int
    code: str
    detail: str
    fix: str
    outcome: Outcome
    server_time: float | None
    retry_after_s: float

    def words(self) -> str:
        """For people: what was wrong and what to do."""
        return f"{self.detail} [{self.code}]" + (f"; {self.fix}" if self.fix else "")


def in_words(error: Exception) -> str:
    """What a failure of the network was, for people."""
    if isinstance(error, aiohttp.ClientConnectorError):
        found = error.os_error
        if found.errno is not None and found.errno > 0:  # asyncio's own words repeat the address; a resolver's number is negative
            return os.strerror(found.errno)
        return str(found.strerror or found)
    return str(error) or type(error).__name__


def read_refusal(status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
    """What a reply with a status of 400 or more means. `headers` have lower-case names."""
    try:
        problem = Problem.model_validate_json(body)
    except (ValidationError, ValueError):
        problem = Problem(title="", status=status, code=f"http_{status}", detail=f"status {status} without an explanation")
    retry_after_s = problem.retry_after_s if problem.retry_after_s is not None else _seconds(headers.get("retry-after", ""))
    return Refusal(
        status=status,
        code=problem.code,
        detail=problem.detail,
        fix=problem.fix or "",
        outcome=_outcome(status, problem.code),
        server_time=problem.server_time,
        retry_after_s=min(max(retry_after_s, 0.0), 3600.0),
    )


def _outcome(status: int, code: str) -> Outcome:
    if code in OUTCOMES:
        return OUTCOMES[code]
    if status >= 500 or status in _TEMPORARY:
        return Outcome.TRY_AGAIN
    return Outcome.REFUSED


def _seconds(text: str) -> float:
    """Retry-After in seconds; a date or anything else counts as none."""
    return float(text) if text.isdecimal() and len(text) < 9 else 0.0
