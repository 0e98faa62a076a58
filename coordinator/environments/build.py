"""From a spec to an environment. The word before the first colon of `environment.type` decides."""

from __future__ import annotations

from pathlib import Path

from coordinator.environments.base import Environment, EnvironmentBroken, EnvironmentSpec
from coordinator.environments.datasets import Dataset, Row, RowCheck
from coordinator.environments.digit_sort import DigitSort
from coordinator.environments.math import Math, reference_number
from coordinator.environments.python_reward import PythonReward, load_function


def build_environment(spec: EnvironmentSpec) -> Environment:
    """The environment of a job. Raises EnvironmentBroken naming the field and the fix. May execute author code."""
    if spec.runs_author_code:
        return _python(spec)
    if spec.type == "digit_sort":
        if spec.train or spec.eval:
            raise EnvironmentBroken(
                "environment.train and environment.eval must be absent for 'digit_sort': it makes its own problems"
            )
        return DigitSort(spec.seed)
    if spec.type == "math":
        return Math(_splits(spec, lambda row: _check_answer(spec, row)), answer_column=spec.answer_column)
    raise EnvironmentBroken(f"environment.type is {spec.type!r}; it must be 'digit_sort', 'math' or 'python:FILE:FUNCTION'")


def _python(spec: EnvironmentSpec) -> Environment:
    _, _, rest = spec.type.partition(":")
    file_name, _, function = rest.rpartition(":")
    if not file_name or not function.isidentifier():
        raise EnvironmentBroken(
            f"environment.type is {spec.type!r}; it must read python:FILE:FUNCTION, as in python:rewards.py:accuracy"
        )
    if spec.code is None:
        raise EnvironmentBroken(f"environment.type names {file_name!r}, which was not uploaded: upload it with the job")
    splits = _splits(spec, None)
    code = Path(spec.code)
    return PythonReward(splits, load_function(code, function), file_name=code.name)


def _splits(spec: EnvironmentSpec, check: RowCheck | None) -> dict[str, Dataset]:
    if spec.train is None:
        raise EnvironmentBroken(f"environment.train is absent; {spec.type.partition(':')[0]!r} needs a JSONL or Parquet file")
    files = {"train": spec.train} | ({"eval": spec.eval} if spec.eval else {})
    return {split: Dataset(Path(path), prompt_column=spec.prompt_column, check=check) for split, path in files.items()}


def _check_answer(spec: EnvironmentSpec, row: Row) -> None:
    reference_number(row, spec.answer_column)
