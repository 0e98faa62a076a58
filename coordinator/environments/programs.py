"""Runs programs that a model wrote against tests, each program in a jailed process of its own.

The process is given the program and a test's input, never the expected output: what it says can only be what the program printed. A
program that crashes, hangs, or takes too much memory fails its test, which is the program's fault and so a score; that no process could be
started is not, and is `failed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.environments.base import bounded
from coordinator.environments.jail import JailLimits
from coordinator.environments.link import LinkBroken
from coordinator.environments.process import ChildLost, JailedProcess

START_TIMEOUT_S = 60.0
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Ran:
    """How many of a program's tests it passed, and words on the first that it failed."""

    passed: int
    tests: int
    words: str = ""


class CannotRun(Exception):
    """No process could be started for a program: nothing is known about it."""


class Programs:
    """Runs up to `at_once` programs at a time."""

    def __init__(self, limits: JailLimits, *, at_once: int) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(at_once)

    async def run(self, program: str, tests: Sequence[tuple[str, str]], *, limit_s: float) -> Ran:
        """Run a program on each test's input, in order; all its tests together may take `limit_s`. Raises CannotRun."""
        async with self._places:
            process = await self._start()
            try:
                return await self._tested(process, program, tests, limit_s)
            finally:
                await process.kill()

    async def _tested(self, process: JailedProcess, program: str, tests: Sequence[tuple[str, str]], limit_s: float) -> Ran:
        """Ends at the first test that is not passed: the score is of all of them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        for number, (given, wanted) in enumerate(tests):
            left_s = max(until - loop.time(), 0.01)
            words = await _failed(process, program, given, wanted, left_s)
            if words:
                return Ran(number, len(tests), bounded(f"test {number + 1} of {len(tests)}: {words}"))
        return Ran(len(tests), len(tests))

    async def _start(self) -> JailedProcess:
        try:
            process = await JailedProcess.start_for_programs(self._limits, timeout_s=START_TIMEOUT_S)
        except (ChildLost, OSError) as error:
            raise CannotRun(f"no process for the program could be started: {error}") from error
        if not process.jail.confines_author_code:
            await process.kill()
            raise CannotRun(f"this host cannot confine a program: {'; '.join(process.jail.missing)}")
        return process


async def _failed(process: JailedProcess, program: str, given: str, wanted: str, limit_s: float) -> str:
    """Why a program does not pass a test; empty when it does."""
    try:
        answer = await process.ask({"do": "run", "program": program, "input": given}, timeout_s=limit_s, cpu_s=limit_s)
    except ChildLost as lost:
        return "not finished in time" if lost.is_timeout else f"the program's process ended: {lost}"
    except LinkBroken as error:
        return str(error)
    printed, ending = answer.get("printed"), answer.get("ending")
    if not isinstance(printed, str) or not isinstance(ending, str):
        return "the program's process answered with something else"
    if ending:
        return ending
    if tidy(printed) != tidy(wanted):
        return f"it printed {_shown(printed)}, expected {_shown(wanted)}"
    return ""


def tidy(text: str) -> str:
    """Output as it is compared: white space at the ends of lines, and empty lines at the end, do not count."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _shown(text: str) -> str:
    return bounded(repr(tidy(text)), SHOWN_CHARS)
