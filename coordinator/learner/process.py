"""The learner process: `python -m coordinator.learner.process --socket PATH`.

Connects to the coordinator's Unix socket, reads one JSON request a line and answers them in order. A reader thread watches
the socket all the while: when the coordinator is gone, the process ends at once, in the middle of a step if need be; what
is lost is replayed from the last checkpoint. One thread computes, with deterministic algorithms, so that a replay is exact.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import sys
import threading
from typing import BinaryIO

import torch
import transformers
from pydantic import ValidationError

from coordinator.learner import crash_point
from coordinator.learner.session import Session
from coordinator.wire.learner_link import ANSWERS, REQUESTS, Answer, Failed, Request

LINE_LIMIT_BYTES = 64 << 20
PENDING_LIMIT = 16  # the link has one request in flight; a peer that sends more than this is broken
CONNECT_TIMEOUT_S = 30.0
ENDED_BY_STOP, FATAL, LINK_CLOSED = 0, 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Serve one job; the exit status."""
    options = _parser().parse_args(arguments)
    make_deterministic()
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(CONNECT_TIMEOUT_S)
    try:
        link.connect(options.socket)
    except OSError as error:
        sys.stderr.write(f"learner: --socket {options.socket} cannot be reached: {error}; is the coordinator running?\n")
        return FATAL
    link.settimeout(None)
    requests: queue.Queue[bytes] = queue.Queue(PENDING_LIMIT)
    threading.Thread(target=_read_lines, args=(link.makefile("rb"), requests), name="link", daemon=True).start()
    session = Session(device=device, reached=options.crash_at.reached, least_step_s=options.least_step_s)
    return serve(session, requests, link)


def make_deterministic() -> None:
    """One computing thread and deterministic algorithms, and no progress bars on stderr."""
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to be deterministic
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def serve(session: Session, requests: queue.Queue[bytes], link: socket.socket) -> int:
    """Answer requests in order until Stop or a fatal failure."""
    while True:
        answer = _answer(session, requests.get())
        if answer is None:
            return ENDED_BY_STOP
        link.sendall(ANSWERS.dump_json(answer) + b"\n")
        if isinstance(answer, Failed) and answer.fatal:
            return FATAL


def _answer(session: Session, line: bytes) -> Answer | None:
    try:
        request: Request = REQUESTS.validate_json(line)
    except ValidationError as error:
        message = f"the line is no request of the learner link: {error}"
        return Failed(fence=session.fence, code="bad_request", message=message, fatal=False)
    return session.answer(request)


def _read_lines(stream: BinaryIO, requests: queue.Queue[bytes]) -> None:
    """Feed the queue; end the process when the link closes, or when the peer breaks its limits."""
    try:
        while (line := stream.readline(LINE_LIMIT_BYTES)) and line.endswith(b"\n"):
            requests.put_nowait(line)
        reason = "the coordinator closed the link" if not line else f"a line is cut off or above {LINE_LIMIT_BYTES} bytes"
    except OSError as error:
        reason = f"the link broke: {error}"
    except queue.Full:
        reason = f"more than {PENDING_LIMIT} requests wait; the link allows one in flight"
    sys.stderr.write(f"learner: {reason}; ending\n")
    sys.stderr.flush()
    os._exit(LINK_CLOSED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coordinator.learner.process", description="The learner of one job.")
    parser.add_argument("--socket", required=True, help="Unix socket the coordinator listens on")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    parser.add_argument("--least-step-s", type=float, default=0.0, help="seconds that a training step takes at least (rehearsals)")
    parser.add_argument("--crash-at", type=crash_point.parse, default=crash_point.CrashPoint(), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
