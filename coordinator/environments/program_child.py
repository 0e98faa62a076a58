"""The jailed process that runs programs which a model wrote: `python -m coordinator.environments.program_child --link FD --parent PID`.

It jails itself, then runs one program after another, each as `__main__` with its standard input from a file and its output into one. What a
program does to this process concerns later runs of that program alone: each program has a process of its own.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from coordinator.environments.child import connected, end_with
from coordinator.environments.jail import JailLimits, JailPlan, allow_cpu, apply

OUTPUT_LIMIT_BYTES = 1 << 20
WORDS_CHARS = 300


def main() -> None:
    """Serve until the parent closes the link."""
    line = connected("jailed process for programs; started by the coordinator only")
    if line is None:
        return
    link, request = line.link, line.request
    report = apply(JailPlan(JailLimits(**request["limits"]), Path(request["scratch"]), (), line.parent))
    link.send({"id": request["id"], "jail": report.to_json(), "info": {}})
    end_with(line.connection)
    while (given := link.receive()) is not None:
        allow_cpu(given["cpu_s"])
        link.send({"id": given["id"], **run(given["program"], given["input"])})


def run(program: str, given: str) -> dict[str, Any]:
    """What the program printed (cut at the limit), and how it ended: "" or words."""
    Path("given").write_text(given)
    _connect(0, os.open("given", os.O_RDONLY))
    _connect(1, os.open("printed", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
    sys.stdin, sys.stdout = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    ending = _ending(program)
    try:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except (AttributeError, OSError, ValueError) as error:
        ending = ending or f"its output was refused: {error}"
    with Path("printed").open("rb") as file:
        printed = file.read(OUTPUT_LIMIT_BYTES + 1)
    if len(printed) > OUTPUT_LIMIT_BYTES:
        ending = ending or f"it printed more than {OUTPUT_LIMIT_BYTES} bytes"
    return {"printed": printed[:OUTPUT_LIMIT_BYTES].decode("utf-8", "replace"), "ending": ending}


def _ending(program: str) -> str:
    try:
        _as_main(program)
    except SystemExit as left:
        return "" if left.code in (None, 0) else f"exit status {left.code}"[:WORDS_CHARS]
    except BaseException as error:  # whatever it raises is how it ended
        return traceback.format_exception_only(error)[-1].strip()[:WORDS_CHARS]
    return ""


def _as_main(program: str) -> None:
    """To its end as the interpreter ends: threads are waited for, then functions of `atexit` are called."""
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})  # noqa: S102 (what this jailed process is for)
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()


def _connect(number: int, opened: int) -> None:
    if opened != number:  # as it is where the program closed `number`: `open(0).read()` does
        os.dup2(opened, number)
        os.close(opened)


if __name__ == "__main__":
    main()
