"""Rank 0's loop: what it answers, and which requests it hands on to the other ranks."""

from __future__ import annotations

import queue
import socket
from types import SimpleNamespace

from coordinator.learner import process
from coordinator.wire.learner_link import ANSWERS, Answer, Checkpoint, Evaluate, Failed, Log, Request, Snapshot, Stop, Train

FENCE = 3
SHARED: tuple[Request, ...] = (
    Train(fence=FENCE, step=0, batch_path="/b", batch_digest="00"),
    Snapshot(fence=FENCE, directory="/s", canary_ids=()),
    Checkpoint(fence=FENCE, directory="/c", ledger_step=0),
    Evaluate(fence=FENCE, prompts=(), max_new_tokens=(), stop_token_ids=()),
)
ALONE: tuple[Request, ...] = (Log(fence=FENCE, step=0, at=0.0, metrics={}), Stop(fence=FENCE))


def served(*requests: Request) -> tuple[int, list[Answer], list[bytes]]:
    """The exit status, what the coordinator was told, and what the other ranks were handed."""
    handed: list[bytes] = []

    def answer(request: Request) -> Answer | None:
        return None if isinstance(request, Stop) else Failed(fence=FENCE, code=request.kind, message="no", fatal=False)

    waiting: queue.Queue[bytes] = queue.Queue()
    for request in requests:
        waiting.put(request.model_dump_json().encode() + b"\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session, crew = SimpleNamespace(answer=answer, fence=FENCE), SimpleNamespace(forward=handed.append)
        code = process.serve(session, waiting, ours, crew)  # type: ignore[arg-type]
        ours.shutdown(socket.SHUT_WR)
        told = [ANSWERS.validate_json(line) for line in theirs.makefile("rb")]
    return code, told, handed


def test_every_rank_gets_what_all_ranks_do_and_nothing_else() -> None:
    """Figures are rank 0's alone: hundreds come at once after a crash, and would fill the queue of a rank that is slow to read them.

    So is the end: a rank that ended before rank 0's sinks are closed would look lost, and cut them off.
    """
    code, told, handed = served(*SHARED, *ALONE)
    assert code == process.ENDED_BY_STOP
    assert handed == [request.model_dump_json().encode() + b"\n" for request in SHARED]
    assert [answer.code for answer in told if isinstance(answer, Failed)] == [each.kind for each in (*SHARED, ALONE[0])]
