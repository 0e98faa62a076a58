"""The learner as a child process behind a Unix socket; implements `service.job_ports.Learner`.

The socket lies in a 0700 folder of its own; the peer's process id must be the child's. The learner ends when the socket closes,
so a coordinator that dies takes its learner along (law 11).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.adapters.child import child_environment
from coordinator.service.job_ports import LearnerHostFault, LearnerLost, LearnerRefused, learner_log
from coordinator.wire.learner_link import ANSWERS, Answer, Failed, Request, Stop

LINE_LIMIT_BYTES = 64 << 20
LAST_WORDS_BYTES = 4096
TUNING = ("NCCL_", "TORCH_NCCL_", "PYTORCH_")  # how ranks and cards are used on this host, such as NCCL_P2P_DISABLE
CONNECT_S = 120.0
END_S = 10.0


class LearnerProcess:
    """One running learner."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, fence: int, log_path: Path
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._fence = fence
        self._log_path = log_path
        self._is_at_work = False  # on a request that it has not answered

    @property
    def pid(self) -> int:
        """For crash tests and people."""
        return self._process.pid

    async def ask(self, request: Request, *, deadline_s: float) -> Answer:
        """Send a request, read its answer."""
        self._is_at_work = True
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(request.model_dump_json().encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
        except TimeoutError:
            raise LearnerLost(f"no answer to {request.kind!r} within {deadline_s:g} s") from None
        except ConnectionError as error:
            raise LearnerLost(f"the process ended before {request.kind!r}{await self._epitaph()} ({error})") from error
        except ValueError as error:
            raise LearnerLost(f"the link broke during {request.kind!r}: {error}") from error
        if not line.endswith(b"\n"):
            raise LearnerLost(f"the process ended during {request.kind!r}{await self._epitaph()}")
        self._is_at_work = False
        return self._checked(line)

    def _checked(self, line: bytes) -> Answer:
        try:
            answer = ANSWERS.validate_json(line)
        except ValidationError as error:
            raise LearnerLost(f"an answer is not of the protocol: {error.errors()[0]['msg']}") from error
        if answer.fence != self._fence:
            raise LearnerLost(f"an answer carries fence {answer.fence}, this learner has {self._fence}")
        if isinstance(answer, Failed):
            if answer.code == "disk":  # six restarts would not make room; a pause gives someone the time to
                raise LearnerHostFault(answer.message)
            if answer.fatal and answer.code != "internal":  # an internal fault may be gone after a restart
                raise LearnerRefused(f"{answer.code}: {answer.message}")
            raise LearnerLost(f"{answer.code}: {answer.message}")
        return answer

    async def _epitaph(self) -> str:
        """How it ended, and its last words."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        code = self._process.returncode
        how = "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        lines = _tail(self._log_path).strip().splitlines()
        return f"{how}; its last words: {lines[-1][:300]}" if lines and code != -signal.SIGKILL else how

    async def close(self) -> None:
        """Stop it where it waits for a request; else close the link, at which it ends whatever it does; kill it if it does not."""
        try:
            if not self._is_at_work:
                await self._stop()
        finally:
            self._writer.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _stop(self) -> None:
        """Let its sinks bring their last figures to safety: a tracker would call the run crashed otherwise."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(END_S):
                self._writer.write(Stop(fence=self._fence).model_dump_json().encode() + b"\n")
                await self._writer.drain()
                await self._process.wait()


class LearnerProcesses:
    """Starts learners; implements `service.job_ports.LearnerStarter`."""

    def __init__(self, data_dir: Path, options: Sequence[str] = ()) -> None:
        self._data_dir = data_dir
        self._options = tuple(options)

    async def start(self, job_id: str, fence: int) -> LearnerProcess:
        """Spawn, wait for the connection, verify who connected."""
        log_path = learner_log(self._data_dir, job_id)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="echo2-link-"))  # Unix socket paths are limited to about 100 bytes
        arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if arrived.done():
                writer.close()
            else:
                arrived.set_result((reader, writer))

        try:
            server = await asyncio.start_unix_server(connected, folder / "link", limit=LINE_LIMIT_BYTES)
            try:
                process = await self._spawn(folder / "link", log_path)
                reader, writer = await self._connected(process, arrived)
            finally:
                server.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return LearnerProcess(process, reader, writer, fence=fence, log_path=log_path)

    async def _connected(
        self, process: Process, arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The link to the process, which is ended when there is none."""
        try:
            return await self._connection(process, arrived)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise

    async def _spawn(self, link: Path, log_path: Path) -> Process:
        with log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "coordinator.learner.process",
                "--socket",
                str(link),
                *self._options,
                env=child_environment() | tuning(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def _connection(
        self, process: Process, arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ended = asyncio.create_task(process.wait())
        awaited: set[asyncio.Future[Any]] = {arrived, ended}
        try:
            await asyncio.wait(awaited, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not arrived.done():
            how = f"ended with code {process.returncode}" if process.returncode is not None else "did not connect"
            raise LearnerLost(f"the learner process {how} within {CONNECT_S:g} s of its start")
        reader, writer = arrived.result()
        if _peer_pid(writer) != process.pid:
            writer.close()
            raise LearnerLost("another process connected to the learner's socket")
        return reader, writer


def tuning(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of our own environment that a learner gets beside what every child gets; nothing that could be a secret."""
    return {name: value for name, value in variables.items() if name.startswith(TUNING)}


def _tail(path: Path) -> str:
    """The end of a log, which may have become long; empty where there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    link: socket.socket = writer.get_extra_info("socket")
    pid: int = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid
