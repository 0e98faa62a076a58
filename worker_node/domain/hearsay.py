"""What the control plane tells of new versions. Only a beat's answer is an order; hearing of a version makes the next beat come at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from worker_node.domain.weights import Version

GAP_S = 0.6  # longer than a coordinator answers beats from one reading of its rows
TRIES = 3


class Hearsay:
    """The version heard of last, until a beat's answer names it or something newer of its job. Costs at most TRIES beats a version, GAP_S apart."""

    def __init__(self) -> None:
        self._heard: Version | None = None
        self._left = 0
        self._not_before = -inf

    def take(self, version: Version) -> None:
        """The control plane named a version; the one it named last changes nothing."""
        if version != self._heard:
            self._heard, self._left = version, TRIES

    def wants_beat(self, named: Sequence[Version], now: float) -> bool:
        """Whether a beat should go out now; `named` are the versions of the newest answer."""
        return self._is_open(named) and now >= self._not_before

    def beat_sent(self, now: float) -> None:
        """A beat went out, for whatever reason."""
        self._left = max(self._left - 1, 0)
        self._not_before = now + GAP_S

    def next_deadline(self, named: Sequence[Version], now: float) -> float:
        """When `wants_beat` becomes true by itself; infinity when it does not."""
        return self._not_before if self._is_open(named) and self._not_before > now else inf

    def _is_open(self, named: Sequence[Version]) -> bool:
        heard = self._heard
        if heard is None or self._left == 0:
            return False
        return not any(one == heard or (one.job_id == heard.job_id and one.number > heard.number) for one in named)
