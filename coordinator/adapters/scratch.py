"""Scratch directories in the system's temporary folder that a killed coordinator left: jails', learner links' and learner ranks'.

Another coordinator of the same user may run on this host, so only what is old, ours, and no process's working directory goes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIXES = ("echo2-jail-", "echo2-link-", "echo2-ranks-")
LEAST_AGE_S = 600.0  # a jail and a learner's rank enter their directory, and a learner connects, long before


def remove_scratch(parent: Path | None = None, *, now: float | None = None) -> int:
    """Remove orphans below `parent` (by default the temporary folder); how many."""
    parent, now = parent or Path(tempfile.gettempdir()), time.time() if now is None else now
    found = [path for prefix in PREFIXES for path in parent.glob(f"{prefix}*") if _is_old_and_ours(path, now)]
    if not found:
        return 0
    used = _working_directories()
    doomed = [path for path in found if not any(place == path or path in place.parents for place in used)]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return len(doomed)


def _is_old_and_ours(path: Path, now: float) -> bool:
    """A jail run by root gives its directory to another user: root may remove it all the same."""
    try:
        found = path.lstat()
    except OSError:
        return False
    ours = os.geteuid() in (found.st_uid, 0)
    return path.is_dir() and not path.is_symlink() and ours and now - found.st_mtime > LEAST_AGE_S


def _working_directories() -> set[Path]:
    """Of every process that we may look at; a jail's and a rank's is its scratch directory."""
    used = set[Path]()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            used.add(link.readlink())
        except OSError:
            continue
    return used
