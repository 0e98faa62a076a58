"""The worker protocol's messages (JSON), one model per body; PROTOCOL.md is the prose specification.

Units: `_s` seconds, `_bytes` bytes, money in integer micro-dollars (`_uusd`), times as Unix seconds (float, UTC).
`None` always means "not known" or "not set", never zero. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 1
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="BLAKE3, hex")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
Text = Annotated[str, Field(max_length=1000)]
Id = Annotated[str, Field(max_length=200)]
Version = Annotated[int, Field(ge=0, lt=2**31, description="policy version; fits the int32 of the arrays")]
VersionKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$", description="policy version, decimal")]
Epoch = Annotated[int, Field(ge=1, lt=2**62)]
Count = Annotated[int, Field(ge=0, lt=2**62)]


class Message(BaseModel):
    """Base of every message: frozen, strict about names, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineInfo(Message):
    """What produces tokens on the worker."""

    kind: Literal["torch", "vllm", "scripted"]
    version: Text
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Text = "cpu"


class PeerAddress(Message):
    """Where other workers may fetch pieces from this one: an address literal, its port and its certificate."""

    host: Annotated[str, Field(max_length=45)]
    port: Annotated[int, Field(ge=1024, le=65535)]
    certificate_sha256: Digest
    control_port: Annotated[int, Field(ge=1024, le=65535)] | None = Field(None, description="of the control plane; None: none")


class JoinRequest(Message):
    """POST join. Idempotent per (invite, key): a lost reply may be asked for again."""

    protocol_min: Annotated[int, Field(ge=1)] = PROTOCOL_VERSION
    protocol_max: Annotated[int, Field(ge=1)] = PROTOCOL_VERSION
    invite_code: Annotated[str, Field(max_length=200)] | None = Field(None, description="None: a known key comes back")
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="Ed25519 public key, hex")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    engine: EngineInfo
    price_uusd_per_hour: Annotated[int, Field(ge=0, le=10**10)]
    max_slots: Annotated[int, Field(ge=1, le=4096, description="completions generated at once")]
    tokens_per_s: Annotated[float, Field(ge=0)] = Field(0.0, description="measured decode rate; 0: not measured")
    memory_bytes: Count = 0
    peer: PeerAddress | None = None


class Welcome(Message):
    """The answer to join."""

    worker_id: str
    session_epoch: int = Field(description="grows with every join; only the newest session of a key may act")
    heartbeat_s: float
    server_time: float
    peer_networks: tuple[str, ...] = Field((), description="private networks (CIDR) that peers may be dialled in")
    notice: str = Field("", description="something the owner should know, in words; empty: nothing")


class Held(Message):
    """A policy version that the worker holds, verified whole."""

    job_id: Id
    version: Version
    digest: Digest


class Heartbeat(Message):
    """POST heartbeat."""

    session_epoch: Epoch
    held: tuple[Held, ...] = Field((), max_length=64)
    live_leases: tuple[Id, ...] = Field((), max_length=4096)
    free_slots: Annotated[int, Field(ge=0, le=4096)] = 0
    tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    uplink_bytes_per_s: Annotated[float, Field(ge=0)] = Field(0.0, description="measured while serving pieces; 0: not known")
    draining: bool = False
    price_uusd_per_hour: Annotated[int, Field(ge=0, le=10**10)] | None = Field(
        None, description="asked from now on; None: as before"
    )
    control: Text = Field("", description='which way its control messages take, in words: "libp2p", "https (why)"')
    activity: Text = Field("", description='what the worker does now, in words: "generating 32 completions"')


class VersionNotice(Message):
    """Order: fetch this version (its manifest names the pieces)."""

    job_id: str
    version: int
    digest: Digest
    committed_steps: int = Field(description="t, the learner's committed steps")


class Forthcoming(Message):
    """News: a version is being encoded against a base; holders of the base may fetch what is known of its pieces already."""

    job_id: str
    version: int
    base_digest: Digest
    transfer: Digest = Field(description="names the batches of its pieces: GET jobs/{job}/transfers/{transfer}")


