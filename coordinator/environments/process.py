"""One jailed child from the coordinator's side: start it, ask it, kill it with all that it started.

A child is asked one thing at a time, within a deadline. Whatever goes wrong (deadline, death, a bad frame) ends the child:
its state is unknown, and the next request deserves a fresh one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.environments.base import EnvironmentBroken, EnvironmentSpec, bounded, storable
from coordinator.environments.child import KEPT_VARIABLES
from coordinator.environments.jail import JailLimits, JailReport, report_from
from coordinator.environments.link import FRAME_LIMIT_BYTES, LinkBroken, pack, receive

_SETTINGS = ("C.UTF-8", "1", "1", "false", "system")
_REAP_S = 10.0
BROKEN_CHARS = 1500


class ChildLost(Exception):
    """The child ended, or had to be ended. `is_timeout` when it ran out of time (wall-clock or CPU)."""

    def __init__(self, words: str, *, is_timeout: bool) -> None:
        super().__init__(words)
        self.is_timeout = is_timeout


class JailedProcess:
    """A running child. Make one with `JailedProcess.start`."""

    def __init__(
        self, process: asyncio.subprocess.Process, scratch: Path, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        self._process = process
        self._scratch = scratch
        self._reader, self._writer = streams
        self.requests = 0
        self.info: dict[str, Any] = {}
        self.jail = JailReport()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone already: killed from outside, say, while nobody asked it anything."""
        return self._process.returncode is not None

    @classmethod
    async def start(cls, spec: EnvironmentSpec, limits: JailLimits, *, timeout_s: float) -> JailedProcess:
        """A child with its environment built. Raises EnvironmentBroken with the child's words, ChildLost when it died."""
        child = await _spawn("coordinator.environments.child")
        try:
            await child._introduce(spec, limits, timeout_s)
        except BaseException:
            await child.kill()
            raise
        return child

    @classmethod
    async def start_for_programs(cls, limits: JailLimits, *, timeout_s: float) -> JailedProcess:
        """A child that runs programs (`program_child`). Raises ChildLost when it died."""
        child = await _spawn("coordinator.environments.program_child")
        try:
            request = {"limits": asdict(limits), "scratch": str(child._scratch), "variables": _variables()}
            answer = await child.ask(request, timeout_s=timeout_s, cpu_s=timeout_s)
            child.jail = report_from(answer["jail"])
        except BaseException:
            await child.kill()
            raise
        return child

    async def ask(
        self, request: Mapping[str, Any], *, timeout_s: float, cpu_s: float, most: int = FRAME_LIMIT_BYTES
    ) -> dict[str, Any]:
        """The answer to one request, of at most `most` bytes. Raises ChildLost, after which the child is dead; LinkBroken if the request is too large."""
        word = secrets.token_hex(8)
        frame = pack({**request, "id": word, "cpu_s": cpu_s})
        self.requests += 1
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(frame)
                await self._writer.drain()
                answer = await receive(self._reader, most)
            if answer.get("id") != word:
                raise LinkBroken("the answer does not carry the request's id")
        except TimeoutError:
            await self.kill()
            raise ChildLost(
                f"not finished after {timeout_s:g} s (environment.grade_timeout_s when grading)", is_timeout=True
            ) from None
        except (LinkBroken, OSError) as error:
            raise await self._autopsy(str(error)) from error
        except BaseException:
            await self.kill()
            raise
        return answer

    async def kill(self) -> None:
        """End the child and its session, reap it, and remove its scratch directory. Idempotent."""
        self._writer.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                self._process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(_REAP_S):
                    await self._process.wait()
        await asyncio.to_thread(shutil.rmtree, self._scratch, True)

    async def _introduce(self, spec: EnvironmentSpec, limits: JailLimits, timeout_s: float) -> None:
        request = {
            "do": "start",
            "spec": spec.to_json(),
            "limits": asdict(limits),
            "scratch": str(self._scratch),
            "variables": _variables(),
        }
        answer = await self.ask(request, timeout_s=timeout_s, cpu_s=timeout_s)
        try:  # author code has run already
            self.jail = report_from(answer["jail"])
            broken = bounded(storable(answer.get("broken", "")), BROKEN_CHARS)
            self.info = {} if broken else answer["info"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ChildLost(f"the environment's process gave a bad answer to its start: {error!r}", is_timeout=False) from error
        if broken:
            raise EnvironmentBroken(broken)

    async def _autopsy(self, words: str) -> ChildLost:
        """Why the link broke: how the process ended, if it did so by itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        code = self._process.returncode
        await self.kill()
        if code is None:
            return ChildLost(f"the grading process spoke out of turn and was ended: {words}", is_timeout=False)
        if code == -signal.SIGXCPU:
            return ChildLost("the CPU time limit was reached", is_timeout=True)
        ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ChildLost(f"the grading process ended ({ending}): {words}", is_timeout=False)


def _variables() -> dict[str, str]:
    return dict(zip(KEPT_VARIABLES, _SETTINGS, strict=True))


async def _spawn(module: str) -> JailedProcess:
    """Start the interpreter with nothing of ours but one end of a socket pair. The last await makes the process, so none leaks."""
    scratch = Path(tempfile.mkdtemp(prefix="echo2-jail-"))
    ours, theirs = socket.socketpair()
    close_ours = ours.close
    try:
        streams = await asyncio.open_connection(sock=ours)
        close_ours = streams[1].close  # from here on the loop holds the socket: closed under it, its number would be another's
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            *("--link", str(theirs.fileno()), "--parent", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=_environment(),
            cwd=scratch,
            start_new_session=True,
        )
    except BaseException:
        close_ours()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        theirs.close()
    return JailedProcess(process, scratch, streams)


def _environment() -> dict[str, str]:
    """What the interpreter needs to find us; the child empties it again before it jails itself."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**_variables(), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
