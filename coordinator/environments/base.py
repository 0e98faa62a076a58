"""What a data plane environment is: prompts per (split, index), and scores for completions of one prompt.

No framework types, and nothing here does I/O: environments run inside a jailed process and are asked one thing at a time.
Outcomes are law: an exception, a time-out or a crash is an outcome of its own and never a score of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from coordinator.domain.mixing import Band
from coordinator.service.ports import EnvironmentBroken

__all__ = [
    "Completion",
    "Environment",
    "EnvironmentBroken",
    "EnvironmentSpec",
    "Message",
    "Outcome",
    "PromptValue",
    "RewardSpec",
    "Scores",
    "SourceSpec",
    "bounded",
    "check_index",
    "is_trainable",
    "scored",
    "spec_from",
    "storable",
]

SPLITS = ("train", "eval")
DETAIL_LIMIT_CHARS = 500
LARGEST_REWARD = 1e30  # batches carry float32, which ends at 3.4e38

Message = Mapping[str, Any]
PromptValue = str | list[Message]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Score of one completion. `kind` is scored | unscored | failed | timeout; `reward` is set only if scored."""

    kind: str
    reward: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Scores:
    """Outcomes of the completions of one prompt, in order.

    `is_spent` asks for a fresh process: what ran may have left this one unfit (memory, exit, recursion).
    """

    outcomes: list[Outcome]
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_spent: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated sequence: the token ids as sampled and their text without special tokens."""

    token_ids: Sequence[int]
    text: str


class Environment(Protocol):
    """One kind of task. Sizes are None for endless splits, 0 for a split that does not exist."""

    def size(self, split: str) -> int | None: ...

    def prompt(self, split: str, index: int) -> PromptValue:
        """The prompt as text, or as chat messages. Raises IndexError outside the split."""
        ...

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        """Outcomes of completions of that prompt, in order; what goes wrong inside is an outcome, not an exception."""
        ...


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One of several rewards. `label` names its metric."""

    type: str
    label: str
    weight: float


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One of several sources of prompts. Paths are absolute."""

    type: str
    label: str
    weight: float
    train: str | None = None
    eval: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """All that a child needs to build its environment; travels as plain JSON. Paths are absolute.

    `codes` maps FILE of each `python:FILE:FUNCTION` to its path; `code` is the path where there is only one.
    """

    type: str
    seed: int
    tokenizer_dir: str
    train: str | None = None
    eval: str | None = None
    code: str | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    system_prompt: str | None = None
    use_chat_template: bool = False
    codes: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rewards: Sequence[RewardSpec] = ()
    sources: Sequence[SourceSpec] = ()
    difficulty_column: str = "pass_rate"
    bands: Sequence[Band] = ()
    grade_timeout_s: float = 15.0
    max_turns: int = 1
    new_tokens: int = 1024  # after the prompt, in all turns
    tool_parser: str = "hermes"
    dated: float | None = None  # the moment whose date chat templates write; None: now

    @property
    def runs_author_code(self) -> bool:
        """Whether loading the environment executes a file that the job's author brought."""
        types = [self.type, *(reward.type for reward in self.rewards), *(source.type for source in self.sources)]
        return any(kind.startswith("python:") for kind in types)

    @property
    def runs_programs(self) -> bool:
        """Whether completions are programs, which are run."""
        return "code" in (self.type, *(source.type for source in self.sources))

    def readable(self) -> list[str]:
        """Every path that the child must read."""
        paths = [self.tokenizer_dir, self.train, self.eval, self.code, *self.codes.values()]
        paths += [path for source in self.sources for path in (source.train, source.eval)]
        return [path for path in paths if path]

    def to_json(self) -> dict[str, object]:
        """A JSON object with the fields' names."""
        return asdict(self)


def spec_from(values: Mapping[str, Any]) -> EnvironmentSpec:
    """The spec that `to_json` wrote. Raises TypeError on unknown fields."""
    nested = {
        "rewards": tuple(RewardSpec(**one) for one in values.get("rewards", ())),
        "sources": tuple(SourceSpec(**one) for one in values.get("sources", ())),
        "bands": tuple(Band(**one) for one in values.get("bands", ())),
    }
    return EnvironmentSpec(**{**values, **nested})


def is_trainable(reward: float) -> bool:
    """Whether a reward survives the way to the learner: finite, also in float32."""
    return math.isfinite(reward) and abs(reward) <= LARGEST_REWARD


def scored(reward: float) -> Outcome:
    """A score; what is not finite is `failed`, as training on it would poison the group."""
    if not is_trainable(reward):
        words = f"the reward is {reward}; return a number of at most {LARGEST_REWARD:g}, or None for 'does not apply'"
        return Outcome("failed", None, words)
    return Outcome("scored", float(reward))


def bounded(words: str, limit: int = DETAIL_LIMIT_CHARS) -> str:
    """Words of at most `limit` characters, cut in the middle so that both ends stay readable."""
    if len(words) <= limit:
        return words
    half = (limit - 5) // 2
    return f"{words[:half]} ... {words[-half:]}"


def storable(text: object) -> str:
    """Text that UTF-8 and every database can hold: no lone surrogates, no NUL. Raises TypeError for what is no text."""
    if not isinstance(text, str):
        raise TypeError(f"text is {type(text).__name__}")
    return text.encode("utf-8", "replace").decode().replace("\x00", "�")


def check_index(split: str, index: int, size: int | None) -> None:
    """Raise IndexError in words when `index` is outside a split of `size` prompts."""
    if index < 0 or (size is not None and index >= size):
        raise IndexError(
            f"prompt {index} of split {split!r} does not exist: the split holds {size if size is not None else 'endless'} prompts"
        )
