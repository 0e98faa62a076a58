"""What a session machine wants done: imperative values; the shell performs them and reports back with events."""

from __future__ import annotations

from dataclasses import dataclass

from worker_node.domain.generation import Completion, GenerationRequest
from worker_node.domain.weights import Forthcoming, Version


@dataclass(frozen=True, slots=True)
class SendJoin:
    """Answer: Joined, or CallFailed(JOIN)."""


@dataclass(frozen=True, slots=True)
class SendBeat:
    """Answer: BeatAnswered, or CallFailed(BEAT)."""

    epoch: int
    held: tuple[Version, ...]
    live_leases: tuple[str, ...]
    free_slots: int
    draining: bool
    activity: str


@dataclass(frozen=True, slots=True)
class AskLease:
    """Answer: LeaseAnswered, or CallFailed(LEASE)."""

    epoch: int
    version: Version
    free_slots: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """Answer: ManifestArrived, or CallFailed(MANIFEST)."""

    version: Version


@dataclass(frozen=True, slots=True)
class FetchPieces:
    """Answer: FetchFinished or FetchFailed."""

    version: Version


@dataclass(frozen=True, slots=True)
class Weigh:
    """What would it cost to jump to this version, and what is left of the running fetch? Answer: Weighed."""

    version: Version


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Give the running fetch up; no answer is waited for."""

    version: Version


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring pieces of a version that is still being encoded; no answer is waited for, and any fetch ends it."""

    news: Forthcoming


@dataclass(frozen=True, slots=True)
class SwapWeights:
    """Between two decode steps. Answer: SwapFinished or SwapFailed, after a CompletionAborted for each slot stopped."""

    version: Version
    abort_running: bool


@dataclass(frozen=True, slots=True)
class SendConfirm:
    """Answer: ConfirmAnswered, or CallFailed(CONFIRM)."""

    epoch: int
    version: Version
    canary_logprobs: tuple[float, ...]
    fetched_bytes: int
    from_peers_bytes: int
    fetch_s: float
    assemble_s: float
    apply_s: float
    skipped: int


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Answer: CompletionFinished, CompletionAborted or CompletionFailed for each request."""

    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Stop the named slots of a lease; no answer is waited for."""

    lease_id: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubmitCompletions:
    """Answer: SubmitAnswered, or CallFailed(SUBMIT, lease_id)."""

    epoch: int
    lease_id: str
    fence: int
    completions: tuple[tuple[int, Completion], ...]  # slot, completion
    digests: tuple[tuple[int, str], ...]  # version, digest


@dataclass(frozen=True, slots=True)
class DropVersions:
    """Forget these versions on disk."""

    versions: frozenset[Version]


@dataclass(frozen=True, slots=True)
class SendLeave:
    """Answer: Left, or CallFailed(LEAVE)."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The session is over."""

    reason: str
    exit_code: int


Instruction = (
    SendJoin
    | SendBeat
    | AskLease
    | FetchManifest
    | FetchPieces
    | Weigh
    | StopFetch
    | Prefetch
    | SwapWeights
    | SendConfirm
    | StartGeneration
    | AbortGeneration
    | SubmitCompletions
    | DropVersions
    | SendLeave
    | Stop
)
