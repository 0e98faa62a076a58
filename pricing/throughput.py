"""What a worker brings, learnt from what it brought: rate with its uncertainty, and how long it stays.

Both start from the claim in the offer, believe what was seen the more the more of it there is, and forget with a half-life, so that a
card that was throttled for an hour is not judged by it for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log, log1p, sqrt

RATE_HALF_LIFE_S = 1_800.0
STAY_HALF_LIFE_S = 7 * 86_400.0
CLAIM_DEVIATION = 0.5  # of a claimed rate, or of the one seen if that is higher
CLAIM_S = 120.0  # one window as long is believed as much as the claim
MOMENT_S = 1e-6  # less is nothing
CLAIM_HOURS = 4.0  # a claimed reliability counts as much as so many hours of observation


@dataclass(frozen=True, slots=True)
class Throughput:
    """A worker's rate, completions (or tokens) per second of time in which it had work.

    Windows of observation are weighed by their length and age. Claim and mean are weighed by their variance; that of the mean is the
    spread of the windows' rates over their effective number, and grows as they age.
    """

    claim: float
    at: float
    half_life_s: float = RATE_HALF_LIFE_S
    done: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # Σ weight · seconds · rate²
    weights: float = 0.0  # Σ (weight · seconds)²

    def observed(self, done: float, seconds: float, now: float) -> Throughput:
        """With one more window of `seconds` that ended now and brought `done`. Raises ValueError for a window that is none."""
        if not (seconds > 0 and done >= 0):
            raise ValueError(f"{done} completions in {seconds} s: give a window of more than 0 s that brought 0 or more")
        keep = self._kept(now)
        return Throughput(
            self.claim,
            max(now, self.at),
            self.half_life_s,
            self.done * keep + done,
            self.seconds * keep + seconds,
            self.squares * keep + done * done / seconds,
            self.weights * keep * keep + seconds * seconds,
        )

    def rate(self, now: float) -> float:
        """The best guess."""
        share = self._share(now)
        return self.claim if share == 0 else (1 - share) * self.claim + share * self.done / self.seconds

    def deviation(self, now: float) -> float:
        """Standard deviation of `rate`."""
        return sqrt(1 - self._share(now)) * self._doubt()

    def surely(self, now: float, deviations: float = 1.0) -> float:
        """The rate to plan with: so many deviations below the best guess, 0 at least."""
        return max(0.0, self.rate(now) - deviations * self.deviation(now))

    def _kept(self, now: float) -> float:
        """The share of the old weight that is left; a clock that stepped back forgets nothing."""
        return float(0.5 ** (max(0.0, now - self.at) / self.half_life_s))

    def _doubt(self) -> float:
        """The claim's own deviation."""
        return CLAIM_DEVIATION * max(self.claim, self.done / self.seconds if self.seconds > 0 else 0.0)

    def _share(self, now: float) -> float:
        """How far observation is believed: 0 is the claim alone."""
        seen, doubt = self.seconds * self._kept(now), self._doubt()
        if seen < MOMENT_S or doubt <= 0:
            return 0.0
        mean = self.done / self.seconds
        windows = self.seconds * self.seconds / self.weights
        spread = (self.squares / self.seconds - mean * mean) / max(windows - 1, 1.0) / self._kept(now)
        least = (doubt * CLAIM_S / seen) ** 2 / windows  # a few windows that agree by chance prove little
        return doubt * doubt / (doubt * doubt + max(spread, least))


@dataclass(frozen=True, slots=True)
class Reliability:
    """The chance that a worker is still there an hour later, from how its leases ended.

    Losses are a Poisson process of unknown rate with a Gamma prior: `losses` in `hours`. `hourly` is the chance of no loss in the next
    hour, the rate integrated out.
    """

    claim: float
    at: float
    half_life_s: float = STAY_HALF_LIFE_S
    hours: float = 0.0
    losses: float = 0.0

    def observed(self, hours: float, losses: int, now: float) -> Reliability:
        """With the time under lease and the leases that were lost in it. Raises ValueError when one is negative."""
        if hours < 0 or losses < 0:
            raise ValueError(f"{losses} losses in {hours} h: give 0 or more of both")
        keep = self._kept(now)
        return Reliability(self.claim, max(now, self.at), self.half_life_s, self.hours * keep + hours, self.losses * keep + losses)

    def hourly(self, now: float) -> float:
        """Chance of no loss in one hour; 0 only for a claim of 0."""
        if self.claim <= 0:
            return 0.0
        keep = self._kept(now)
        hours = CLAIM_HOURS + self.hours * keep
        before = -log(self.claim) / log1p(1 / CLAIM_HOURS)  # losses that give back the claim where nothing was seen
        return exp(-(before + self.losses * keep) * log1p(1 / hours))

    def _kept(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self.at) / self.half_life_s))


def losses_per_hour(hourly: float) -> float:
    """The rate of losses that leaves this chance of lasting an hour; inf for 0."""
    return -log(hourly) if hourly > 0 else inf