class ControlPlace(Message):
    """Where the coordinator takes control messages over libp2p. Host 0.0.0.0 or ::: the address under which it is reached for this."""

    host: Annotated[str, Field(max_length=45)]
    port: Annotated[int, Field(ge=1, le=65535)]


class CancelOrder(Message):
    """Order: stop work on a lease."""

    lease_id: str
    reason: str


class HeartbeatReply(Message):
    """Orders ride on the answer to a beat."""

    server_time: float
    state: str = Field(description="the coordinator's view of this worker")
    reason: str = Field(description='why it does or does not get work: "active", "quarantined: wrong canary"')
    versions: tuple[VersionNotice, ...] = Field((), description="newest version of each job this worker serves")
    forthcoming: tuple[Forthcoming, ...] = Field((), description="versions that are being encoded; to be ignored at will")
    cancel: tuple[CancelOrder, ...] = ()
    drain: str | None = Field(None, description="a reason: finish leases and leave")
    price_uusd_per_hour: int = Field(description="asked, as the coordinator knows it")
    price_refused: str = Field("", description="why the price that the beat asked for is not taken; the old one stays")
    heartbeat_s: float
    control: ControlPlace | None = Field(None, description="None: control messages go over HTTPS")


class SamplingParameters(Message):
    """How to sample; seeds are per slot."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]


class Lease(Message):
    """Time-limited right to produce the named slots of one group."""

    lease_id: str
    job_id: str
    group_id: str
    fence: int
    prompt_ids: tuple[int, ...]
    slots: tuple[int, ...]
    seeds: tuple[int, ...] = Field(description="one per slot: f(job seed, group, slot), the same for every attempt")
    sampling: SamplingParameters
    version: int
    digest: Digest
    last_step: int = Field(description="x + S: dead once committed steps exceed it")
    deadline: float = Field(description="wall clock of the coordinator, Unix seconds")
    on_update: Literal["keep", "abort"]


class LeaseRequest(Message):
    """POST lease: a long poll; answered at once when there is work, else within wait_s."""

    session_epoch: Epoch
    job_id: Id
    version: Version
    digest: Digest
    free_slots: Annotated[int, Field(ge=1, le=4096)]
    wait_s: Annotated[float, Field(ge=0, le=30)] = 20.0


class LeaseReply(Message):
    """Work, or the reason in words why there is none now."""

    leases: tuple[Lease, ...] = ()
    reason: str = ""
    retry_after_s: float = 0.0
    newer: VersionNotice | None = Field(None, description="the job's newest version, when it is newer than the asked one")


class CompletionHead(Message):
    """One finished completion; its arrays lie in the frame's body at [start, start + length)."""

    slot: Annotated[int, Field(ge=0, le=4095)]
    length: Annotated[int, Field(ge=1, le=131072)]
    stop_reason: Literal["stop", "length"]
    generate_s: Annotated[float, Field(ge=0)]


class SubmitHead(Message):
    """POST submit: the JSON head of a frame.

    Body arrays, concatenated over completions in order: `token_ids` int32 [T], `logprobs` float32 [T] (of the sampled
    tokens at the sampling temperature), `versions` int32 [T] (the policy version that produced each token).
    """

    session_epoch: Epoch
    lease_id: Id
    fence: int
    digests: dict[VersionKey, Digest] = Field(
        description="version (decimal) -> digest, for every version in the body", max_length=64
    )
    completions: tuple[CompletionHead, ...] = Field(min_length=1, max_length=4096)


class SlotRefusal(Message):
    """Why one slot was not accepted, and whose fault that is."""

    slot: int
    code: str
    reason: str
    blame: Literal["worker", "network", "job", "coordinator"]
    paid: bool


class SubmitReply(Message):
    """Durable when it is sent: accepted slots are never lost."""

    accepted: tuple[int, ...] = ()
    duplicates: tuple[int, ...] = Field((), description="already accepted from this very lease: a repeated submission")
    refused: tuple[SlotRefusal, ...] = ()
    receipt: str = Field("", description="Ed25519 signature of the coordinator over the accepted slots, hex")


