"""Whether an environment runs with so many turns. Light to import: jailed children ask it too."""

from __future__ import annotations


def turns_refused(kind: str, *, plays: bool, max_turns: int) -> str | None:
    """Why an environment must not run with so many turns: a job allows turns exactly when its environment takes them."""
    if plays and max_turns == 1:
        return f"environment.type {kind!r} takes several turns: set environment.max_turns (8, say)"
    if not plays and max_turns > 1:
        return f"environment.max_turns is {max_turns}, and {kind!r} asks for one completion only: remove it"
    return None
