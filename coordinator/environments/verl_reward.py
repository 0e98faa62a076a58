"""`python:FILE:FUNCTION` with verl's signature: called once a completion.

    fn(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float, or dict with "score"; may be `async def`

The row's columns are verl's: `data_source`, `reward_model` with its `ground_truth`, `extra_info`; a row without `reward_model` gives its answer
column as ground truth, and one without `data_source` the split's name. Other numbers in the dict are metrics, averaged over the completions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from coordinator.environments.author_code import RewardFunction, call, failed, outcome, words_of
from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, Scores, bounded
from coordinator.environments.datasets import Row, RowPrompts, Rows

METRICS_LIMIT = 64
_OWN = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_verl(function: RewardFunction) -> bool:
    """Whether a function asks for verl's `solution_str`."""
    try:
        return "solution_str" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class VerlReward(RowPrompts):
    """Rows scored by a function of verl's shape, one completion at a time: one that raises fails alone."""

    def __init__(self, splits: Mapping[str, Rows], function: RewardFunction, *, file_name: str, answer_column: str) -> None:
        super().__init__(splits)
        self._function = function
        self._file_name = file_name
        self._answer_column = answer_column
        parameters = inspect.signature(function).parameters.values()
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = {one.name for one in parameters}
        unknown = [
            one.name for one in parameters if one.name not in _OWN and one.default is one.empty and one.kind not in _VARIADIC
        ]
        if unknown:
            raise EnvironmentBroken(
                f"the reward function has verl's solution_str and demands {unknown[0]!r} too; verl passes {', '.join(_OWN)}: "
                "rename it, or give it a default"
            )

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        row = self._splits[split].row(index)
        offered = {
            "data_source": row.values.get("data_source", split),
            "ground_truth": ground_truth(row, self._answer_column),
            "extra_info": row.values.get("extra_info"),
        }
        outcomes, logged, is_spent = [], dict[str, list[float]](), False
        for done in completions:
            one, spent = self._one({**offered, "solution_str": done.text}, logged)
            outcomes.append(one)
            is_spent = is_spent or spent
        return Scores(outcomes, {name: sum(values) / len(values) for name, values in logged.items()}, is_spent)

    def _one(self, offered: dict[str, Any], logged: dict[str, list[float]]) -> tuple[Outcome, bool]:
        wanted = {name: value for name, value in offered.items() if self._takes_any or name in self._names}
        try:
            result = call(self._function, wanted)
            if not isinstance(result, Mapping):
                return outcome(result), False
            return self._of_mapping(result, logged), False
        except BaseException as error:  # SystemExit too: whatever the author's code raises is an outcome
            return failed(words_of(error, self._file_name)), not isinstance(error, Exception) or isinstance(
                error, (MemoryError, RecursionError)
            )

    def _of_mapping(self, result: Mapping[str, Any], logged: dict[str, list[float]]) -> Outcome:
        if "score" not in result:
            names = bounded(", ".join(map(str, result)), 100)
            return failed(f"the reward function returned a dict without 'score' (it has: {names or 'nothing'})")
        extra = {str(name): value for name, value in result.items() if name != "score"}
        for name, value in extra.items():
            if isinstance(value, Real) and (name in logged or len(logged) < METRICS_LIMIT):
                logged.setdefault(bounded(name, 100), []).append(float(value))
        scored = outcome(result["score"])
        shown = "; ".join(f"{name}={bounded(str(value), 100)}" for name, value in extra.items())
        return Outcome(scored.kind, scored.reward, bounded("; ".join(part for part in (scored.detail, shown) if part)))


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def ground_truth(row: Row, answer_column: str) -> Any:
    """The row's `reward_model.ground_truth` (the column may hold JSON text), else the row's answer; None without either."""
    model = row.values.get("reward_model")
    if isinstance(model, str):
        try:
            model = json.loads(model)
        except ValueError:
            model = None
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return row.values.get(answer_column)
