"""`python -m coordinator.environments.jail_check`: jail this very process and print what holds, as JSON. For `echo2 doctor`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from coordinator.environments.jail import JailLimits, JailPlan, apply


def main() -> None:
    """Print the report and end without clean-up: a jailed process cannot do any."""
    out = os.dup(sys.stdout.fileno())
    scratch = Path(tempfile.mkdtemp(prefix="echo2-jail-"))
    report = apply(JailPlan(limits=JailLimits(), scratch=scratch, readable=(), parent_pid=os.getppid()))
    os.write(out, json.dumps({**report.to_json(), "confines_author_code": report.confines_author_code}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
