"""How the benchmark and a participant speak: JSON objects, one a line, over the participant's stdin and stdout.

A participant reads its part, does what it can before publication, says `ready`; hears `meet` with what every host said, and
says `met`; hears `publish`; a worker says `done` with the monotonic time when its last byte was verified on disk; hears
`check` and says `checked` with the digest of what it reads back from disk, as the seeder does; all end when their stdin closes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

Message = dict[str, Any]


def say(event: str, **facts: object) -> None:
    """Tell the benchmark."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def hear(expected: str) -> Message:
    """What the benchmark says next; ends this process if it has gone, or says something else."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    message: Message = json.loads(line)
    if message["do"] != expected:
        raise SystemExit(f"expected {expected!r}, the benchmark said {message['do']!r}")
    return message


def check(digest: str) -> None:
    """Answer `check`, then stay until the benchmark has heard everybody."""
    say("checked", digest=digest)
    sys.stdin.read()
