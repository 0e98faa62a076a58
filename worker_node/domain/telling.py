"""What an owner is told about calls that fail: each trouble once, seldom again, and its end. Pure: the time is a parameter."""

from __future__ import annotations

import re

from worker_node.domain.events import Call, CallFailed, Outcome
from worker_node.domain.report import lasting

REPEAT_S = 60.0
NEXT = {
    Outcome.TRY_AGAIN: "; it is tried again until it answers",
    Outcome.REJOIN: "; joining again",
}
CHECK = ": is the address right, and does `echo2 serve` run there?"
_PULSE = (Call.JOIN, Call.BEAT)  # what is always asked for: their answer ends the troubles of all other calls


def ends_session(failure: CallFailed) -> bool:
    """Whether the worker stops for this failure; its last words name it then."""
    return failure.outcome in (Outcome.FENCED, Outcome.FATAL) or (failure.call is Call.JOIN and failure.outcome is Outcome.REFUSED)


class Telling:
    """Which calls fail now, and what was said of them. `now` is any clock that never goes back, in seconds."""

    def __init__(self) -> None:
        self._since: dict[Call, float] = {}
        self._told: set[Call] = set()
        self._said: dict[str, float] = {}

    def failed(self, failure: CallFailed, now: float) -> str | None:
        """The line for a failed call; None when its words were said less than REPEAT_S ago, or when the worker ends anyway."""
        if failure.call is Call.LEAVE or ends_session(failure):
            return None
        self._since.setdefault(failure.call, now)
        self._said = {words: at for words, at in self._said.items() if now - at < REPEAT_S}
        words = re.sub(r"\d+", "#", failure.reason)  # another time or count in the same words is no news
        if words in self._said:
            return None
        self._said[words] = now
        self._told.add(failure.call)
        check = CHECK if failure.call is Call.JOIN and failure.outcome is Outcome.TRY_AGAIN else ""
        return f"{failure.reason}{NEXT.get(failure.outcome, '')}{check}"

    def answered(self, call: Call, now: float) -> str | None:
        """The line for an answered call; None unless it failed before, and an owner was told so."""
        since = self._since.pop(call, None)
        was_told = call in self._told
        self._told.discard(call)
        if call in _PULSE:
            was_told = was_told or bool(self._told)
            self._since.clear()
            self._told.clear()
        return f"the coordinator answers now, after {lasting(now - since)}" if since is not None and was_told else None
