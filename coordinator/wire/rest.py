"""The REST API's bodies, queries and answers; job files are in `job.py`, problem documents in `messages.py`.

Units as everywhere on the wire: `_s` seconds, `_bytes` bytes, `_uusd` integer micro-dollars, times in Unix seconds. `None`
means "not known" or "not set", never zero.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from coordinator.wire.job import JobConfig
from coordinator.wire.messages import Digest, Text

REWARD_METRIC = "reward/all/mean"
EVAL_METRIC = "eval/all/mean"
MOST_UUSD = 10**15
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
ShortName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Role = Literal["admin", "author", "viewer"]
Limit = Annotated[int, Field(ge=1, le=1000)]
Instant = Annotated[float, Field(ge=0, le=1e11)]


class RestBody(BaseModel):
    """Base of what clients send: unknown names are errors, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RestAnswer(BaseModel):
    """Base of what the coordinator answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# Queries


class NoQuery(RestBody):
    """A route without query parameters."""


class FilesQuery(RestBody):
    """POST /files: what the body is. Its bytes are the body itself."""

    kind: Literal["dataset", "code", "model"] = Field(description="model: an uncompressed tar of a Hugging Face directory")
    name: FileName = Field(description="file name with its suffix; the suffix tells a dataset's format")


class JobsQuery(RestBody):
    """GET /jobs: newest first."""

    state: Literal["queued", "starting", "running", "paused", "finishing", "completed", "failed", "cancelled"] | None = Field(
        None, description="only jobs in this state"
    )
    before: Instant | None = Field(None, description="only jobs created before this time; for the next page")
    limit: Limit = Field(100, description="at most this many")


class MetricsQuery(RestBody):
    """GET /jobs/{job_id}/metrics."""

    name: str | None = Field(None, min_length=1, max_length=200, description="a metric's name; without it the names are listed")
    since: Instant | None = Field(None, description="only points written after this time (Unix seconds)")
    limit: Annotated[int, Field(ge=1, le=10_000)] = Field(5000, description="the newest points, at most this many")


class RolloutsQuery(RestBody):
    """GET /jobs/{job_id}/rollouts."""

    step: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(None, description="trained in this step; without it the newest")
    limit: Annotated[int, Field(ge=1, le=500)] = Field(50, description="at most this many")


class WorkersQuery(RestBody):
    """GET /workers: those seen last come first."""

    state: Literal["standby", "active", "draining", "quarantined", "gone"] | None = Field(None, description="only this state")
    limit: Limit = Field(200, description="at most this many")


class ListQuery(RestBody):
    """Lists of invites and tokens: newest first."""

    limit: Limit = Field(200, description="at most this many")


# Bodies


class Reason(RestBody):
    """Why an operator or author does this; kept with the state."""

    reason: Text = ""


class NewToken(RestBody):
    """POST /tokens."""

    name: ShortName
    role: Role
    rights: tuple[Literal["code"], ...] = Field((), max_length=1, description='"code": may bring Python')
    spend_limit_uusd: Annotated[int, Field(ge=0, le=MOST_UUSD)] | None = Field(None, description="over all of its jobs")


class NewInvite(RestBody):
    """POST /invites."""

    owner: ShortName = Field("operator", description="who owns the machines that will use it")
    max_uses: Annotated[int, Field(ge=1, le=10_000)] = Field(1, description="workers that may join with it")
    expires_in_s: Annotated[float, Field(ge=60, le=366 * 86400)] = 7 * 86400.0
    price_ceiling_uusd_per_hour: Annotated[int, Field(ge=0, le=10**10)] | None = None
    jobs: tuple[Identifier, ...] = Field((), max_length=100, description="job ids its workers may serve; empty: any")


# Answers


class FileView(RestAnswer):
    """An upload; jobs name it `upload:DIGEST`."""

    digest: Digest
    reference: str = Field(description="what a job file writes")
    name: str
    kind: Literal["dataset", "code", "model"]
    bytes: int
    owner: str
    created_at: float


class Figure(RestAnswer):
    """The newest value of a metric."""

    name: str
    step: int
    value: float | None = Field(description="None: not finite")
    at: float


class StalenessView(RestAnswer):
    """Counted over committed and sealed batches."""

    bound: int = Field(description="S")
    publish_every: int | Literal["auto"] = Field(description="kappa as set")
    histogram: dict[str, int] = Field(description="staleness -> groups")
    highest: int | None
    steps_counted: int


class LearnerView(RestAnswer):
    """Learner time over the newest committed steps."""

    utilisation: float | None = Field(description="train_s / (train_s + waited_s)")
    train_s: float
    waited_s: float
    steps_counted: int
    restarts: int = Field(description="since the last committed step")


class RateView(RestAnswer):
    """Measured flow of rollouts."""

    accepted_per_s: float
    window_s: float
    required_per_s: float | None = Field(description="R over the mean training time of the newest steps")


class WorkView(RestAnswer):
    """What was made, from rows."""

    groups: dict[str, int] = Field(description="state -> groups")
    rollouts: dict[str, int] = Field(description="state -> rollouts")
    refused: dict[str, int] = Field(description="code -> refusals")
    rejected: dict[str, int] = Field(description="code -> accepted rollouts in groups that were rejected with it")
    accepted_tokens: int
    workers_serving: int = Field(description="active workers that hold a version which the next step may train on")
    live_leases: int


class JobSummary(RestAnswer):
    """One line of the list."""

    id: str
    name: str
    owner: str
    state: str
    reason: str
    state_since: float
    created_at: float
    committed_steps: int
    planned_steps: int
    reward: Figure | None


class JobView(JobSummary):
    """A whole job."""

    config: JobConfig
    resume_state: str | None
    eval: Figure | None
    staleness: StalenessView
    learner: LearnerView
    rate: RateView
    work: WorkView
    doing: str = Field(description='what takes long and moves no figure, such as a held-out evaluation; "" otherwise')
    warnings: tuple[str, ...] = Field(description="what keeps the job from learning and no state tells")
    newest_version: int | None
    spent_uusd: int = Field(description="posted in the ledger as earned by its workers and providers")
    reserved_uusd: int = Field(description="set aside in the ledger for work under way")


class JobList(RestAnswer):
    """GET /jobs."""

    jobs: tuple[JobSummary, ...]
    next_before: float | None = Field(description="`before` of the next page; None: this is the last")


class MetricPoint(RestAnswer):
    """One measured figure."""

    step: int
    at: float
    value: float | None = Field(description="None: not finite")


class MetricsView(RestAnswer):
    """The names with their newest value, or the points of one name in order of step."""

    names: tuple[Figure, ...] = ()
    name: str | None = None
    points: tuple[MetricPoint, ...] = ()


class RolloutView(RestAnswer):
    """What people look at first."""

    group_number: int
    slot: int
    step: int | None
    state: str
    outcome: str = Field(description="the group's state and its reason")
    prompt: str
    prompt_ids: tuple[int, ...]
    completion: str = Field(description="with several turns: all that follows the prompt, the environment's words too")
    length: int = Field(description="sampled tokens; with several turns those of the newest")
    turns: int = Field(description="begun so far")
    reward: float | None
    detail: str
    oldest_version: int | None
    newest_version: int | None
    worker_id: str | None
    stop_reason: str
    generate_s: float
    accepted_at: float | None


class RolloutList(RestAnswer):
    """GET /jobs/{job_id}/rollouts."""

    rollouts: tuple[RolloutView, ...]


class CheckpointFile(RestAnswer):
    """One downloadable file."""

    name: str
    bytes: int


class CheckpointView(RestAnswer):
    """A version whose Hugging Face directory lies on the coordinator."""

    version: int
    source: Literal["publication", "checkpoint"]
    digest: str | None = Field(description="of a publication: its whole digest")
    at: float
    files: tuple[CheckpointFile, ...]
    adapter: tuple[CheckpointFile, ...] = Field((), description="with [lora]: the adapters alone, as peft saves them")


class CheckpointList(RestAnswer):
    """GET /jobs/{job_id}/checkpoints: newest first."""

    checkpoints: tuple[CheckpointView, ...]


class AuditView(RestAnswer):
    """Laws 1, 2 and 7, recomputed from the rows."""

    ok: bool
    findings: tuple[str, ...]
    counts: dict[str, int]


class SessionView(RestAnswer):
    """One stay of a worker."""

    epoch: int
    started_at: float
    last_seen_at: float
    ended_at: float | None
    price_uusd_per_hour: int


class HoldingView(RestAnswer):
    """A version that the worker confirmed."""

    job_id: str
    version: int
    digest: str
    confirmed_at: float
    fetched_bytes: int
    fetched_from_peers_bytes: int
    fetch_s: float
    apply_s: float


class WorkerSummary(RestAnswer):
    """One line of the pool."""

    id: str
    name: str
    owner: str
    state: str
    reason: str
    state_since: float
    joined_at: float
    last_seen_at: float
    engine: dict[str, Any]
    price_uusd_per_hour: int
    max_slots: int
    tokens_per_s: float
    activity: str
    strikes: int
    version: int | None = Field(description="the version it confirmed last, of the job it serves now")
    live_leases: int
    accepted_rollouts: int


class WorkerView(WorkerSummary):
    """A whole worker."""

    public_key: str
    session_epoch: int
    control: str = Field(
        "", description='which way its control messages take, as it says: "libp2p", "https (why)"; empty: not known'
    )
    accepted_tokens: int
    refused: dict[str, int] = Field(description="code -> refusals")
    active_s: float
    earned_uusd: int = Field(description="posted in the ledger, over all jobs")
    paid_out_uusd: int = Field(description="of that, what was put on record as paid")
    sessions: tuple[SessionView, ...] = Field(description="newest first, at most 50")
    holdings: tuple[HoldingView, ...]


class WorkerList(RestAnswer):
    """GET /workers."""

    workers: tuple[WorkerSummary, ...]


class InviteView(RestAnswer):
    """An invite; its code is shown once, when it is made."""

    id: str
    owner: str
    max_uses: int
    used: int
    created_at: float
    expires_at: float
    revoked_at: float | None
    price_ceiling_uusd_per_hour: int | None
    jobs: tuple[str, ...]


class InviteCreated(InviteView):
    """The answer that holds the code."""

    code: str = Field(description="echo2-invite-1.<coordinator public key>.<secret>; keep it, it is not shown again")


class InviteList(RestAnswer):
    """GET /invites."""

    invites: tuple[InviteView, ...]


class TokenView(RestAnswer):
    """A credential, without its secret."""

    id: str
    name: str
    role: Role
    rights: tuple[str, ...]
    spend_limit_uusd: int | None
    created_at: float
    revoked_at: float | None


class TokenCreated(TokenView):
    """The answer that holds the secret."""

    token: str = Field(description="send as `Authorization: Bearer TOKEN`; keep it, it is not shown again")


class TokenList(RestAnswer):
    """GET /tokens."""

    tokens: tuple[TokenView, ...]


class Health(RestAnswer):
    """GET /healthz: the process answers."""

    status: Literal["ok"] = "ok"


class Check(RestAnswer):
    """One condition of readiness."""

    name: str
    ok: bool
    detail: str


class Readiness(RestAnswer):
    """GET /readyz: 200 when every check holds, else 503 with Retry-After."""

    ready: bool
    checks: tuple[Check, ...]