class Confirm(Message):
    """POST confirm: a version was fetched, verified, swapped in, and its canary run."""

    session_epoch: Epoch
    job_id: Id
    version: Version
    digest: Digest
    canary_logprobs: tuple[float, ...] = Field(max_length=4096, description="of the manifest's canary tokens, from the second on")
    fetched_bytes: Count = 0
    fetched_from_peers_bytes: Count = 0
    fetch_s: Annotated[float, Field(ge=0)] = 0.0
    assemble_s: Annotated[float, Field(ge=0)] = Field(0.0, description="from the last piece to a verified snapshot on disk")
    apply_s: Annotated[float, Field(ge=0)] = Field(0.0, description="how long the engine stood still for the swap")
    skipped: Count = Field(0, description="versions passed over on purpose since the last confirmation")


class ConfirmReply(Message):
    """Whether the worker may now take leases for that version."""

    accepted: bool
    reason: str


class SignedHop(Message):
    """One edge of a path, to the version at the path's end or to one in between (see p2p/PROTOCOL.md)."""

    text: str = Field(description="canonical JSON of p2p.domain.hops, exactly as signed")
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class BaseVersion(Message):
    """A version that low-rank edges of its job begin at: whoever keeps it comes from it to any other for the bytes of the adapters."""

    version: Version
    digest: Digest


class ManifestReply(Message):
    """GET jobs/{job}/manifests/{version}: the signed manifest (see p2p/PROTOCOL.md), and a path to it."""

    manifest: str = Field(description="canonical JSON of p2p.domain.manifest, exactly as signed")
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    hops: tuple[SignedHop, ...] = Field((), description="the cheapest path from what the worker holds, in order", max_length=128)
    base: BaseVersion | None = Field(None, description="a version of the job that is worth keeping, if there is room")


class SignedBatch(Message):
    """One batch of a transfer's pieces (see p2p/PROTOCOL.md)."""

    text: str = Field(description="canonical JSON of p2p.domain.batches, exactly as signed")
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class BatchesReply(Message):
    """GET jobs/{job}/transfers/{transfer}?since=N: the batches from number N on, in order; none when none came for a while."""

    batches: tuple[SignedBatch, ...] = ()


class Leave(Message):
    """POST leave: the worker goes; its leases are re-issued at once."""

    session_epoch: Epoch
    reason: Text = ""


class AccountRefusal(Message):
    """One refusal, as the owner sees it."""

    at: float
    job_id: str
    code: str
    reason: str
    blame: str
    paid: bool


class AccountQuote(Message):
    """What one quote pays: `owed_uusd` = floor(tokens x rate) + floor(paid time x price), of which `posted_uusd` is in the ledger."""

    quote_id: str
    job_id: str
    made_at: float
    ended_at: float | None = Field(None, description="None: it holds")
    ended_because: str = ""
    uusd_per_million_tokens: int | None = Field(description="None: no rate was measured yet, all active time is paid instead")
    uusd_per_idle_hour: int = Field(description="for time in which the coordinator gave no work")
    as_of: float = Field(description="when the figures below were taken")
    tokens: int = Field(description="accepted, or refused and paid")
    paid_ms: int = Field(description="milliseconds of active time that are paid")
    owed_uusd: int
    posted_uusd: int
    receipt: str = Field("", description="Ed25519 signature of the coordinator over this line, hex")


class AccountPayout(Message):
    """What an operator put on record as paid to the worker, outside of ECHO-2."""

    entry_id: str
    at: float
    uusd: int
    note: str


class Account(Message):
    """POST account: what the worker did and earned."""

    accepted_rollouts: int
    accepted_tokens: int
    refused_rollouts: int
    active_s: float
    earned_uusd: int = Field(description="posted in the ledger, over all quotes")
    paid_out_uusd: int = Field(0, description="of that, what an operator put on record as paid")
    payouts: tuple[AccountPayout, ...] = Field((), description="the newest ones")
    quotes: tuple[AccountQuote, ...] = Field((), description="the newest ones")
    refusals: tuple[AccountRefusal, ...] = ()


class Problem(Message):
    """RFC 9457 problem document; `code` is stable, `fix` tells the next step."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    field: str | None = None
    fix: str | None = None
    server_time: float | None = None
    retry_after_s: float | None = None
