"""What a provider's clock shows now, from what its replies said. Bills run by it; our own clock may step."""

from __future__ import annotations

from dataclasses import dataclass

MOST_APART_S = 86_400.0  # a Date farther from our clock is not believed: one wrong header would bill for years


@dataclass(slots=True)
class ProviderClock:
    """Between replies it runs as ours does; when ours steps back, only the time since the last reading is lost.

    Unix seconds: `at` by the provider's clock, None before anything is known; `ours` when that was read.
    """

    at: float | None = None
    ours: float = 0.0

    def said(self, at: float | None, *, ours: float) -> float:
        """What a reply said of its time (None: nothing); the time that is taken for it."""
        expected = self.now(ours=ours)
        self.at = expected if at is None or abs(at - ours) > MOST_APART_S else at
        self.ours = ours
        return self.at

    def resume(self, paid_until: float, *, ours: float) -> None:
        """After a start: it cannot be earlier than what it has billed up to."""
        if self.at is None:
            self.at, self.ours = max(paid_until, ours), ours

    def now(self, *, ours: float) -> float:
        """The provider's time; ours until anything is known of it."""
        if self.at is None:
            return ours
        self.at += max(ours - self.ours, 0.0)
        self.ours = ours
        return self.at
