"""What a card brings: as many completions at once as its memory holds, at the rate that was measured with so many."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from coordinator.domain.capacity_inputs import Lengths
from simulator.figures import assumptions as given


@dataclass(frozen=True, slots=True)
class Fit:
    """One card with one model: completions at once, and tokens per second then."""

    users: int
    tokens_per_s: float


def fit(card: given.Card, model: given.Model, mean_tokens: float) -> Fit:
    """With completions of this mean length."""
    users = min(users_that_fit(card, model, mean_tokens), model.measured[card.name].users)
    return Fit(users, tokens_per_s(card, model, users))


def users_that_fit(card: given.Card, model: given.Model, mean_tokens: float) -> int:
    """Completions whose keys and values lie in memory beside the weights; each is half done on average, long ones are seen more often."""
    seen_tokens = given.PROMPT_TOKENS + mean_tokens * (1 + lengths().cv_squared) / 2
    free_bytes = given.MEMORY_SHARE * card.memory_bytes - model.bf16_bytes
    return int(free_bytes / (given.KV_BYTES * seen_tokens))


def tokens_per_s(card: given.Card, model: given.Model, users: float) -> float:
    """With so many completions at once: the card's curve through the model's own point, flat beyond it."""
    at = model.measured[card.name]
    return _on_curve(card, min(users, at.users)) * at.tokens_per_s / _on_curve(card, at.users)


def _on_curve(card: given.Card, users: float) -> float:
    """Between the measured points by straight lines; flat beyond the last."""
    place = bisect_right([at for at, _ in card.curve], users)
    if place == len(card.curve):
        return card.curve[-1][1]
    (low, slow), (high, fast) = card.curve[place - 1], card.curve[place]
    return slow + (users - low) / (high - low) * (fast - slow)


@lru_cache(maxsize=1)
def lengths() -> Lengths:
    """Of completions, relative to their mean."""
    return Lengths.lognormal(given.CV, cap=given.MOST_TOKENS / given.MEAN_TOKENS)
