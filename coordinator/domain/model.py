"""The values that decisions are made on: one frozen dataclass per stored row, and the states they move through.

A row and its dataclass have the same field names; the store maps them without knowing what they mean. Times are Unix
seconds of the coordinator's clock; money is integer micro-dollars. Which moves are legal is in `states.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coordinator.wire.job import JobConfig
from pricing.rentals import Rental  # noqa: F401 (a row like those below; its rules are in pricing)


class JobState(StrEnum):
    """A job's life; `states.py` says what moves it and which timer ends each non-terminal state."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHING = "finishing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WorkerState(StrEnum):
    """STANDBY: joined, holds no confirmed version. ACTIVE: may take leases."""

    STANDBY = "standby"
    ACTIVE = "active"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    GONE = "gone"


class LeaseState(StrEnum):
    """LIVE until every slot settled (DONE) or one of the ends below, each with a reason."""

    LIVE = "live"
    DONE = "done"
    EXPIRED = "expired"  # the wall deadline passed
    DEAD = "dead"  # committed steps exceeded last_step, or its version was rolled back
    CANCELLED = "cancelled"  # the job or an operator ended it
    ABANDONED = "abandoned"  # the worker left, was lost, or was quarantined


class GroupState(StrEnum):
    """ISSUED: slots open, leased or ungraded. READY: whole and graded. Settled: TRAINED, REJECTED or VOID."""

    ISSUED = "issued"
    READY = "ready"
    SEALED = "sealed"
    TRAINED = "trained"
    REJECTED = "rejected"
    VOID = "void"  # never had an accepted rollout


class RolloutState(StrEnum):
    """One (group, slot). ACCEPTED is the settlement; grading then gives the outcome, or the environment's next turn opens the slot again."""

    OPEN = "open"
    LEASED = "leased"
    ACCEPTED = "accepted"
    SCORED = "scored"
    UNSCORED = "unscored"  # the reward function answered None: does not apply
    GRADER_FAILED = "grader_failed"
    GRADER_TIMEOUT = "grader_timeout"
    VOID = "void"  # its group ended before it was accepted


class BatchState(StrEnum):
    """SEALED until the learner's step is committed."""

    SEALED = "sealed"
    COMMITTED = "committed"


class PublicationState(StrEnum):
    """RETIRED: superseded and needed by nobody. ROLLED_BACK: a replay gave this version another digest."""

    PUBLISHED = "published"
    RETIRED = "retired"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True)
