"""Messages between the coordinator and its learner process: one JSON object a line over a Unix socket, both ways.

The coordinator asks, the learner answers in order; there is one request in flight. Every message carries the fence the
learner was started with, and one that carries another fence is refused (law 11). When either end of the socket closes,
the learner ends. Bulk data never travels here: files are named by absolute path on the shared host.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.wire.job import JobConfig


class LinkMessage(BaseModel):
    """Base: frozen, strict about names. NaN and infinity travel (a diverged loss must be seen)."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    fence: int


class Start(LinkMessage):
    """First request. Answer: Ready."""

    kind: Literal["start"] = "start"
    job_id: str
    config: JobConfig
    model_dir: str
    checkpoint_dir: str | None = Field(description="resume from here; None: from the model directory at step 0")
    metrics_dir: str | None = Field(
        None, description="where metrics.jsonl and what sinks keep on disk lie; None: figures go nowhere"
    )


class Train(LinkMessage):
    """Take one optimiser step on a sealed batch. `step` must be the learner's next. Answer: Trained."""

    kind: Literal["train"] = "train"
    step: int
    batch_path: str
    batch_digest: str = Field(description="BLAKE3 of the batch file, hex; checked before use")


class Snapshot(LinkMessage):
    """Write the current weights as a bf16 Hugging Face directory. Answer: Snapshotted."""

    kind: Literal["snapshot"] = "snapshot"
    directory: str
    canary_ids: tuple[int, ...]


class Checkpoint(LinkMessage):
    """Write resumable state atomically. Answer: Checkpointed, once durable."""

    kind: Literal["checkpoint"] = "checkpoint"
    directory: str
    ledger_step: int = Field(description="committed steps at this point; stored, and checked on resume")


class Evaluate(LinkMessage):
    """Greedy completions of held-out prompts with the *published bits* of the current version. Answer: Evaluated."""

    kind: Literal["evaluate"] = "evaluate"
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...] = Field(description="the most after each prompt, one each")
    stop_token_ids: tuple[int, ...]


class Log(LinkMessage):
    """Hand the figures of a committed step to the job's sinks. Answer: Logged, whether or not a sink could take them."""

    kind: Literal["log"] = "log"
    step: int
    at: float = Field(description="Unix seconds of the commit")
    metrics: dict[str, float]


class Stop(LinkMessage):
    """End cleanly. No answer."""

    kind: Literal["stop"] = "stop"


class Ready(LinkMessage):
    """The model is loaded; the next Train must be for `step`."""

    kind: Literal["ready"] = "ready"
    step: int
    parameters: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    logged: int | None = Field(0, description="the first step that metrics.jsonl lacks; None: it cannot tell, so log new ones only")


class Trained(LinkMessage):
    """Step `step` is done: the learner's weights are version step + 1."""

    kind: Literal["trained"] = "trained"
    step: int
    seconds: float
    metrics: dict[str, float]


class Snapshotted(LinkMessage):
    """The directory is complete (renamed into place). Log-probs are those of the bf16 bits, computed in fp32."""

    kind: Literal["snapshotted"] = "snapshotted"
    version: int
    directory: str
    canary_logprobs: tuple[float, ...]
    seconds: float


class Checkpointed(LinkMessage):
    """Durable: synced and renamed into place."""

    kind: Literal["checkpointed"] = "checkpointed"
    step: int
    directory: str


class Evaluated(LinkMessage):
    """Greedy token ids per prompt, in order, produced by version `version` alone."""

    kind: Literal["evaluated"] = "evaluated"
    version: int
    completions: tuple[tuple[int, ...], ...]


class Logged(LinkMessage):
    """The figures of `step` are in metrics.jsonl, if the disk took them."""

    kind: Literal["logged"] = "logged"
    step: int


class Failed(LinkMessage):
    """The request failed; the learner stays usable only if `fatal` is false."""

    kind: Literal["failed"] = "failed"
    code: str
    message: str
    fatal: bool


Request = Annotated[Start | Train | Snapshot | Checkpoint | Evaluate | Log | Stop, Field(discriminator="kind")]
Answer = Annotated[
    Ready | Trained | Snapshotted | Checkpointed | Evaluated | Logged | Failed,
    Field(discriminator="kind"),
]
REQUESTS: TypeAdapter[Request] = TypeAdapter(Request)
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Answer)

# The batch file of Train is safetensors. With N rollouts (group-major, slot-minor) and T tokens in all completions:
#   prompt_ids int32 [P], prompt_lengths int32 [N], token_ids int32 [T], lengths int32 [N], logprobs float32 [T],
#   versions int32 [T], rewards float32 [N] (NaN: no score, out of baseline and loss), group int32 [N] (0..B-1),
#   truncated uint8 [N] (1: stopped at the cap), weight float32 [N] (0: carried but not trained, as in no_signal)
# and, only where a completion holds tokens that the environment put in (several turns, tools):
#   sampled bool [T] (False: context, not the policy's: no log-prob, version, weight or count; write 0 for the first two; absent: all True)
# and metadata {"job": ..., "step": ..., "format": "echo2-batch-1"}.
BATCH_FORMAT = "echo2-batch-1"
