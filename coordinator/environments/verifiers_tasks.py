"""`verifiers:PACKAGE`: the tasks of a taskset package for verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers), one answer each.

The package is installed beside the coordinator, by its operator. Prompts come from its taskset; a completion becomes a trace of one turn, which the
task's own rewards and metrics score. What needs more than that (tools, a container, a judge, a user who answers) is refused by its name;
`verifiers_rollouts.py` serves some of it.
All tasks are training prompts: there is no held-out split.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import mimetypes
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from coordinator.environments.alarm import OutOfTime, time_limit
from coordinator.environments.author_code import failed
from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, PromptValue, Scores, bounded, check_index, scored

TASKS_LIMIT = 100_000  # of an endless taskset, that many count
SHARE_OF_LIMIT = 0.8
INSTALL = "pip install 'echo2[verifiers]' and the package"


class Verifiers:
    """The tasks of one package. `limit_s` bounds the grading of one prompt's completions together, wall-clock."""

    def __init__(self, package: str, *, options: Mapping[str, Any], limit_s: float) -> None:
        self._package = package
        self._limit_s = limit_s
        self._vf, _, self._tasks = load_package(package, options)
        _check_single_turn(self._tasks[0], package)

    def size(self, split: str) -> int | None:
        return len(self._tasks) if split == "train" else 0

    def prompt(self, split: str, index: int) -> PromptValue:
        check_index(split, index, self.size(split))
        data = self._tasks[index].data
        if isinstance(data.prompt, str) and not data.system_prompt:
            return str(data.prompt)
        opening = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else _messages(data.prompt)
        if not opening:
            raise EnvironmentBroken(f"task {index} of verifiers package {self._package!r} has no prompt: one turn needs one")
        return [{"role": "system", "content": data.system_prompt}, *opening] if data.system_prompt else opening

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        check_index(split, index, self.size(split))
        task = self._tasks[index]
        each_s = SHARE_OF_LIMIT * self._limit_s / max(1, len(completions))
        logged: dict[str, list[float]] = {}
        outcomes = [self._outcome(task, done.text, each_s, logged) for done in completions]
        metrics = {name: sum(values) / len(values) for name, values in logged.items()}
        return Scores(outcomes, metrics, any(one.kind == "timeout" for one in outcomes))

    def _outcome(self, task: Any, text: str, limit_s: float, logged: dict[str, list[float]]) -> Outcome:
        try:
            with time_limit(limit_s):
                trace = self._trace(task, text)
                asyncio.run(task.score(trace))
        except OutOfTime as late:
            return Outcome("timeout", None, f"the task's rewards: {late} (a share of environment.grade_timeout_s)")
        except Exception as error:
            return failed(f"the task's rewards: {type(error).__name__}: {error}")
        given = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**{k: v for k, v in trace.metrics.items() if v is not None}, **given}.items():
            logged.setdefault(bounded(str(name), 100), []).append(float(value))
        if not given:
            return Outcome("unscored")
        total = scored(float(trace.reward))
        return Outcome(total.kind, total.reward, total.detail or bounded("; ".join(f"{k}={v:g}" for k, v in given.items())))

    def _trace(self, task: Any, text: str) -> Any:
        """One turn as verifiers records it: the prompt's messages, then the answer."""
        types, graph, tracing = (module(f"verifiers.v1.{name}") for name in ("types", "graph", "trace"))
        data = task.data
        opening = [types.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
        if data.system_prompt:
            opening = [types.SystemMessage(content=data.system_prompt), *opening]
        nodes = [graph.MessageNode(parent=place - 1 if place else None, message=one) for place, one in enumerate(opening)]
        answer = types.AssistantMessage(content=text)
        nodes.append(graph.MessageNode(parent=len(nodes) - 1 if nodes else None, message=answer, sampled=True))
        return self._vf.Trace(
            task=tracing.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
            agent=tracing.AgentInfo(config=self._vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )


def load_package(package: str, options: Mapping[str, Any]) -> tuple[Any, Any, list[Any]]:
    """The library, the package's taskset and its tasks. Raises EnvironmentBroken in words."""
    mimetypes.knownfiles = []  # else a library below reads /etc/mime.types, which the jail refuses
    os.environ.setdefault("HOME", str(Path.cwd()))  # in the jail: the scratch directory
    vf, loaders = module("verifiers.v1"), module("verifiers.v1.utils.loaders")
    try:
        config = loaders.taskset_config_type(package)(id=package, **options)
        taskset = loaders.load_taskset(config)
        tasks = list(islice(taskset, TASKS_LIMIT))
    except Exception as error:  # the package's own code
        raise EnvironmentBroken(
            f"verifiers package {package!r} could not be loaded with options {dict(options)}: "
            f"{bounded(f'{type(error).__name__}: {error}')} ({INSTALL})"
        ) from error
    if not tasks:
        raise EnvironmentBroken(f"verifiers package {package!r} yields no tasks with options {dict(options)}")
    return vf, taskset, tasks


def module(name: str) -> Any:
    """A module of verifiers. Raises EnvironmentBroken with what to install."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # its many dependencies fail in many ways
        raise EnvironmentBroken(f"environment.type needs the package verifiers on the coordinator ({error}): {INSTALL}") from error


def _messages(prompt: Any) -> list[Any]:
    return [{"role": one.role, "content": one.content} for one in prompt or []]


def _check_single_turn(task: Any, package: str) -> None:
    """Refuse what one answer without a runtime cannot serve; verifiers itself would leave such rewards out in silence."""
    base = importlib.import_module("verifiers.v1.task").Task
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    single = importlib.import_module("verifiers.v1.envs.single_agent").SingleAgentEnv
    kind = type(task)
    needs = {
        "tools": bool(kind.toolsets(task.config)) or bool(loaders.taskset_class(package).toolsets(None)),
        "a container": kind.NEEDS_CONTAINER,
        "a judge": bool(task.config.judges),
        "set-up in a runtime": kind.setup is not base.setup or kind.finalize is not base.finalize,
        "an environment of its own": loaders.environment_class(package) is not single,
        "a runtime for its rewards": any(needs_runtime(hook) for name in ("reward", "metric") for hook in task.hooks(name)),
    }
    lacking = [name for name, is_needed in needs.items() if is_needed]
    if lacking:
        raise EnvironmentBroken(
            f"verifiers package {package!r} needs {', '.join(lacking)}: with environment.max_turns 1 (the default) tasks of one turn, "
            "scored from their text, are served; tools and environments of one agent's several turns need environment.max_turns (8, say)"
        )


def needs_runtime(hook: Any) -> bool:
    """Whether a hook demands a runtime; one with a default can do without."""
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
