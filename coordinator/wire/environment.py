"""The `[environment]` section of a job file: prompts, scoring, mixing, difficulty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coordinator.wire.turns import turns_refused

Value = bool | int | float | str | list[int] | list[float] | list[str]
TYPES = '"digit_sort", "countdown", "guess_number" (several turns), "math", "code", "dataset" (rows for `rewards` to score), "reasoning_gym:NAME", "verifiers:PACKAGE" or "python:FILE:FUNCTION"'
BUILT_IN = ("digit_sort", "countdown", "guess_number", "math", "code", "dataset")
PLAYED = ("guess_number",)
PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Section(BaseModel):
    """Base of every section: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RewardConfig(Section):
    """One of several rewards; the score is their weighted sum."""

    type: str = Field(description='"math", "python:FILE:FUNCTION", or environment.type for its own scorer')
    name: str | None = Field(
        None, pattern=NAME, description="of its metric, reward/logged/NAME; None: the function's, or the type's"
    )
    weight: float = Field(1.0, ge=-1e6, le=1e6, allow_inf_nan=False, description="0: a metric only")

    @property
    def label(self) -> str:
        """The metric's name."""
        return self.name or self.type.rpartition(":")[2]


class SourceConfig(Section):
    """One of several sources of training prompts."""

    name: str | None = Field(None, pattern=NAME, description="of its metric, reward/logged/source/NAME; None: its place, from 0 on")
    type: str | None = Field(None, description="None: environment.type")
    train: str | None = None
    eval: str | None = None
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="its share of the groups is weight / sum of the weights")
    options: dict[str, Value] = Field({}, description="reasoning_gym: parameters of the task")


