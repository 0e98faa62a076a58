"""`reasoning_gym:NAME`: a procedural task of the reasoning-gym package (https://github.com/open-thought/reasoning-gym), scored by its own scorer.

The train split is endless. Problem `index` of a split is item `index % CHUNK` of a dataset seeded from the job's seed, the split and
`index // CHUNK`, so it is the same in every process and after a restart. The answer of a completion stands in its last `<answer>` tag, else in its
last box, else after `####`; without any of these it is the whole completion.

Some scorers evaluate the answer as Python. A model wrote it, and code run in the scorer could forge the scores that follow, so here their
`eval` reads literals only, and those that hand it to sympy's parser get plain expressions only.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from coordinator.domain.seeds import derive
from coordinator.environments.alarm import OutOfTime, time_limit
from coordinator.environments.answers import answer_of
from coordinator.environments.author_code import failed
from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, Scores, check_index, scored

CHUNK = 100  # some tasks make all their items at once
EVAL_PROMPTS = 1024
SHARE_OF_LIMIT = 0.8
_PLAIN_CHARACTERS = re.compile(r"[A-Za-z0-9\s+\-*/^().,|]*")
_PLAIN_NAMES = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "ln",
        "sqrt",
        "pi",
        "Abs",
    )
)
INSTALL = "pip install 'echo2[reasoning-gym]'"


class ReasoningGym:
    """One task. `limit_s` bounds the grading of one prompt's completions together, wall-clock."""

    def __init__(self, name: str, *, seed: int, options: Mapping[str, Any], limit_s: float) -> None:
        self._name = name
        self._seed = seed
        self._options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        self._limit_s = limit_s
        self._gym = _package()
        _check_name(name)
        self._parses_answers = _disarm(_registry()[name][0])
        self._chunk = lru_cache(maxsize=8)(self._make_chunk)
        self._entry("train", 0)

    def size(self, split: str) -> int | None:
        return None if split == "train" else EVAL_PROMPTS

    def prompt(self, split: str, index: int) -> str:
        check_index(split, index, self.size(split))
        return str(self._entry(split, index)["question"])

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        check_index(split, index, self.size(split))
        entry, dataset = self._entry(split, index), self._chunk(split, index // CHUNK)
        each_s = SHARE_OF_LIMIT * self._limit_s / max(1, len(completions))
        outcomes = [self._outcome(dataset, entry, self.answer(done.text), each_s) for done in completions]
        return Scores(outcomes, {}, any(one.kind == "timeout" for one in outcomes))

    def answer(self, text: str) -> str:
        """What the task's scorer is asked about."""
        tagged = self._gym.utils.extract_answer(text)
        if tagged is not None:
            return str(tagged)
        found = answer_of(text)
        return found.text if found.is_marked else text.strip()

    def _entry(self, split: str, index: int) -> dict[str, Any]:
        """The problem: question, answer, metadata. Raises EnvironmentBroken in words when the task cannot make it."""
        random.seed(derive(self._seed, "item", split, index))  # a task that asks the global generator gets the same too
        try:
            return dict(self._chunk(split, index // CHUNK)[index % CHUNK])
        except EnvironmentBroken:
            raise
        except Exception as error:
            raise EnvironmentBroken(
                f"reasoning_gym:{self._name} could not make problem {index}: {type(error).__name__}: {error}"
            ) from error

    def _outcome(self, dataset: Any, entry: dict[str, Any], answer: str, limit_s: float) -> Outcome:
        if self._parses_answers and not is_plain_expression(answer):
            return Outcome("scored", 0.0, "the answer is no plain expression")
        try:
            with time_limit(limit_s):
                return scored(float(dataset.score_answer(answer, entry)))
        except OutOfTime as late:
            return Outcome("timeout", None, f"the task's scorer: {late} (a share of environment.grade_timeout_s)")
        except Exception as error:
            return failed(f"the task's scorer: {type(error).__name__}: {error}")

    def _make_chunk(self, split: str, chunk: int) -> Any:
        seed = derive(self._seed, "reasoning_gym", self._name, split, chunk) % 2**31  # numpy's seeds end at 2**32
        random.seed(seed)
        try:
            return self._gym.create_dataset(self._name, seed=seed, size=CHUNK, **self._options)
        except Exception as error:  # the task's own checks, or what it trips over without any
            raise EnvironmentBroken(
                f"environment.options {self._options} do not suit reasoning_gym:{self._name}: {type(error).__name__}: {error} "
                f"(its parameters: {', '.join(_parameters(self._name))})"
            ) from error


def _package() -> Any:
    try:
        importlib.import_module("reasoning_gym.utils")
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentBroken(
            f"environment.type needs the package reasoning-gym on the coordinator ({error}): {INSTALL}"
        ) from error


def _registry() -> dict[str, Any]:
    return dict(importlib.import_module("reasoning_gym.factory").DATASETS)


def _check_name(name: str) -> None:
    if name == "composite":  # its parts would come past the checks of their scorers, and past their names in the figures
        raise EnvironmentBroken("environment.type names reasoning_gym:composite: list its tasks in environment.sources instead")
    known = sorted(_registry())
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:5]
    raise EnvironmentBroken(
        f"environment.type names reasoning_gym task {name!r}, which is none of its {len(known)}: near are {', '.join(near)}"
    )


def _parameters(name: str) -> list[str]:
    fields = getattr(_registry()[name][1], "__dataclass_fields__", {})
    return [field for field in fields if field not in ("seed", "size")]


def _disarm(task: type) -> bool:
    """Make `eval` read literals only in the module of a scorer that evaluates; whether the scorer parses with sympy instead."""
    scorer = task.score_answer  # type: ignore[attr-defined]
    source = inspect.getsource(scorer)
    if re.search(r"\beval\(", source):
        scorer.__globals__["eval"] = ast.literal_eval  # where it was written, which a task that inherits it need not be
    return "parse_expr(answer" in source


def is_plain_expression(text: str) -> bool:
    """Whether a text is made of numbers, single letters, operators and elementary functions."""
    names = re.findall(r"[A-Za-z][A-Za-z0-9]*", text)
    return bool(_PLAIN_CHARACTERS.fullmatch(text)) and all(len(name) == 1 or name in _PLAIN_NAMES for name in names)
