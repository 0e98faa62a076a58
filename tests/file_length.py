"""Part of `make check`: no source file of more than 600 lines (a reader would want it split)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CEILING = 600


def too_long(paths: list[Path]) -> list[str]:
    """The files over the ceiling, with their length."""
    lengths = ((len(path.read_text().splitlines()), path) for path in paths if path.exists())
    return [
        f"{path}: {lines} lines; the ceiling is {CEILING}: split it by what changes for different reasons"
        for lines, path in lengths
        if lines > CEILING
    ]


def main() -> None:
    """Exit 1 and name the files when one is too long."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], capture_output=True, text=True, check=True
    ).stdout.split()
    found = too_long([Path(name) for name in listed])
    print("\n".join(found) or f"{len(listed)} files, none over {CEILING} lines")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
