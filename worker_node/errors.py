"""What can go wrong in a worker, as one tree. Each message says what was wrong and what to do next.

WorkerError
├── ConfigError     a setting of this worker; the owner can fix it
├── IdentityError   the key file: absent, unreadable, wrong passphrase
├── TrustError      the coordinator is not who the invite says
├── CallError       one call to the coordinator failed; `outcome` says what a retry would bring
└── EngineError     the engine cannot load, update or generate; `poisoned` when its weights may be a mixture
"""

from __future__ import annotations

from worker_node.domain.events import Outcome


class WorkerError(Exception):
    """Base of the worker's errors."""


class ConfigError(WorkerError):
    """A setting is missing or wrong."""


class IdentityError(WorkerError):
    """The identity file cannot be used."""


class TrustError(WorkerError):
    """The other end could not prove to be the coordinator that the invite names."""


class CallError(WorkerError):
    """A call was refused or got no answer."""

    def __init__(self, outcome: Outcome, code: str, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.code = code
        self.retry_after_s = retry_after_s


class EngineError(WorkerError):
    """The engine failed."""

    def __init__(self, message: str, *, poisoned: bool = False) -> None:
        super().__init__(message)
        self.poisoned = poisoned
