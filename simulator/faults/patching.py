"""Plants a fault in the product's code at run time, and takes it out again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OURS = ("coordinator", "worker_node", "p2p", "pricing")


class Patch:
    """What was put in place of what."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Another value under a name of a module or class."""
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def function(self, original: Callable[..., Any], instead: Callable[..., Any]) -> None:
        """Another function wherever a module of ours refers to this one."""
        found = [
            (module, name)
            for module_name, module in list(sys.modules.items())
            if module_name.partition(".")[0] in OURS
            for name, value in list(vars(module).items())
            if value is original
        ]
        if not found:
            raise LookupError(f"nothing refers to {original.__qualname__}")
        for module, name in found:
            self.attribute(module, name, instead)

    def undo(self) -> None:
        """Everything as it was."""
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)
        self._undo.clear()


@contextmanager
def planted(plant: Callable[[Patch], None]) -> Iterator[None]:
    """While this is open the product has that fault."""
    patch = Patch()
    try:
        plant(patch)
        yield
    finally:
        patch.undo()
