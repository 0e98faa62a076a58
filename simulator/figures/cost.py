"""Figure (c): what a step costs in a data centre and with ECHO-2, for 4B and 8B, at dated prices.

Centralised, one kind of machine: *together* (one set of cards generates, then trains, as verl's usual set-up; S = 0) and *apart* (some
cards train, others generate over data-centre links, with the same S as ECHO-2: the strongest baseline). ECHO-2: the same learner, RTX
4090s over the wide area.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from random import Random

from simulator.figures import assumptions as given
from simulator.figures import cards
from simulator.figures.jobs import BACKGROUND, DELTAS, PAPER, Ran, centralised, job, run

BOUND = 6
HOURS = 4.0
MEANS = (750.0, 1500.0, 3000.0)  # tokens of a completion
DRAWS = 20


@dataclass(frozen=True, slots=True)
class Point:
    """One way to train one model, priced: USD a step."""

    model: given.Model
    mean_tokens: float
    way: str
    step_s: float
    utilisation: float  # of the learner's cards, training
    workers: float
    usd: dict[str, float]  # by name of the prices


TOGETHER, APART = "centralised, together (S = 0)", f"centralised, apart (S = {BOUND})"
ECHO_FULL, ECHO_IDLE = (
    f"ECHO-2, full snapshots in the background (S = {BOUND})",
    f"ECHO-2, full snapshots, standing still (S = {BOUND})",
)
ECHO_DELTA = f"ECHO-2, deltas (S = {BOUND})"


def points() -> list[Point]:
    """All of the figure: every way at the usual length, and centralised against deltas at the others."""
    found = []
    for model in given.MODELS:
        for mean in MEANS:
            found += [together(model, mean), _apart(model, mean), _echo(model, mean, ECHO_DELTA)]
        found += [_echo(model, given.MEAN_TOKENS, way) for way in (ECHO_FULL, ECHO_IDLE)]
    return found


def together(model: given.Model, mean_tokens: float) -> Point:
    """Generation drains to its last completion, then all cards train; swapping weights is free."""
    generating_s = drain_s(model, mean_tokens)
    training_s = model.train_s(mean_tokens)
    step_s = generating_s + training_s
    usd = {prices.name: model.learner_cards * prices.h100 * step_s / 3600 for prices in given.PRICES}
    return Point(model, mean_tokens, TOGETHER, step_s, training_s / step_s, 0.0, usd)


def drain_s(model: given.Model, mean_tokens: float) -> float:
    """Mean seconds until the last of R / cards completions of a card ends; each is faster the fewer run."""
    rng = Random(given.SEED)  # noqa: S311 (seeded on purpose)
    each = given.GROUP_SIZE * given.GROUPS // model.learner_cards
    slowest = []
    for _ in range(DRAWS):
        slowest.append(max(_drained_s(model, mean_tokens, each, rng) for _ in range(model.learner_cards)))
    return sum(slowest) / len(slowest)


def _drained_s(model: given.Model, mean_tokens: float, count: int, rng: Random) -> float:
    """All begin at once that fit; each that ends makes room for the next. `made`: tokens of one that runs from the start on."""
    waiting = [mean_tokens * cards.lengths().draw(rng) for _ in range(count)]
    room = cards.users_that_fit(given.H100, model, mean_tokens)
    running, waiting = sorted(waiting[:room]), waiting[room:]
    seconds, made = 0.0, 0.0
    while running:
        end = running[0]
        seconds += (end - made) * len(running) / cards.tokens_per_s(given.H100, model, len(running))
        made = end
        if waiting:
            heapq.heapreplace(running, made + waiting.pop())
        else:
            heapq.heappop(running)
    return seconds


def _apart(model: given.Model, mean_tokens: float) -> Point:
    ran = run(centralised(model, BOUND, hours=HOURS, mean_tokens=mean_tokens))
    usd = {prices.name: ran.usd_per_step(model.learner_cards, prices.h100, prices.h100) for prices in given.PRICES}
    return _point(model, mean_tokens, APART, ran, usd)


def _echo(model: given.Model, mean_tokens: float, way: str) -> Point:
    how = {ECHO_DELTA: DELTAS, ECHO_FULL: BACKGROUND, ECHO_IDLE: PAPER}[way]
    ran = run(job(model, how, BOUND, hours=HOURS, links=given.WIDE_AREA, mean_tokens=mean_tokens))
    usd = {prices.name: ran.usd_per_step(model.learner_cards, prices.h100, prices.rtx4090) for prices in given.PRICES}
    return _point(model, mean_tokens, way, ran, usd)


def _point(model: given.Model, mean_tokens: float, way: str, ran: Ran, usd: dict[str, float]) -> Point:
    return Point(model, mean_tokens, way, ran.step_s, ran.utilisation, ran.workers, usd)


def saving(found: list[Point], model: given.Model, mean_tokens: float, prices: str, baseline: str, way: str = ECHO_DELTA) -> float:
    """Share of the baseline's cost that is not spent."""
    at = {one.way: one.usd[prices] for one in found if one.model is model and one.mean_tokens == mean_tokens}
    return 1 - at[way] / at[baseline]


def assumptions() -> list[str]:
    """Beside the figure."""
    return [
        *(f"{prices.name}: {prices.source}" for prices in given.PRICES),
        "together: all cards generate, R / cards completions each, then train; no time for changing over",
        "apart: whole H100s beside the learner, as many as the planned rate asks for: "
        + "; ".join(f"{model.name}, {_cards_in_words(model)}" for model in given.MODELS),
        f"links of a worker {given.WIDE_AREA['up_mbps']:g} Mbit/s both ways, the coordinator's {given.SEEDER_MBPS:g} up, round trip"
        f" {1000 * given.RTT_S:g} ms; in the data centre 10 Gbit/s and 1 ms",
        f"apart and ECHO-2: {HOURS:g} hours of the fleet simulator, seed {given.SEED}, the fleet that activation buys; steady state, without"
        " the start; the learner is the same in all",
    ]


def _cards_in_words(model: given.Model) -> str:
    """How much of the last card is not needed."""
    return ", ".join(
        f"{given.HEADROOM * given.GROUP_SIZE * given.GROUPS * mean / model.train_s(mean) / cards.fit(given.H100, model, mean).tokens_per_s:.1f}"
        f" at {mean:,.0f} tokens"
        for mean in MEANS
    )


def table(found: list[Point]) -> list[str]:
    """Markdown: cost."""
    names = [prices.name for prices in given.PRICES]
    lines = [
        f"| model | tokens | way | s a step | learner trains | workers | {' | '.join(f'USD a step, {name}' for name in names)} |",
        "|---|---|---|---|---|---|" + "---|" * len(names),
    ]
    for one in found:
        cells = " | ".join(f"{one.usd[name]:.3f}" for name in names)
        lines.append(
            f"| {one.model.name} | {one.mean_tokens:,.0f} | {one.way} | {one.step_s:.1f} | {one.utilisation:.0%} | {one.workers:.1f}"
            f" | {cells} |"
        )
    return lines


def savings_table(found: list[Point]) -> list[str]:
    """Markdown: what ECHO-2 with deltas saves, in percent of each baseline."""
    names = [prices.name for prices in given.PRICES]
    lines = [
        f"| model | tokens | against | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for model in given.MODELS:
        for mean in MEANS:
            for baseline in (TOGETHER, APART):
                cells = " | ".join(f"{-saving(found, model, mean, name, baseline):+.1%}" for name in names)
                lines.append(f"| {model.name} | {mean:,.0f} | {baseline} | {cells} |")
    return lines
