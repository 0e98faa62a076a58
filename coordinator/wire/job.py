"""The job file: one typed tree, parsed once; an unknown key is an error that names it.

The same model validates a TOML file, a REST body and a PATCH. Paths in it are names: they resolve to an upload
(`upload:DIGEST`) or inside the operator's listed roots, never anywhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from coordinator.wire.environment import EnvironmentConfig, Section

Loss = Literal["dppo", "ppo_clip", "cispo", "gspo", "reinforce", "decoupled"]
LOSS_FIELDS: dict[str, tuple[str, ...]] = {
    "dppo": ("tv_low", "tv_high", "drift_penalty", "ratio_cap"),
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("ratio_cap",),
    "gspo": ("clip_low", "clip_high"),
    "reinforce": ("ratio_floor", "ratio_cap"),
    "decoupled": ("clip_low", "clip_high", "ratio_floor", "ratio_cap"),
}
"""Which fields of [algorithm] belong to one loss or some of them; a job may set only those of its own loss."""
LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cispo": {"ratio_cap": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "reinforce": {"ratio_cap": 5.0},
}
"""Where a loss's own default (its paper's) differs from the field's."""

Pair = Annotated[tuple[float, float], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]
"""JSON knows lists only; after a validator that sees the section first, pydantic takes them for Python's and strictly refuses them."""


class AlgorithmConfig(Section):
    """One optimiser step: group shape, loss and optimiser. What each loss computes: `coordinator/learner/losses.py`."""

    loss: Loss = "dppo"
    group_size: int = Field(16, ge=2, le=1024, description="G, rollouts per group")
    groups_per_step: int = Field(16, ge=1, le=4096, description="B, groups per step")
    learning_rate: float = Field(1e-6, gt=0, lt=1)
    warmup_steps: int = Field(0, ge=0)
    betas: Pair = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    advantage: Literal["mean", "group_std", "leave_one_out", "batch_std"] = Field(
        "mean", description="reward minus group mean; that over the group's or the batch's std; reward minus the mean of the others"
    )
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = Field(
        "token_mean",
        description="the loss is a sum over tokens, over: trained tokens; the rollout's tokens x trained rollouts; "
        "the group's tokens x trained groups; max_new_tokens x trained rollouts (gspo: sequence_mean unless set)",
    )
    correction: Literal["sampler", "none"] = Field(
        "sampler", description="ratios to the sampler's recorded log-probs; none: all ratios are 1, for staleness.max = 0 only"
    )
    tv_low: float = Field(0.2, gt=0, le=1, description="dppo: mask where p - mu < -tv_low and the advantage is negative")
    tv_high: float = Field(0.2, gt=0, le=1, description="dppo: mask where p - mu > tv_high and the advantage is positive")
    drift_penalty: float = Field(1e-3, ge=0, description="dppo: weight of the squared log-ratio to the sampler")
    clip_low: float = Field(0.2, gt=0, lt=1, description="ppo_clip, decoupled; gspo: 3e-4 unless set")
    clip_high: float = Field(0.2, gt=0, description="ppo_clip, decoupled; gspo: 4e-4 unless set")
    dual_clip: float | None = Field(2.0, gt=1, description="ppo_clip: bound on the ratio for negative advantages")
    ratio_cap: float = Field(
        2.0,
        gt=1,
        description="dppo, cispo (5 unless set), decoupled: cap on the token's weight; reinforce (5 unless set): mask above it",
    )
    ratio_floor: float = Field(
        0.5, gt=0, lt=1, description="reinforce: mask below it; decoupled: mask below it where the advantage is negative"
    )
    reference_kl: float = Field(
        0.0, ge=0, description="weight of the KL (k3, times the ratio) to version 0; above 0 its weights stay in memory"
    )
    truncated: Literal["mask", "keep"] = Field("mask", description="completions that hit the cap: out of the loss, or in it")
    max_replacements: int | None = Field(None, ge=0, description="zero-variance groups replaced per step; None: B")
    no_signal_limit: int = Field(5, ge=1, description="pause after this many batches in a row in which nothing teaches")
    min_group: int | None = Field(
        None, ge=2, description="close a group short with this many scores once nothing of it is under way; None: only whole"
    )
    micro_batch_tokens: int = Field(16384, ge=64)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, given: Any) -> Any:
        loss = given.get("loss") if isinstance(given, dict) else None
        return {**LOSS_DEFAULTS[loss], **given} if isinstance(loss, str) and loss in LOSS_DEFAULTS else given

    @model_validator(mode="after")
    def _only_fields_of_the_loss(self) -> AlgorithmConfig:
        """Values that a whole job carries for other losses are the fields' defaults, so a job read back from its row passes."""
        own = LOSS_FIELDS[self.loss]
        for name in sorted({each for names in LOSS_FIELDS.values() for each in names} - set(own)):
            value, plain = getattr(self, name), type(self).model_fields[name].default
            if value != plain:
                raise ValueError(
                    f"algorithm.{name} is {value}, but loss {self.loss!r} does not use it (it uses {', '.join(own)}): remove it"
                )
        return self

    def stale_data_refused(self, bound: int) -> str | None:
        """Why this loss must not be fed data up to `bound` versions old; None: it may."""
        if bound == 0 or self.correction == "sampler":
            return None
        return (
            f"staleness.max is {bound} with algorithm.correction 'none': data of older versions needs the ratio to its sampler; "
            "set algorithm.correction to 'sampler', or staleness.max to 0"
        )


