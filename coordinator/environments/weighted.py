"""Several rewards for the same prompts: their weighted sum, and each one's mean as a metric.

A part that does not apply (None) is left out of a completion's sum; one that failed or ran out of time makes the sum unknown, so the
completion has that outcome. Weight 0 is a metric alone: its failures change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.environments.base import Completion, Environment, Outcome, PromptValue, Scores, bounded, scored


@dataclass(frozen=True, slots=True)
class Part:
    """One reward."""

    label: str
    weight: float
    environment: Environment


class Weighted:
    """Prompts of one environment, scored by several. All have the same splits."""

    def __init__(self, prompts: Environment, parts: Sequence[Part]) -> None:
        self._prompts = prompts
        self._parts = tuple(parts)

    def size(self, split: str) -> int | None:
        return self._prompts.size(split)

    def prompt(self, split: str, index: int) -> PromptValue:
        return self._prompts.prompt(split, index)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        scores = [part.environment.score(split, index, completions) for part in self._parts]
        metrics: dict[str, float] = {}
        for part, score in zip(self._parts, scores, strict=True):
            metrics |= score.metrics
            rewards = [one.reward for one in score.outcomes if one.reward is not None]
            if rewards:
                metrics[part.label] = sum(rewards) / len(rewards)
        columns = zip(*(score.outcomes for score in scores), strict=True)
        outcomes = [summed(self._parts, column) for column in columns]
        return Scores(outcomes, metrics, any(score.is_spent for score in scores))


def summed(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Outcome:
    """One completion's outcomes under every part as one."""
    pairs = list(zip(parts, outcomes, strict=True))
    lost = next(((part, one) for part, one in pairs if part.weight and one.kind in ("timeout", "failed")), None)
    if lost is not None:
        return Outcome(lost[1].kind, None, bounded(f"{lost[0].label}: {lost[1].detail}"))
    shown = bounded("; ".join(_shown(part, one) for part, one in pairs))
    applied = [part.weight * one.reward for part, one in pairs if part.weight and one.reward is not None]
    if not applied:
        return Outcome("unscored", None, shown)
    total = scored(sum(applied))
    return Outcome(total.kind, total.reward, total.detail or shown)


def _shown(part: Part, one: Outcome) -> str:
    value = one.kind if one.reward is None else f"{one.reward:g}"
    return f"{part.label}={value}" + (f" ({one.detail})" if one.detail else "")
