"""Whether libp2p is here, and how it is imported: late, once, quietly. Nothing outside this package imports it.

Importing takes about half a second of CPU. Its loggers are silenced below CRITICAL:
they warn about every connection that is closed, and log as errors what any stranger can bring about; what concerns a call is raised by it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from types import ModuleType

from p2p.errors import ControlMissing

INSTALL = (
    "python -m pip install 'echo2[p2p]'; where it must be compiled, install a C compiler and the headers of GMP and Python first "
    "(Debian: apt-get install gcc libgmp-dev python3-dev)"
)


def version() -> str | None:
    """The installed version of libp2p; None when there is none. Imports nothing."""
    try:
        return importlib.metadata.version("libp2p")
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> tuple[bool, str]:
    """For `doctor`: whether the peer-to-peer control plane can run here, and a line that says so. Imports libp2p to be sure."""
    found = version()
    if found is None:
        return False, "libp2p is not installed: control messages go through the coordinator's HTTPS"
    try:
        load()
    except ControlMissing as error:
        return False, f"{error}; control messages go through the coordinator's HTTPS"
    return True, f"libp2p {found}"


def load() -> ModuleType:
    """The module that builds on libp2p. Raises ControlMissing, with what to install."""
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, PendingDeprecationWarning, SyntaxWarning, UserWarning):
                warnings.simplefilter("ignore", category)  # of some sixty packages that this import brings in
            node = importlib.import_module("p2p.adapters.control.node")
    except Exception as error:  # a package that is half there raises anything
        raise ControlMissing(f"libp2p cannot be used here ({error}); to install it: {INSTALL}") from error
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    return node
