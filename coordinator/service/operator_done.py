"""What a command of an operator or author leaves behind: the answer, and who must be told."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from coordinator.service.tokens import Caller


@dataclass(frozen=True, slots=True)
class Done:
    """The answer of a command, and the topics of `Wakeups` to notify once its rows are durable."""

    answer: BaseModel
    topics: frozenset[str] = frozenset()


def said(verb: str, caller: Caller, reason: str) -> str:
    """The reason that is stored with a state: what was done, by whom, and their words."""
    words = f"{verb} by {caller.token.name}"
    return f"{words}: {reason}" if reason else words
