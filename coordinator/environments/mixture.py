"""Which prompt comes when: several sources mixed by weight, and stages of difficulty. Both make an endless train split of a finite one.

The index of a prompt is then the number of the group that carries it, and the decisions are pure (`domain.mixing`): each source, and each
stage, is gone through in fresh permutations, epoch by epoch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from coordinator.domain.mixing import Band, round_robin, shares, source_of, stage_of, within
from coordinator.domain.seeds import derive, prompt_index, shuffled
from coordinator.environments.base import Completion, Environment, EnvironmentBroken, PromptValue, Scores, check_index
from coordinator.environments.datasets import Rows


@dataclass(frozen=True, slots=True)
class Source:
    """One source of prompts."""

    label: str
    weight: float
    environment: Environment


class Mixture:
    """Prompts of several environments. Held-out prompts take turns, so that the first few hold something of every source."""

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        self._sources = tuple(sources)
        self._seed = seed
        try:
            self._counts = shares([source.weight for source in sources])
        except ValueError as error:
            raise EnvironmentBroken(f"environment.sources: {error}") from error
        self._order = lru_cache(maxsize=2 * len(self._sources))(_order)  # an epoch's order each, while they take turns
        self._held_out = [source.environment.size("eval") or 0 for source in sources]

    def size(self, split: str) -> int | None:
        return None if split == "train" else sum(self._held_out)

    def prompt(self, split: str, index: int) -> PromptValue:
        source, inner = self._place(split, index)
        return source.environment.prompt(split, inner)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        source, inner = self._place(split, index)
        scores = source.environment.score(split, inner, completions)
        rewards = [one.reward for one in scores.outcomes if one.reward is not None]
        if split == "eval" or not rewards:
            return scores
        return Scores(scores.outcomes, {**scores.metrics, f"source/{source.label}": sum(rewards) / len(rewards)}, scores.is_spent)

    @property
    def parts(self) -> list[Environment]:
        """The sources' environments."""
        return [source.environment for source in self._sources]

    def at(self, split: str, index: int) -> tuple[Environment, int]:
        """Which environment makes a prompt, and its index there."""
        source, inner = self._place(split, index)
        return source.environment, inner

    def _place(self, split: str, index: int) -> tuple[Source, int]:
        check_index(split, index, self.size(split))
        if split == "eval":
            place = round_robin(self._held_out, index)
            return self._sources[place.part], place.ordinal
        place = source_of(self._seed, index, self._counts)
        source = self._sources[place.part]
        size = source.environment.size("train")
        if size is None:
            return source, place.ordinal
        epoch, position = divmod(place.ordinal, size)
        return source, self._order(derive(self._seed, "source", place.part, epoch), size)[position]


def _order(seed: int, size: int) -> array[int]:
    return array("L", shuffled(seed, size))


class Curriculum:
    """Training prompts of one environment, stage by stage, each stage those rows whose difficulty lies in its band."""

    def __init__(self, environment: Environment, rows: Rows, bands: Sequence[Band], *, column: str, seed: int) -> None:
        self._environment = environment
        self._bands = tuple(bands)
        self._seed = seed
        difficulties = [_difficulty(rows, index, column) for index in range(len(rows))]
        self._members = [array("L", (n for n, value in enumerate(difficulties) if within(value, band))) for band in bands]
        for band, members in zip(bands, self._members, strict=True):
            if not members:
                raise EnvironmentBroken(
                    f"environment.curriculum: no row has a {column} from {band.low:g} to {band.high:g} "
                    f"(the rows have {min(difficulties):g} to {max(difficulties):g}): widen the band"
                )

    def size(self, split: str) -> int | None:
        return None if split == "train" else self._environment.size(split)

    def prompt(self, split: str, index: int) -> PromptValue:
        return self._environment.prompt(split, self._place(split, index))

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        return self._environment.score(split, self._place(split, index), completions)

    @property
    def parts(self) -> list[Environment]:
        """The one environment."""
        return [self._environment]

    def at(self, split: str, index: int) -> tuple[Environment, int]:
        """The environment, and the prompt's index there."""
        return self._environment, self._place(split, index)

    def _place(self, split: str, index: int) -> int:
        check_index(split, index, self.size(split))
        if split == "eval":
            return index
        place = stage_of(index, self._bands)
        members = self._members[place.part]
        return members[prompt_index(derive(self._seed, "stage", place.part), place.ordinal, len(members))]


def _difficulty(rows: Rows, index: int, column: str) -> float:
    row = rows.row(index)
    value = row.values.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EnvironmentBroken(
            f"{row.place}: column {column!r} holds {type(value).__name__}; environment.curriculum needs a number there "
            f"(columns: {', '.join(sorted(row.values))}; name another with environment.difficulty_column)"
        )
    return float(value)