class StageConfig(Section):
    """A band of difficulty, and until when it holds."""

    low: float = Field(0.0, allow_inf_nan=False)
    high: float = Field(1.0, allow_inf_nan=False)
    until_group: int | None = Field(
        None, ge=1, description="the first group number of the next stage (with sources: of its source's own); None: the last stage"
    )


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that a job names, the field that does, and for a dataset the type that its rows are for."""

    field: str
    name: str
    kind: Literal["dataset", "code"]
    type: str = ""


class EnvironmentConfig(Section):
    """What the job trains on: prompts and scoring."""

    type: str = Field(description=TYPES)
    train: str | None = Field(None, description="JSONL or Parquet file; None for procedural environments, and with `sources`")
    eval: str | None = Field(None, description="held-out file; None: a held-out split of a procedural one, else no evaluation")
    options: dict[str, Value] = Field({}, description="reasoning_gym, verifiers: parameters of the task")
    rewards: tuple[RewardConfig, ...] = Field((), max_length=32, description="several weighted rewards instead of the type's own")
    sources: tuple[SourceConfig, ...] = Field((), max_length=64, description="several sources of prompts, mixed by weight")
    difficulty_column: str = Field("pass_rate", description="column that `curriculum` looks at")
    curriculum: tuple[StageConfig, ...] = Field((), max_length=64, description="bands of difficulty, one after the other")
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    system_prompt: str | None = None
    use_chat_template: bool = Field(False, description="wrap text prompts as one user message of the tokenizer's template")
    grade_timeout_s: float = Field(15.0, gt=0, le=3600)
    grade_whole_groups: bool = Field(False, description="score a group once all its completions are there, all in one call")
    max_turns: int = Field(
        1, ge=1, le=256, description="the most turns of a rollout; above 1: for environments that answer the model"
    )
    turn_tokens: int | None = Field(
        None, ge=1, le=131072, description="the most tokens of one turn; None: what is left of sampling.max_new_tokens"
    )
    tool_parser: Literal["hermes", "none"] = Field(
        "hermes",
        description='how the model writes a tool call; hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen does',
    )

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentConfig:
        for problem in (self._wrong_rewards(), self._wrong_sources(), self._wrong_curriculum(), self._wrong_turns()):
            if problem is not None:
                raise ValueError(problem)
        return self

    def _wrong_rewards(self) -> str | None:
        labels = [reward.label for reward in self.rewards]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            return f"environment.rewards has two entries named {twice!r}: give each a name of its own"
        if self.rewards and not any(reward.weight for reward in self.rewards):
            return "environment.rewards: every weight is 0, so nothing would be learned: give one a weight"
        if self.type == "dataset" and not self.rewards:
            return "environment.type 'dataset' scores nothing by itself: list environment.rewards"
        return None

    def _wrong_sources(self) -> str | None:
        if self.sources and (self.train is not None or self.eval is not None):
            return "environment.train and environment.eval must be absent with environment.sources: name the files there"
        names = [source.name for source in self.sources if source.name is not None]
        twice = next((name for name in names if names.count(name) > 1), None)
        return None if twice is None else f"environment.sources has two entries named {twice!r}: give each a name of its own"

    def _wrong_curriculum(self) -> str | None:
        ends = [stage.until_group for stage in self.curriculum]
        if ends and ends[-1] is not None:
            return f"environment.curriculum: the last stage ends at group {ends[-1]}: leave its until_group out"
        known = [end for end in ends if end is not None]
        if len(known) < len(ends) - 1 or known != sorted(set(known)):
            return "environment.curriculum: until_group must rise from stage to stage, and only the last may lack it"
        return next(
            (f"environment.curriculum: low {s.low} is above high {s.high}" for s in self.curriculum if s.low > s.high), None
        )

    def _wrong_turns(self) -> str | None:
        if self.max_turns == 1:
            if self.turn_tokens is not None:
                return "environment.turn_tokens bounds a turn of several: set environment.max_turns too, or remove it"
            return None
        if self.rewards:
            return "environment.rewards score one completion, and with environment.max_turns an environment scores its rollouts itself: remove one"
        if self.grade_whole_groups:
            return "environment.grade_whole_groups looks at single completions: remove it, or environment.max_turns"
        return None

    def files(self) -> Iterator[NamedFile]:
        """Every file that the section names, with the field."""
        for field, name in (("train", self.train), ("eval", self.eval)):
            if name is not None:
                yield NamedFile(f"environment.{field}", name, "dataset", self.type)
        for place, source in enumerate(self.sources):
            for field, name in (("train", source.train), ("eval", source.eval)):
                if name is not None:
                    yield NamedFile(f"environment.sources.{place}.{field}", name, "dataset", source.type or self.type)
        for field, kind in self.types():
            code = code_of(kind)
            if code is not None:
                yield NamedFile(field, code, "code")

    def turns_refused(self) -> str | None:
        """Why the types cannot run with so many turns; None: they can, or only their code can tell."""
        kinds = [source.type or self.type for source in self.sources] or [self.type]
        takes = [takes_turns(kind) for kind in kinds]
        if True in takes:
            return turns_refused(kinds[takes.index(True)], plays=True, max_turns=self.max_turns)
        return None if None in takes else turns_refused(self.type, plays=False, max_turns=self.max_turns)

    def types(self) -> Iterator[tuple[str, str]]:
        """Every environment type that the section names: (field, type)."""
        yield "environment.type", self.type
        for place, reward in enumerate(self.rewards):
            yield f"environment.rewards.{place}.type", reward.type
        for place, source in enumerate(self.sources):
            if source.type is not None:
                yield f"environment.sources.{place}.type", source.type


def takes_turns(kind: str) -> bool | None:
    """Whether an environment of that type is played in turns; None: only its code can tell."""
    if kind.startswith(("python:", "verifiers:")):
        return None
    return kind in PLAYED


def code_of(kind: str) -> str | None:
    """FILE of `python:FILE:FUNCTION`; None for any other type."""
    prefix, _, rest = kind.partition(":")
    return rest.rpartition(":")[0] if prefix == "python" else None


def is_known(kind: str) -> bool:
    """Whether a type is written as one that exists; whether its file or task exists is another question."""
    prefix, _, rest = kind.partition(":")
    if prefix == "python":
        name, _, function = rest.rpartition(":")
        return bool(name) and function.isidentifier()
    if prefix == "verifiers":
        return PACKAGE.fullmatch(rest) is not None
    return kind in BUILT_IN or (prefix == "reasoning_gym" and rest.isidentifier())