class Job:
    """One training job."""

    id: str
    name: str
    owner: str  # token id
    config: JobConfig  # S, kappa and budget in here may change by PATCH
    state: JobState
    reason: str
    state_since: float
    created_at: float
    model_dir: str  # resolved
    committed_steps: int = 0  # t
    no_signal_streak: int = 0
    learner_fence: int = 0
    learner_restarts: int = 0  # since the last committed step
    vocab_size: int = 0  # 0 until the learner was ready once
    stop_token_ids: tuple[int, ...] = ()
    resume_state: JobState | None = None  # where `resume` leads back to


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of the same prompt. `number` counts issues within the job from 0."""

    id: str
    job_id: str
    number: int
    prompt_index: int
    prompt_ids: tuple[int, ...]
    size: int
    state: GroupState
    issued_at: float
    reason: str = ""
    oldest_version: int | None = None  # over all accepted tokens; None: none accepted yet
    step: int | None = None  # the batch it was sealed into
    fence: int = 0  # grows with every lease on the group
    settled_at: float | None = None
    prompt_text: str = ""  # what people read


@dataclass(frozen=True, slots=True)
class Rollout:
    """One slot of a group, from issue to outcome.

    With several turns the row is the newest one: what a lease settles, and where its tokens lie. The turns before it are `Turn` rows;
    `oldest_version`, `newest_version` and `digests` are over all of them.
    """

    group_id: str
    slot: int
    job_id: str
    group_number: int
    state: RolloutState
    lease_id: str | None = None
    worker_id: str | None = None  # who holds or settled it
    attempts: int = 0
    blob: str | None = None  # digest of the submission's stored body
    blob_start: int = 0  # first token in the body's arrays
    length: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    digests: dict[str, str] = field(default_factory=dict)  # version -> digest
    stop_reason: str = ""
    generate_s: float = 0.0
    reward: float | None = None
    text: str = ""
    detail: str = ""  # the grader's words
    accepted_at: float | None = None
    graded_at: float | None = None
    turn: int = 0  # counts from 0
    preceding: int = 0  # tokens between the prompt and this turn
    continued_at: float | None = None  # when the environment asked for this turn; None: it is the first


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a slot that is over: settled and paid once, by its lease. Never changed."""

    group_id: str
    slot: int
    turn: int
    job_id: str
    lease_id: str
    worker_id: str
    blob: str  # digest of the submission's stored body
    blob_start: int
    length: int  # sampled tokens
    stop_reason: str
    generate_s: float
    accepted_at: float
    token_ids: tuple[int, ...]  # the sampled ones, then those that the environment placed before the next turn


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to some slots of one group."""

    id: str
    job_id: str
    group_id: str
    worker_id: str
    session_epoch: int
    slots: tuple[int, ...]
    version: int
    digest: str
    last_step: int
    deadline: float
    fence: int
    state: LeaseState
    issued_at: float
    reason: str = ""
    closed_at: float | None = None
    quote_id: str | None = None  # what its work is paid by; None: granted before there were quotes
    tokens: int | None = None  # accepted under it, once every slot settled; None: its rollouts tell
    max_new_tokens: int | None = None  # of a turn, where that is less than the job's; None: the job's


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something a worker submitted or asked and did not get."""

    id: str
    worker_id: str
    job_id: str
    lease_id: str
    group_id: str
    slot: int
    code: str
    reason: str
    blame: str  # worker | network | job | coordinator
    paid: bool
    tokens: int
    at: float
    quote_id: str | None = None  # what pays it; None: nothing, or it is paid as the accepted rollout that it was


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, kept until a newer checkpoint is durable."""

    job_id: str
    step: int
    state: BatchState
    groups: tuple[int, ...]  # group numbers, ascending
    path: str
    digest: str
    rollouts: int
    no_signal: bool
    staleness: dict[str, int]  # staleness -> groups
    sealed_at: float
    waited_s: float = 0.0  # learner idle before the seal
    committed_at: float | None = None
    train_s: float = 0.0
    bound: int | None = None  # S when it was sealed; None: not recorded


@dataclass(frozen=True, slots=True)
class Publication:
    """One published policy version: identity is (version, digest)."""

    job_id: str
    version: int
    digest: str
    state: PublicationState
    manifest: str  # canonical JSON as signed
    signature: str
    directory: str  # the Hugging Face directory of its bits
    canary_logprobs: tuple[float, ...]  # the coordinator keeps these to itself
    published_at: float
    encode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """One way to a published version's bits, kept while a worker's path may use it; the version itself may be retired."""

    job_id: str
    id: str  # of its base, encoding and result: see `p2p.domain.hops`
    digest: str  # of the version that it leads to
    version: int
    encoding: str
    base_version: int | None  # None: a keyframe
    base_digest: str | None
    nbytes: int
    document: str  # the hop, canonical JSON as signed
    signature: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """Durable learner state after `step` steps."""

    job_id: str
    step: int
    directory: str
    durable_at: float


@dataclass(frozen=True, slots=True)
class Worker:
    """A remote node that generates."""

    id: str
    public_key: str
    name: str
    owner: str
    invite_id: str
    state: WorkerState
    reason: str
    state_since: float
    joined_at: float
    last_seen_at: float
    session_epoch: int
    engine: dict[str, Any]  # wire EngineInfo
    price_uusd_per_hour: int
    max_slots: int
    tokens_per_s: float = 0.0
    peer: dict[str, Any] | None = None  # wire PeerAddress
    strikes: int = 0  # worker faults since the last accepted work
    activity: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """One stay of a worker; active time and cost derive from these rows."""

    worker_id: str
    epoch: int
    started_at: float
    last_seen_at: float
    price_uusd_per_hour: int
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class QuoteRow:
    """A worker's activation for a job, and the pay that was agreed with it (`pricing.quotes`). Open rows are the active set."""

    id: str
    job_id: str
    worker_id: str
    session_epoch: int
    role: str  # active: may take leases | spare: kept ready
    uusd_per_million_tokens: int | None  # accepted tokens; None: no rate was measured yet, active time is paid instead
    uusd_per_idle_hour: int  # active time in which the coordinator gave no work; without a rate: all active time
    made_at: float
    expires_at: float
    reason: str  # why it was chosen
    ended_at: float | None = None
    ended_because: str = ""


