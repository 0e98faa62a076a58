"""The job file: one typed tree, parsed once; an unknown key is an error that names it.

The same model validates a TOML file, a REST body and a PATCH. Paths in it are names: they resolve to an upload
(`upload:DIGEST`) or inside the operator's listed roots, never anywhere else.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvironmentConfig(Section):
    """What the job trains on: prompts and scoring."""

    type: str = Field(description='"digit_sort", "math", or "python:FILE:FUNCTION"')
    train: str | None = Field(None, description="JSONL or Parquet file; None for procedural environments")
    eval: str | None = Field(None, description="held-out file; None: a held-out split of a procedural one, else no evaluation")
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    system_prompt: str | None = None
    use_chat_template: bool = Field(False, description="wrap text prompts as one user message of the tokenizer's template")
    grade_timeout_s: float = Field(15.0, gt=0, le=3600)


class AlgorithmConfig(Section):
    """One optimiser step: group shape, loss and optimiser."""

    loss: Literal["dppo", "ppo_clip"] = "dppo"
    group_size: int = Field(16, ge=2, le=1024, description="G, rollouts per group")
    groups_per_step: int = Field(16, ge=1, le=4096, description="B, groups per step")
    learning_rate: float = Field(1e-6, gt=0, lt=1)
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    advantage: Literal["mean", "group_std"] = Field("mean", description="reward minus group mean, or that over the group's std")
    tv_low: float = Field(0.2, gt=0, le=1, description="dppo: mask where p - mu < -tv_low and the advantage is negative")
    tv_high: float = Field(0.2, gt=0, le=1, description="dppo: mask where p - mu > tv_high and the advantage is positive")
    drift_penalty: float = Field(1e-3, ge=0, description="dppo: weight of the squared log-ratio to the sampler")
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(2.0, gt=1, description="ppo_clip: bound on the ratio for negative advantages")
    ratio_cap: float = Field(2.0, gt=1, description="dppo: cap on the token ratio used as a weight")
    truncated: Literal["mask", "keep"] = Field("mask", description="completions that hit the cap: out of the loss, or in it")
    max_replacements: int | None = Field(None, ge=0, description="zero-variance groups replaced per step; None: B")
    no_signal_limit: int = Field(5, ge=1, description="pause after this many no_signal batches in a row")
    min_group: int | None = Field(
        None, ge=2, description="close a group short with this many scores once nothing of it is under way; None: only whole"
    )
    micro_batch_tokens: int = Field(16384, ge=64)


class StalenessConfig(Section):
    """The user's dial."""

    max: int = Field(4, ge=0, le=64, description="S, in learner updates")
    publish_every: int | Literal["auto"] = Field("auto", description="kappa, in learner updates")
    on_update: Literal["keep", "abort"] = "keep"


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
    staleness: StalenessConfig = StalenessConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    workers: WorkersConfig = WorkersConfig()
    budget: BudgetConfig

    @model_validator(mode="after")
    def _consistent(self) -> JobConfig:
        group = self.algorithm.group_size
        minimum = self.algorithm.min_group
        if minimum is not None and minimum > group:
            raise ValueError(f"algorithm.min_group is {minimum}, above algorithm.group_size {group}: lower it")
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
