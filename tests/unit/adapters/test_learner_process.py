"""The coordinator's hold on its learner: what an answer means, and how the process is ended. Its other end is played here."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.adapters import learner_process
from coordinator.adapters.learner_process import LearnerProcess, tuning
from coordinator.service.job_ports import LearnerHostFault, LearnerLost, LearnerRefused
from coordinator.wire.learner_link import ANSWERS, REQUESTS, Failed, Log, Logged, Stop

FENCE = 3
LOG = Log(fence=FENCE, step=0, at=0.0, metrics={})


class Played:
    """A process that ends when it is told to, or killed."""

    def __init__(self) -> None:
        self.pid, self.returncode = 1, None
        self.ended = asyncio.Event()
        self.was_killed = False

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    def kill(self) -> None:
        self.was_killed = True
        self.ended.set()


Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Played], Awaitable[None]]


@asynccontextmanager
async def playing(answering: Answering, log_path: Path = Path("/none")) -> AsyncIterator[tuple[LearnerProcess, Played]]:
    """A learner whose end of the link does as `answering` says."""
    ours, theirs = socket.socketpair()
    process = Played()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    its_reader, its_writer = await asyncio.open_unix_connection(sock=theirs)
    other = asyncio.create_task(answering(its_reader, its_writer, process))
    yield LearnerProcess(process, reader, writer, fence=FENCE, log_path=log_path), process  # type: ignore[arg-type]
    await asyncio.wait_for(other, 10)
    its_writer.close()
    await its_writer.wait_closed()


def failing(code: str, *, fatal: bool) -> Answering:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Played) -> None:
        await reader.readline()
        writer.write(ANSWERS.dump_json(Failed(fence=FENCE, code=code, message="why", fatal=fatal)) + b"\n")
        await reader.read()
        process.ended.set()

    return answer


@pytest.mark.parametrize(
    ("code", "fatal", "error"),
    [
        ("bad_model", True, LearnerRefused),
        ("internal", True, LearnerLost),
        ("rank_failed", False, LearnerLost),
        ("bad_batch", False, LearnerLost),
        ("disk", False, LearnerHostFault),
        ("disk", True, LearnerHostFault),  # at its start too: a full disk pauses a job, and never fails it
    ],
)
async def test_what_an_answer_means_for_the_job(code: str, fatal: bool, error: type[Exception]) -> None:
    async with playing(failing(code, fatal=fatal)) as (learner, _):
        with pytest.raises(error, match="why"):
            await learner.ask(LOG, deadline_s=10)
        await learner.close()


async def test_one_that_waits_for_a_request_is_told_to_stop_and_has_time_for_its_sinks() -> None:
    """The link stays open until the process has ended: at its close a learner ends at once, and a tracker calls the run crashed."""
    seen: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Played) -> None:
        await reader.readline()
        writer.write(ANSWERS.dump_json(Logged(fence=FENCE, step=0)) + b"\n")
        request = REQUESTS.validate_json(await reader.readline())
        assert request == Stop(fence=FENCE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.2)
        seen.append("figures are safe")
        process.ended.set()

    async with playing(answer) as (learner, process):
        assert await learner.ask(LOG, deadline_s=10) == Logged(fence=FENCE, step=0)
        await learner.close()
        assert seen == ["figures are safe"]
        assert not process.was_killed


async def test_one_at_work_is_not_waited_for() -> None:
    """It would come to a stop request only after its step: the closed link ends it in the middle."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Played) -> None:
        seen.append(await reader.read())
        process.ended.set()

    async with playing(answer) as (learner, _):
        with pytest.raises(LearnerLost, match=r"no answer to 'log' within 0\.05 s"):
            await learner.ask(LOG, deadline_s=0.05)
        await learner.close()
    assert seen == [LOG.model_dump_json().encode() + b"\n"]


async def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_process, "END_S", 0.05)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Played) -> None:
        await process.ended.wait()

    async with playing(answer) as (learner, process):
        await learner.close()
        assert process.was_killed


async def test_the_last_words_are_the_logs_last_line(tmp_path: Path) -> None:
    """However long the log has become; and none is no error."""
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\nRuntimeError: out of memory\n")
    for path, words in ((log, r"its last words: RuntimeError: out of memory"), (tmp_path / "none", "ended during 'log'$")):

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Played) -> None:
            await reader.readline()
            process.ended.set()
            writer.close()

        async with playing(answer, path) as (learner, _):
            with pytest.raises(LearnerLost, match=words):
                await learner.ask(LOG, deadline_s=10)
            await learner.close()


def test_a_learner_is_told_how_cards_are_used_and_no_secret() -> None:
    given = {"NCCL_P2P_DISABLE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x", "WANDB_API_KEY": "s", "ECHO2_TOKEN": "s", "AWS_SECRET": "s"}
    assert tuning(given) == {"NCCL_P2P_DISABLE": "1", "PYTORCH_CUDA_ALLOC_CONF": "x"}