@dataclass(frozen=True, slots=True)
class Meter:
    """What was measured and posted under a quote until the last look, and what may be leased under it before the next one."""

    quote_id: str
    job_id: str
    worker_id: str
    looked_at: float
    counted_to: float  # leases closed before this, and refusals of before, are in `tokens_before` and not looked at again
    tokens_before: int
    tokens: int  # owed for in all
    paid_ms: int  # active time that is owed for, in all
    posted_uusd: int  # of what is owed
    posted_at: float
    covered_until: float  # active time is reserved up to this
    wanted: int = 0  # slots that the last look made leasable
    leasable: int | None = None  # of these, what is left; None: work under this quote costs nothing, or time alone is paid
    closed_at: float | None = None  # everything owed is posted, and nothing is reserved any more


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One fact of money; its postings sum to zero. Rows of this kind and of `Posting` are never changed (`pricing.ledger`)."""

    id: str
    seq: int  # counts all entries from 0
    kind: str
    job_id: str
    worker_id: str  # "": none
    subject: str  # the job, quote or rental that it is about
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Posting:
    """One move of an entry. `number` counts the account's moves from 0; `balance_uusd` is what it stands at after this one."""

    account: str
    number: int
    entry_id: str
    uusd: int
    balance_uusd: int


@dataclass(frozen=True, slots=True)
class LedgerAccount:
    """An account as it stands: a shortcut, equal to its newest posting (the audit proves it)."""

    id: str
    kind: str
    job_id: str
    worker_id: str  # "": none
    number: int  # moves so far
    uusd: int


@dataclass(frozen=True, slots=True)
class PriceRow:
    """What a worker asks from `at` on, until its next row."""

    worker_id: str
    at: float
    uusd_per_hour: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A version that a worker confirmed by canary."""

    worker_id: str
    job_id: str
    version: int
    digest: str
    canary_logprobs: tuple[float, ...]
    confirmed_at: float
    fetched_bytes: int = 0
    fetched_from_peers_bytes: int = 0
    fetch_s: float = 0.0
    apply_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Invite:
    """A right to enrol workers. Uses are counted from `Worker.invite_id`."""

    id: str
    code_hash: str
    owner: str
    max_uses: int
    created_at: float
    expires_at: float
    price_ceiling_uusd_per_hour: int | None = None
    jobs: tuple[str, ...] = ()  # empty: any
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class ApiToken:
    """A REST credential; the secret itself is never stored."""

    id: str
    name: str
    role: str  # admin | author | viewer
    secret_hash: str
    created_at: float
    rights: tuple[str, ...] = ()  # "code": may bring Python
    spend_limit_uusd: int | None = None
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """A content-addressed file."""

    digest: str
    name: str
    kind: str  # dataset | code | model
    bytes: int
    owner: str
    created_at: float


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """The answer of a POST, kept 24 h."""

    token_id: str
    key: str
    route: str
    body_hash: str
    created_at: float
    status: int | None = None  # None: in flight
    response: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job; `seq` grows within the job from 1."""

    job_id: str
    seq: int
    at: float
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured figure."""

    job_id: str
    name: str
    step: int
    at: float
    value: float
