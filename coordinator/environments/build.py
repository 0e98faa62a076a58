"""From a spec to an environment. The word before the first colon of a type decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.environments.author_code import load_function
from coordinator.environments.base import Environment, EnvironmentBroken, EnvironmentSpec, PromptValue
from coordinator.environments.code_tasks import Code
from coordinator.environments.countdown import Countdown
from coordinator.environments.datasets import Dataset, Row, RowPrompts, Rows
from coordinator.environments.digit_sort import DigitSort
from coordinator.environments.guess_number import GuessNumber
from coordinator.environments.math import Math
from coordinator.environments.mixture import Curriculum, Mixture, Source
from coordinator.environments.python_reward import PythonReward
from coordinator.environments.python_rollout import PythonRollout, is_rollout
from coordinator.environments.reasoning_gym_tasks import ReasoningGym
from coordinator.environments.row_checks import row_check
from coordinator.environments.verifiers_rollouts import VerifiersRollouts
from coordinator.environments.verifiers_tasks import Verifiers
from coordinator.environments.verl_reward import VerlReward, is_verl
from coordinator.environments.weighted import Part, Weighted

KINDS = "'digit_sort', 'countdown', 'guess_number', 'math', 'code', 'dataset', 'reasoning_gym:NAME', 'verifiers:PACKAGE' or 'python:FILE:FUNCTION'"
OWN_TASKS: Mapping[str, Callable[[int], Environment]] = {
    "digit_sort": DigitSort,
    "countdown": Countdown,
    "guess_number": GuessNumber,
}  # made by the seed alone
Splits = Mapping[str, Rows]


def build_environment(spec: EnvironmentSpec) -> Environment:
    """The environment of a job. Raises EnvironmentBroken naming the field and the fix. May execute author code."""
    if not spec.sources:
        return _single(spec)
    parts = []
    for source in spec.sources:
        own = replace(spec, type=source.type, train=source.train, eval=source.eval, options=source.options, sources=())
        try:
            parts.append(Source(source.label, source.weight, _single(own)))
        except EnvironmentBroken as error:
            raise EnvironmentBroken(f"environment.sources, {source.label}: {error}") from error
    return Mixture(parts, seed=spec.seed)


def _single(spec: EnvironmentSpec) -> Environment:
    """One source: its rows or problems, what scores them, and their order."""
    for kind in (spec.type, *(reward.type for reward in spec.rewards)):
        _check_known(kind)
        _check_uploaded(spec, kind)
    splits, prompts = _prompts(spec)
    environment = _rewarded(spec, splits, prompts)
    if not spec.bands:
        return environment
    if not isinstance(splits["train"], Dataset):
        raise EnvironmentBroken(f"environment.curriculum needs rows with a difficulty; {spec.type!r} makes its own problems")
    return Curriculum(environment, splits["train"], spec.bands, column=spec.difficulty_column, seed=spec.seed)


def _prompts(spec: EnvironmentSpec) -> tuple[Splits, Environment]:
    """The rows to be scored, and the environment that the type names."""
    procedural = _procedural(spec)
    if procedural is not None:
        if spec.train or spec.eval:
            raise EnvironmentBroken(
                f"environment.train and environment.eval must be absent for {spec.type!r}: it makes its own problems"
            )
        return {split: _Problems(procedural, split) for split in ("train", "eval")}, procedural
    if spec.options:
        raise EnvironmentBroken(f"environment.options is set, and {spec.type!r} takes none: remove it")
    kinds = [reward.type for reward in spec.rewards] or [spec.type]
    if "code" in (spec.type, *kinds) and spec.rewards:
        raise EnvironmentBroken("environment.type 'code' scores by its tests alone: remove environment.rewards")
    splits = _datasets(spec, kinds)
    return splits, RowPrompts(splits) if spec.rewards or spec.type == "dataset" else _scorer(spec, spec.type, splits)


def _procedural(spec: EnvironmentSpec) -> Environment | None:
    kind, _, name = spec.type.partition(":")
    if spec.type in OWN_TASKS and not spec.options:
        return OWN_TASKS[spec.type](spec.seed)
    if kind == "reasoning_gym":
        return ReasoningGym(name, seed=spec.seed, options=spec.options, limit_s=spec.grade_timeout_s)
    if kind == "verifiers" and spec.max_turns > 1:
        return VerifiersRollouts(name, options=spec.options)
    if kind == "verifiers":
        return Verifiers(name, options=spec.options, limit_s=spec.grade_timeout_s)
    return None


def _rewarded(spec: EnvironmentSpec, splits: Splits, prompts: Environment) -> Environment:
    if not spec.rewards:
        if spec.type == "dataset":
            raise EnvironmentBroken("environment.type 'dataset' scores nothing by itself: list environment.rewards")
        return prompts
    parts = [
        Part(reward.label, reward.weight, prompts if _is_own(spec, reward.type) else _scorer(spec, reward.type, splits))
        for reward in spec.rewards
    ]
    return Weighted(prompts, parts)


def _is_own(spec: EnvironmentSpec, kind: str) -> bool:
    """Whether a reward is the scorer of a procedural environment itself."""
    return kind == spec.type and _makes_problems(kind)


def _makes_problems(kind: str) -> bool:
    return kind in OWN_TASKS or kind.startswith(("reasoning_gym:", "verifiers:"))


def _scorer(spec: EnvironmentSpec, kind: str, splits: Splits) -> Environment:
    """What scores rows."""
    if kind == "code":
        return Code(splits)
    if kind == "math":
        return Math(splits, answer_column=spec.answer_column, limit_s=spec.grade_timeout_s)
    if not kind.startswith("python:"):
        raise EnvironmentBroken(f"a reward of type {kind!r} scores its own problems only: set environment.type to it")
    return _python(spec, kind, splits)


def _check_known(kind: str) -> None:
    if kind in ("math", "code", "dataset") or _makes_problems(kind):
        return
    prefix, _, rest = kind.partition(":")
    if prefix != "python":
        raise EnvironmentBroken(f"environment.type is {kind!r}; it must be {KINDS}")
    file_name, _, function = rest.rpartition(":")
    if not file_name or not function.isidentifier():
        raise EnvironmentBroken(
            f"environment.type is {kind!r}; it must read python:FILE:FUNCTION, as in python:rewards.py:accuracy"
        )


def _check_uploaded(spec: EnvironmentSpec, kind: str) -> None:
    prefix, _, rest = kind.partition(":")
    file_name = rest.rpartition(":")[0]
    if prefix == "python" and spec.codes.get(file_name, spec.code) is None:
        raise EnvironmentBroken(f"environment.type names {file_name!r}, which was not uploaded: upload it with the job")


def _python(spec: EnvironmentSpec, kind: str, splits: Splits) -> Environment:
    file_name, _, function = kind.partition(":")[2].rpartition(":")
    code = Path(spec.codes.get(file_name, spec.code or ""))
    loaded = load_function(code, function)
    if is_rollout(loaded):
        if kind != spec.type:
            raise EnvironmentBroken(f"environment.rewards names {kind!r}, which plays whole rollouts: set environment.type to it")
        return PythonRollout(splits, loaded, file_name=code.name)
    if is_verl(loaded):
        return VerlReward(splits, loaded, file_name=code.name, answer_column=spec.answer_column)
    return PythonReward(splits, loaded, file_name=code.name)


def _datasets(spec: EnvironmentSpec, kinds: Sequence[str]) -> dict[str, Dataset]:
    if spec.train is None:
        raise EnvironmentBroken(f"environment.train is absent; {spec.type.partition(':')[0]!r} needs a JSONL or Parquet file")
    files = {"train": spec.train} | ({"eval": spec.eval} if spec.eval else {})
    check = row_check(kinds, answer_column=spec.answer_column)
    return {split: Dataset(Path(path), prompt_column=spec.prompt_column, check=check) for split, path in files.items()}


class _Problems:
    """The problems of a procedural environment as rows, for further rewards: they have a prompt and no columns."""

    columns: tuple[str, ...] = ()

    def __init__(self, environment: Environment, split: str) -> None:
        self._environment = environment
        self._split = split

    def __len__(self) -> int:
        return self._environment.size(self._split) or 0

    def row(self, index: int) -> Row:
        return Row(f"problem {index}", {})

    def prompt(self, index: int) -> PromptValue:
        return self._environment.prompt(self._split, index)
