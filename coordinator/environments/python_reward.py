"""`python:FILE:FUNCTION`: the job author's reward function, called the way TRL calls one.

    fn(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, environments=, **columns)
        -> list of float or None, one per completion; may be `async def`

All are keywords, and a function gets only those it names (all, if it takes `**kwargs`). Lists have one entry per
completion; each further dataset column comes as such a list under its own name. Prompts and completions are message lists
when the dataset's prompt is one, else text. `trainer_state` and `environments` are None here. None as a reward means "does not
apply". Author code loads and runs in a jailed process only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.environments.author_code import RewardFunction, call, outcome, words_of
from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, PromptValue, Scores, bounded
from coordinator.environments.datasets import RowPrompts, Rows

METRICS_LIMIT = 64
_FRAMEWORK = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_PER_COMPLETION = ("prompt", "completion", "completion_ids")


class PythonReward(RowPrompts):
    """Dataset rows scored by a function of the author's."""

    def __init__(self, splits: Mapping[str, Rows], function: RewardFunction, *, file_name: str) -> None:
        super().__init__(splits)
        self._function = function
        self._file_name = file_name
        try:
            self._accepted = _accepted(function)
        except (TypeError, ValueError) as error:
            raise EnvironmentBroken(
                f"the reward function has no signature to read ({error}): name a plain Python function"
            ) from error
        for dataset in splits.values():
            _check_parameters(function, dataset.columns)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        dataset = self._splits[split]
        journal = _Journal(len(completions))
        columns = dict.fromkeys(dataset.columns) | dataset.row(index).values  # one that a row lacks is None, as in TRL's datasets
        offered = _arguments(columns, dataset.prompt(index), completions)
        offered |= {"log_extra": journal.log_extra, "log_metric": journal.log_metric}
        wanted = offered if self._accepted is None else {name: offered[name] for name in self._accepted if name in offered}
        try:
            rewards = journal.annotate(_outcomes(call(self._function, wanted), len(completions)))
        except BaseException as error:  # SystemExit too: whatever the author's code raises is an outcome
            words = words_of(error, self._file_name)
            is_spent = not isinstance(error, Exception) or isinstance(error, (MemoryError, RecursionError))
            return Scores([Outcome("failed", None, words) for _ in completions], {}, is_spent)
        return Scores(rewards, journal.metrics())


def _arguments(columns: Mapping[str, Any], prompt: PromptValue, completions: Sequence[Completion]) -> dict[str, Any]:
    """Everything a TRL reward function may ask for, one list entry per completion; the framework's names win over columns."""
    count = len(completions)
    texts: list[Any] = [done.text for done in completions]
    if not isinstance(prompt, str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    offered: dict[str, Any] = {name: [value] * count for name, value in columns.items() if name not in _PER_COMPLETION}
    return offered | {
        "prompts": [prompt] * count,
        "completions": texts,
        "completion_ids": [list(done.token_ids) for done in completions],
        "trainer_state": None,
        "environments": None,
    }


def _accepted(function: RewardFunction) -> tuple[str, ...] | None:
    """Names the function takes as keywords; None when it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in keyword)


def _check_parameters(function: RewardFunction, columns: Sequence[str]) -> None:
    """Raise EnvironmentBroken when the function demands what nobody will pass."""
    known = {*_FRAMEWORK, *(name for name in columns if name not in _PER_COMPLETION)}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in variadic or parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in known:
            raise EnvironmentBroken(
                f"the reward function demands {parameter.name!r}, which is neither one of TRL's keywords ({', '.join(_FRAMEWORK)}) "
                f"nor a column of the dataset ({', '.join(columns)}): rename it, add the column, or give it a default"
            )


def _outcomes(rewards: Any, count: int) -> list[Outcome]:
    """Rewards as outcomes. Raises TypeError or ValueError in words when the list is not what TRL asks for."""
    if isinstance(rewards, (str, bytes, Mapping)) or not hasattr(rewards, "__len__") or not hasattr(rewards, "__iter__"):
        raise TypeError(f"the reward function returned {type(rewards).__name__}; return a list of {count} floats or None")
    if len(rewards) != count:
        raise ValueError(f"the reward function returned {len(rewards)} rewards for {count} completions; return one for each")
    return [outcome(reward) for reward in rewards]


class _Journal:
    """What a function logs about its own work: extra words per completion, and scalar metrics (their mean)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """One value per completion, shown beside it."""
        if len(values) != self._count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self._count} completions; give one for each")
        if len(self._extra) < METRICS_LIMIT:
            self._extra[str(column)] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """A scalar, averaged over its calls."""
        if name in self._metrics or len(self._metrics) < METRICS_LIMIT:
            self._metrics.setdefault(str(name), []).append(float(value))

    def annotate(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Outcomes with the extra words as their detail; a failure's own words come first."""
        return [Outcome(one.kind, one.reward, self._detail(one, place)) for place, one in enumerate(outcomes)]

    def _detail(self, outcome: Outcome, place: int) -> str:
        extra = [f"{column}={bounded(str(values[place]), 100)}" for column, values in self._extra.items()]
        return bounded("; ".join([outcome.detail, *extra] if outcome.detail else extra))

    def metrics(self) -> dict[str, float]:
        return {bounded(name, 100): sum(values) / len(values) for name, values in self._metrics.items()}
