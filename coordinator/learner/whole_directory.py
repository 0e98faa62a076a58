"""A directory that comes into being whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator.learner.errors import LearnerError
from p2p.adapters.durable import FileLayer, make_directory_durably, replace_directory_durably


@contextmanager
def filled(directory: Path, *, before_rename: Callable[[], None], files: FileLayer) -> Iterator[Path]:
    """A new directory to fill, which on leaving takes the place of `directory`, durably; one that is there is replaced atomically.

    What could not be filled is removed at once: on a full disk it is that which fills it. Raises OSError.
    """
    temporary = directory.with_name(f".{directory.name}.partial")
    make_directory_durably(directory.parent, files=files)
    files.remove_tree(temporary)
    files.make_dir(temporary)
    try:
        yield temporary
    except (OSError, LearnerError):
        with suppress(OSError):
            files.remove_tree(temporary)
        raise
    before_rename()
    replace_directory_durably(temporary, directory, files=files)
