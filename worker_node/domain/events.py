"""What happened to a worker: the events its session machine is told. Past tense; each carries all that the machine needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from coordinator.wire.messages import Lease, SlotRefusal
from worker_node.domain.generation import Completion
from worker_node.domain.weights import Forthcoming, Version


class Call(StrEnum):
    """The kinds of call a session has in flight."""

    JOIN = "join"
    BEAT = "heartbeat"
    LEASE = "lease"
    MANIFEST = "manifest"
    CONFIRM = "confirm"
    SUBMIT = "submit"
    LEAVE = "leave"


class Outcome(StrEnum):
    """What a failed call means for the session."""

    TRY_AGAIN = "try_again"  # no answer, or a temporary refusal
    REFUSED = "refused"  # a definite no to this request; the session goes on
    REJOIN = "rejoin"  # the coordinator does not know this session any more
    FENCED = "fenced"  # a newer session with the same key acts now
    FATAL = "fatal"  # no session is possible: revoked, wrong protocol, bad invite


@dataclass(frozen=True, slots=True)
class Joined:
    """The coordinator welcomed this worker."""

    worker_id: str
    epoch: int
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class CancelledLease:
    """One lease that the coordinator ended."""

    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class BeatAnswered:
    """Orders arrived. `versions` are the newest of each job served."""

    state: str
    reason: str
    heartbeat_s: float
    versions: tuple[Version, ...] = ()
    cancelled: tuple[CancelledLease, ...] = ()
    drain: str | None = None
    forthcoming: tuple[Forthcoming, ...] = ()


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease and its end on the machine's own clock."""

    lease: Lease
    ends_at: float


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """Work, or the reason why there is none. `newer` is set when the asked job has a newer version than the asked one."""

    epoch: int
    leases: tuple[GrantedLease, ...] = ()
    reason: str = ""
    retry_after_s: float = 0.0
    newer: Version | None = None


@dataclass(frozen=True, slots=True)
class ManifestArrived:
    """The manifest of the version being fetched is here and its signature holds."""

    version: Version


@dataclass(frozen=True, slots=True)
class FetchFinished:
    """The version lies whole and verified on disk."""

    version: Version
    fetched_bytes: int
    from_peers_bytes: int
    seconds: float  # until the last piece
    assemble_s: float = 0.0  # from there to the verified snapshot

    def since(self, earlier: FetchFinished) -> FetchFinished:
        """What the version cost with one that was brought for its sake before."""
        return replace(
            self,
            fetched_bytes=earlier.fetched_bytes + self.fetched_bytes,
            from_peers_bytes=earlier.from_peers_bytes + self.from_peers_bytes,
            seconds=earlier.seconds + self.seconds,
            assemble_s=earlier.assemble_s + self.assemble_s,
        )


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The pieces could not be had or did not verify; nothing of the version is used."""

    version: Version
    reason: str
    blame: str = "network"  # empty: it cannot be told


@dataclass(frozen=True, slots=True)
class Weighed:
    """Bytes left of the running fetch, and bytes of the cheapest path to a newer version. Not known: 0 left."""

    version: Version
    left: int
    jump: int


@dataclass(frozen=True, slots=True)
class SwapFinished:
    """The engine generates with the version from the next token on."""

    version: Version
    canary_logprobs: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """The engine kept what it had; or, unless `kept`, nothing is loaded any more (a load that failed)."""

    version: Version
    reason: str
    kept: bool = True


@dataclass(frozen=True, slots=True)
class ConfirmAnswered:
    """The coordinator judged the canary. `epoch` is the session it was asked in (0: the present one)."""

    version: Version
    accepted: bool
    reason: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CompletionFinished:
    """The engine finished one slot."""

    lease_id: str
    slot: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class CompletionAborted:
    """A running slot was stopped by an order or a swap; nothing of it is used."""

    lease_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class CompletionFailed:
    """The engine cannot make this slot (the prompt does not fit, say); the engine itself is well."""

    lease_id: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class SubmitAnswered:
    """The submission is durable at the coordinator; `settled` slots were accepted now or before."""

    lease_id: str
    settled: tuple[int, ...]
    refused: tuple[SlotRefusal, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call got no usable answer. `epoch` is the one it was made under (0: none); `lease_id` names a submission's lease."""

    call: Call
    outcome: Outcome
    code: str
    reason: str
    epoch: int = 0
    retry_after_s: float = 0.0
    lease_id: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """The coordinator knows that this worker goes."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The owner wants the worker to finish its leases and go; asked a second time: go now."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine is gone; nothing that ran in it will finish."""

    reason: str


@dataclass(frozen=True, slots=True)
class HeardOf:
    """The control plane told, with the coordinator's signature, that a version exists."""

    version: Version


@dataclass(frozen=True, slots=True)
class Woke:
    """Nothing but time passed."""


Event = (
    Joined
    | BeatAnswered
    | LeaseAnswered
    | ManifestArrived
    | FetchFinished
    | FetchFailed
    | Weighed
    | SwapFinished
    | SwapFailed
    | ConfirmAnswered
    | CompletionFinished
    | CompletionAborted
    | CompletionFailed
    | SubmitAnswered
    | CallFailed
    | Left
    | DrainRequested
    | EngineFailed
    | HeardOf
    | Woke
)
