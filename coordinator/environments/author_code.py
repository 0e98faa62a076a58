"""Loading and calling what a job's author wrote. Only ever in a jailed process."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, SupportsFloat

from coordinator.environments.base import EnvironmentBroken, Outcome, bounded, scored

CODE_LIMIT_BYTES = 1 << 20
_MODULE = "author_reward"

RewardFunction = Callable[..., Any]


def load_function(path: Path, function: str) -> RewardFunction:
    """Execute the author's file and take the function from it. Raises EnvironmentBroken. Only ever in a jailed process."""
    if not path.is_file() or path.stat().st_size > CODE_LIMIT_BYTES:
        raise EnvironmentBroken(f"reward code {path.name} is absent or above {CODE_LIMIT_BYTES} bytes: upload one Python file")
    loader = SourceFileLoader(_MODULE, str(path))
    spec = spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException as error:
        raise EnvironmentBroken(f"reward code could not be loaded: {words_of(error, path.name)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        raise EnvironmentBroken(f"reward code has no function {function!r} (it has: {', '.join(sorted(names)) or 'none'})")
    return found  # type: ignore[no-any-return]


def call(function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """The function's result, awaited if need be. Raises whatever the function raises."""
    result = function(**arguments)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def outcome(reward: Any) -> Outcome:
    """One reward as an outcome: a number, or None."""
    if reward is None:
        return Outcome("unscored")
    if isinstance(reward, (str, bytes)) or not isinstance(reward, SupportsFloat):
        return failed(f"the reward is {bounded(repr(reward), 80)}; return a number, or None for 'does not apply'")
    try:
        value = float(reward)
    except (ArithmeticError, TypeError, ValueError) as error:  # 10**400, or a signalling NaN
        return failed(f"the reward is no number that a float holds: {type(error).__name__}: {error}")
    return scored(value)


def words_of(error: BaseException, file_name: str) -> str:
    """The last line of the traceback, and where in the author's file it happened."""
    last = traceback.format_exception_only(error)[-1].strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == file_name]
    number = frames[-1].lineno if frames else _unread_line(error, file_name)
    place = "" if number is None else f" ({file_name} line {number})"
    return bounded(last) + place


def _unread_line(error: BaseException, file_name: str) -> int | None:
    """Where the author's file is no Python: then nothing of it ran, and no traceback names it."""
    if not isinstance(error, SyntaxError) or Path(error.filename or "").name != file_name:
        return None
    return error.lineno


def failed(words: str) -> Outcome:
    """An outcome that is no score."""
    return Outcome("failed", None, bounded(words))
