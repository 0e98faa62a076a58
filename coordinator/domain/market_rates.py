"""What a worker brings to a job, measured from what it brought: rate with uncertainty, admitted share, how long it stays.

A worker's rate is counted as if all of its slots were busy. Half a load makes half a rate on hardware that decodes row by row in
parallel, so an hour in which others did the work says nothing bad about a worker; and a worker that cannot keep up is soon loaded
fully and then measured as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.domain.capacity_inputs import Estimate
from coordinator.domain.model import QuoteRow, WorkerSession
from pricing.quotes import TOKENS
from pricing.throughput import Reliability, Throughput

WINDOWS = 6  # that a worker's newest work is cut into: their spread is the uncertainty
MOMENT_S = 1e-6
NEWEST = 64  # completions that show a faster pace: of fewer the length alone would
QUOTED_S = 60.0  # a rate that a quote was made from counts like so many seconds of observation then
PRIOR_COMPLETIONS = 20.0  # a worker of which nothing is known counts as if so many had been admitted at the job's share
HOUR_S = 3600.0
USUAL_STAY = 0.9  # chance of staying an hour, before anything was seen
GUESSED_TOKENS_PER_S = 10.0  # of a worker that did not measure itself
TURN_TOKENS = 1 << 20  # of the turns that are looked at together: their rows hold the tokens


@dataclass(frozen=True, slots=True)
class Made:
    """One accepted completion: when its lease was issued and when it came in, Unix seconds; its tokens."""

    leased_at: float
    accepted_at: float
    tokens: int = 1


def most_turns(new_tokens: int, most: int) -> int:
    """How many turns of up to `new_tokens` tokens are looked at together: some for a rate at least, `most` at most."""
    return max(NEWEST, min(most, TURN_TOKENS // new_tokens))


def throughput(made: Sequence[Made], *, slots: int, start: Throughput, tokens: float = 1.0) -> Throughput:
    """`start` with what was seen, in windows of the time in which the worker had work, each as if all slots had been busy.

    Counted in completions of the mean length that they have now, `tokens`: completions become longer and shorter as the policy learns,
    and a worker that has waited for a while is compared with those that worked.
    """
    if not made:
        return start
    first, last = min(one.leased_at for one in made), max(one.accepted_at for one in made)
    width = (last - first) / WINDOWS
    found = start
    for place in range(WINDOWS):
        begin, end = first + place * width, first + (place + 1) * width
        is_last = place == WINDOWS - 1
        done = sum(one.tokens for one in made if begin < one.accepted_at <= end or (is_last and one.accepted_at > end)) / tokens
        seconds = _full_seconds(made, begin, end, slots)
        if seconds > MOMENT_S:
            found = found.observed(done, seconds, end)
    return found


def _full_seconds(made: Sequence[Made], begin: float, end: float, slots: int) -> float:
    """Seconds with work between `begin` and `end`, shortened by the share of the slots that stood empty."""
    spans = sorted((max(one.leased_at, begin), min(one.accepted_at, end)) for one in made)
    spans = [(a, b) for a, b in spans if b > a]
    return min(_covered(spans), math.fsum(b - a for a, b in spans) / slots)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in any of the spans, which are in order of their begin."""
    union, until = 0.0, -math.inf
    for a, b in spans:
        union += max(0.0, b - max(a, until))
        until = max(until, b)
    return union


def work_rate(made: Sequence[Made], *, slots: int) -> float:
    """Accepted tokens per second with all slots busy, which pay by the token is made from; 0: none.

    Over all of it, or over the newest if that is more: who was given little work, or was slow for a while, is not paid many times its
    price once it works as it can.
    """
    newest = sorted(made, key=lambda one: one.accepted_at)[-NEWEST:]
    return max(_full_rate(made, slots), _full_rate(newest, slots))


def _full_rate(made: Sequence[Made], slots: int) -> float:
    seconds = _full_seconds(made, -math.inf, math.inf, slots)
    return sum(one.tokens for one in made) / seconds if seconds > MOMENT_S else 0.0


def quoted_rate(quote: QuoteRow | None) -> float | None:
    """Accepted tokens per second that a quote was made from; None when it was not made from a rate, or for no money."""
    if quote is None or not quote.uusd_per_million_tokens or not quote.uusd_per_idle_hour:
        return None
    return quote.uusd_per_idle_hour / HOUR_S * TOKENS / quote.uusd_per_million_tokens


def claimed(tokens_per_s: float, *, tokens: float, quote: QuoteRow | None, now: float) -> Throughput:
    """What is known of a worker's completions per second without looking at its work: its own benchmark, and an older quote.

    Args:
        tokens_per_s: the worker's word; 0: none.
        tokens: mean length of a completion.
        quote: the newest that was made from a rate.
        now: Unix seconds.
    """
    claim = (tokens_per_s or GUESSED_TOKENS_PER_S) / tokens
    rate = quoted_rate(quote)
    if rate is None or quote is None:
        return Throughput(claim, now)
    return Throughput(claim, quote.made_at).observed(rate / tokens * QUOTED_S, QUOTED_S, quote.made_at)


def admitted(good: int, bad: int, *, usual: float = 1.0) -> Estimate:
    """The share of finished completions that end in a step; `usual` is the job's share, which a worker starts from."""
    total = good + bad + PRIOR_COMPLETIONS
    share = (good + usual * PRIOR_COMPLETIONS) / total
    return Estimate(share, math.sqrt(share * (1 - share) / total))


def reliability(sessions: Sequence[WorkerSession], now: float) -> float:
    """The chance that the worker is still there an hour later, from how long its stays were and that they ended."""
    hours = sum(_ended(session) - session.started_at for session in sessions) / HOUR_S
    losses = sum(session.ended_at is not None for session in sessions)
    return Reliability(USUAL_STAY, now).observed(max(hours, 0.0), losses, now).hourly(now)


def _ended(session: WorkerSession) -> float:
    return session.last_seen_at if session.ended_at is None else session.ended_at


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them stay within (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