class LearnerConfig(Section):
    """How the learner computes a step; what it computes is [algorithm]'s. `docs/learner.md` says what each costs and saves."""

    ranks: int = Field(1, ge=1, le=64, description="processes on the coordinator's host that share the model (FSDP2), one a GPU")
    packing: bool = Field(True, description="rollouts of a micro-batch one behind the other, without padding")
    gradient_checkpointing: bool = Field(False, description="layers keep their inputs alone and compute the rest twice")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16: layers compute in it (autocast); masters, head, log-probs and gradients stay float32"
    )


class LoraConfig(Section):
    """Low-rank adapters instead of all weights (arXiv 2106.09685), without dropout."""

    rank: int = Field(16, ge=1, le=1024)
    alpha: int = Field(32, ge=1, le=65536, description="an adapter counts alpha / rank times")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="last part of the names of the linear layers that get an adapter",
    )


class StalenessConfig(Section):
    """The user's dial."""

    max: int = Field(4, ge=0, le=64, description="S, in learner updates")
    publish_every: int | Literal["auto"] = Field("auto", description="kappa, in learner updates")
    on_update: Literal["keep", "abort"] = "keep"
    auto_reduce: bool = Field(False, description="lower S by 1 when the learner's figures say that the data is too old")


class SamplingConfig(Section):
    """How completions are sampled; training filters (top-p, top-k) are refused on purpose."""

    max_new_tokens: int = Field(1024, ge=1, le=131072)
    temperature: float = Field(1.0, gt=0, le=2)


class CheckpointConfig(Section):
    """When learner state becomes durable and when held-out evaluation runs."""

    every_steps: int = Field(20, ge=1)
    eval_every_steps: int = Field(20, ge=1)
    eval_prompts: int = Field(256, ge=0, description="0 switches evaluation off")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    keep_rollout_steps: int = Field(50, ge=0, description="token arrays of settled groups are kept for this many newest steps")


class WorkersConfig(Section):
    """Which workers may serve the job."""

    trust: Literal["any", "audited", "named"] = "any"
    engines: tuple[Literal["torch", "vllm", "scripted"], ...] = ("torch", "vllm")
    names: tuple[str, ...] = ()
    activation: Literal["market", "all"] = Field(
        "market",
        description="market: the cheapest workers that keep the learner busy, and all that ask for no money; all: whoever may",
    )
    headroom: float = Field(1.15, ge=1, le=10, description="market: this many times the rate that keeps the learner busy")
    weight: float = Field(1.0, gt=0, le=1000, description="market: the job's share of a pool that is too small for all jobs")


class MetricsConfig(Section):
    """Where figures go besides the coordinator's rows and the job's metrics.jsonl. Each sink is an extra of the installation."""

    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    project: str = Field("echo2", min_length=1, max_length=128, description="trackio, wandb: the project the job appears in")


class BudgetConfig(Section):
    """Where the job ends."""

    steps: int = Field(ge=1, le=10_000_000)
    usd: float | None = Field(None, gt=0)
    usd_per_hour: float | None = Field(None, gt=0)
    deadline_hours: float | None = Field(None, gt=0)


class JobConfig(Section):
    """A whole job file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str = Field(description='Hugging Face directory inside a listed root, or "upload:DIGEST"')
    seed: int = Field(0, ge=0, lt=2**63)
    environment: EnvironmentConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig | None = Field(None, description="absent: all weights learn")
    staleness: StalenessConfig = StalenessConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    workers: WorkersConfig = WorkersConfig()
    metrics: MetricsConfig = MetricsConfig()
    budget: BudgetConfig

    @model_validator(mode="after")
    def _consistent(self) -> JobConfig:
        group = self.algorithm.group_size
        minimum = self.algorithm.min_group
        if minimum is not None and minimum > group:
            raise ValueError(f"algorithm.min_group is {minimum}, above algorithm.group_size {group}: lower it")
        if (refusal := self.algorithm.stale_data_refused(self.staleness.max)) is not None:
            raise ValueError(refusal)
        return self

    @property
    def rollouts_per_step(self) -> int:
        """R = G * B."""
        return self.algorithm.group_size * self.algorithm.groups_per_step


class JobPatch(Section):
    """What PATCH /jobs/{id} may change; takes effect at the next seal."""

    staleness_max: int | None = Field(None, ge=0, le=64)
    publish_every: int | Literal["auto"] | None = None
    budget: BudgetConfig | None = None
