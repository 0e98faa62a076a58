"""The learner process: `python -m coordinator.learner.process --socket PATH`.

Connects to the coordinator's Unix socket, reads one JSON request a line and answers them in order. A reader thread watches
the socket all the while: when the coordinator is gone, the process ends at once, in the middle of a step if need be; what
is lost is replayed from the last checkpoint. One thread computes, with deterministic algorithms, so that a replay is exact.

A job with `learner.ranks` above 1 makes it rank 0 of as many (`crew.py`). The others are this program with `--rank`: they read
the same requests from their standard input, do the same, and answer nobody.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
import transformers
from pydantic import ValidationError

from coordinator.learner import crash_point, team
from coordinator.learner.crew import Crew, leave_words
from coordinator.learner.session import Session
from coordinator.wire.learner_link import REQUESTS, Answer, Checkpoint, Evaluate, Failed, Request, Snapshot, Start, Train

LINE_LIMIT_BYTES = 64 << 20
PENDING_LIMIT = 16  # the link has one request in flight; a peer that sends more than this is broken
CONNECT_TIMEOUT_S = 30.0
ENDED_BY_STOP, FATAL, LINK_CLOSED = 0, 1, 3
OF_ALL_RANKS = (Start, Train, Snapshot, Checkpoint, Evaluate)  # rank 0 alone writes figures, and the others end when it does
PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Serve one job; the exit status."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the coordinator's affair: it closes the link
    make_deterministic()
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if options.rank:
        return follow(options.rank, options.ranks, options.meeting, device)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(CONNECT_TIMEOUT_S)
    try:
        link.connect(options.socket)
    except OSError as error:
        sys.stderr.write(f"learner: --socket {options.socket} cannot be reached: {error}; is the coordinator running?\n")
        return FATAL
    link.settimeout(None)
    requests = _listen(link.makefile("rb"), _end_without_coordinator)
    crew = Crew(device)
    session = Session(join=crew.join, reached=options.crash_at.reached, least_step_s=options.least_step_s)
    try:
        return serve(session, requests, link, crew)
    finally:
        crew.close()


def follow(rank: int, ranks: int, meeting: Path, device: str) -> int:
    """Be another rank than 0: the same requests, and nobody to answer. Ends when rank 0 does, even while it is stopped by a signal.

    It works in the folder of the meeting: that tells one in use from one that was left behind.
    """
    if sys.platform == "linux":  # elsewhere the pipe that closes must do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(meeting.parent)
    requests = _listen(sys.stdin.buffer, partial(_end_without_lead, meeting))
    session = Session(join=lambda size: team.join(rank, size, meeting=meeting, device=device))
    while (answer := session.answer(REQUESTS.validate_json(requests.get()))) is not None:
        if isinstance(answer, Failed):
            sys.stderr.write(f"learner: rank {rank} of {ranks}: {answer.code}: {answer.message}\n")
            sys.stderr.flush()
            if answer.code == "internal":  # rank 0 may wait for this one; of any other refusal it knows
                leave_words(meeting.parent, rank, answer.message)
                os._exit(FATAL)
    return ENDED_BY_STOP


def make_deterministic() -> None:
    """One computing thread and deterministic algorithms, and no progress bars on stderr."""
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to be deterministic
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks are on one host, and speak to no other
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def serve(session: Session, requests: queue.Queue[bytes], link: socket.socket, crew: Crew) -> int:
    """Answer requests in order until Stop or a fatal failure."""
    while True:
        line = requests.get()
        try:
            request: Request = REQUESTS.validate_json(line)
        except ValidationError as error:
            message = f"the line is no request of the learner link: {error}"
            refusal = Failed(fence=session.fence, code="bad_request", message=message, fatal=False)
            link.sendall(_line(refusal))
            continue
        if isinstance(request, Start) and session.fence == 0:
            crew.start(request.config.learner.ranks)
        if isinstance(request, OF_ALL_RANKS):
            crew.forward(line)
        answer = session.answer(request)
        if answer is None:
            return ENDED_BY_STOP
        link.sendall(_line(answer))
        if isinstance(answer, Failed) and answer.fatal:
            return FATAL


def _line(answer: Answer) -> bytes:
    """As its own class writes it: a type adapter of the union knows no word for NaN."""
    return answer.model_dump_json().encode() + b"\n"


def _listen(stream: BinaryIO, end: Callable[[str], None]) -> queue.Queue[bytes]:
    """The lines of the stream, read by a thread; `end` is called when there will be no more."""
    requests: queue.Queue[bytes] = queue.Queue(PENDING_LIMIT)
    threading.Thread(target=_read_lines, args=(stream, requests, end), name="link", daemon=True).start()
    return requests


def _read_lines(stream: BinaryIO, requests: queue.Queue[bytes], end: Callable[[str], None]) -> None:
    """Feed the queue until the link closes, or the peer breaks its limits."""
    try:
        while (line := stream.readline(LINE_LIMIT_BYTES)) and line.endswith(b"\n"):
            requests.put_nowait(line)
        reason = "the coordinator closed the link" if not line else f"a line is cut off or above {LINE_LIMIT_BYTES} bytes"
    except OSError as error:
        reason = f"the link broke: {error}"
    except queue.Full:
        reason = f"more than {PENDING_LIMIT} requests wait; the link allows one in flight"
    end(reason)


def _end_without_coordinator(reason: str) -> None:
    sys.stderr.write(f"learner: {reason}; ending\n")
    sys.stderr.flush()
    os._exit(LINK_CLOSED)


def _end_without_lead(meeting: Path, _: str) -> None:
    shutil.rmtree(meeting.parent, ignore_errors=True)  # rank 0 may have been killed
    os._exit(LINK_CLOSED)  # it has said why, or had no time to


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coordinator.learner.process", description="The learner of one job.")
    parser.add_argument("--socket", default="", help="Unix socket the coordinator listens on")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    parser.add_argument("--least-step-s", type=float, default=0.0, help="seconds that a training step takes at least (rehearsals)")
    parser.add_argument("--crash-at", type=crash_point.parse, default=crash_point.CrashPoint(), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
