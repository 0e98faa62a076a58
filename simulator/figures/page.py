"""docs/figures.md: the numbers behind the figures and what they say. Written by the same command, so that both agree."""

from __future__ import annotations

from simulator.figures import assumptions as given
from simulator.figures import cost, spread, staleness
from simulator.figures.jobs import WAYS


def page(a: list[staleness.Point], b: list[spread.Point], c: list[cost.Point], folder: str) -> str:
    """The whole page."""
    lines = [
        "# The paper's figures, redrawn",
        "",
        "`make figures` draws them and writes this page: the fleet simulator (`docs/simulate.md`) with the product's own grant, lease, seal,",
        "publication, activation and swarm rules, seeds fixed. Not one number is measured on GPUs; rates and prices are dated points of",
        "others, named below. The paper's own batch size, prices, links and seconds are not public, so its curves cannot be laid over ours.",
        "",
        "## Taken for given in all",
        "",
        *(f"* {line}" for line in given.common()),
        "",
        "## Utilisation and cost against S",
        "",
        f"![Utilisation and cost against S]({folder}/staleness.png)",
        "",
        *(f"* {line}" for line in staleness.assumptions()),
        "",
        *staleness.table(a),
        "",
        "\\* some review found no fleet among those offered that meets the rule, and took the most that is allowed.",
        "",
        *_read_staleness(a),
        "",
        "## Dissemination against the number of workers",
        "",
        f"![Dissemination against the number of workers]({folder}/dissemination.png)",
        "",
        *(f"* {line}" for line in spread.assumptions()),
        "",
        "Seconds until the last worker has the file:",
        "",
        *spread.table(b),
        "",
        *_read_spread(b),
        "",
        "## Cost of a step, centralised and with ECHO-2",
        "",
        f"![Cost of a step]({folder}/cost.png)",
        "",
        *(f"* {line}" for line in cost.assumptions()),
        "",
        *cost.table(c),
        "",
        "Cost of ECHO-2 with deltas against the two baselines:",
        "",
        *cost.savings_table(c),
        "",
        *_read_cost(c),
        "",
    ]
    return "\n".join(lines)


def _read_staleness(found: list[staleness.Point]) -> list[str]:
    at = {(one.way.name, one.bound): one for one in found}
    paper, background, deltas = WAYS
    good = [bound for bound in staleness.BOUNDS if at[deltas.name, bound].ran.utilisation >= 0.97]
    good_full = [bound for bound in staleness.BOUNDS if at[background.name, bound].ran.utilisation >= 0.97]
    cheaper = {way.name: 1 - at[way.name, 11].usd_per_step / at[way.name, 6].usd_per_step for way in (paper, deltas)}
    best_paper = max(staleness.BOUNDS, key=lambda bound: at[paper.name, bound].ran.utilisation)
    return [
        "What it says: slack hides the broadcast. With deltas the learner is busy at least 97 % of the time from S ="
        f" {good[0] if good else 'none'} on, with full",
        f"snapshots in the background from S = {good_full[0] if good_full else 'none'} on; workers that stand still while they load reach"
        f" {at[paper.name, best_paper].ran.utilisation:.0%} at S = {best_paper}, and for small S no fleet",
        "suffices. κ = S − 1 spends nearly all of the slack on rare publications: group completion then passes the bound (see the warning",
        f"line in `capacity.md`). From S = 6 to 11 a step becomes {cheaper[paper.name]:.0%} cheaper where workers stand still, and"
        f" {cheaper[deltas.name]:.0%} with deltas.",
    ]


def _read_spread(found: list[spread.Point]) -> list[str]:
    def seconds(crowd: str, size: str, topology: str, workers: int) -> float:
        return next(
            one.last_s for one in found if (one.crowd, one.size, one.topology, one.workers) == (crowd, size, topology, workers)
        )

    even, mixed = spread.CROWDS
    full, delta = spread.SIZES
    return [
        f"What it says: with equal links, 64 workers and a full snapshot a star needs {seconds(even, full, 'star', 64) / 3600:.1f} h,"
        f" a tree {seconds(even, full, 'tree', 64) / 60:.0f} min, chain and swarm {seconds(even, full, 'chain', 64) / 60:.1f} and"
        f" {seconds(even, full, 'swarm', 64) / 60:.1f} min:",
        f"the swarm needs {seconds(even, full, 'swarm', 64) / seconds(even, full, 'chain', 64) - 1:.0%} more than the ideal chain, and for 64"
        f" workers {seconds(even, full, 'swarm', 64) / seconds(even, full, 'swarm', 1) - 1:.0%} more than for one (beyond 64 that is the formula's word). With mixed"
        " links chain and tree are as slow as their",
        f"slowest inner member ({seconds(mixed, full, 'chain', 64) / 60:.0f} and {seconds(mixed, full, 'tree', 64) / 60:.0f} min",
        f"at 64), the swarm uses what everybody has ({seconds(mixed, full, 'swarm', 64) / 60:.0f} min). A delta of 61 MB changes the scale:"
        f" {seconds(mixed, delta, 'swarm', 64):.1f} s over the mixed links, and even the star needs only"
        f" {seconds(mixed, delta, 'star', 64):.0f} s.",
    ]


def _read_cost(found: list[cost.Point]) -> list[str]:
    def span(baseline: str, model: given.Model) -> str:
        values = [cost.saving(found, model, mean, prices.name, baseline) for mean in cost.MEANS for prices in given.PRICES]
        return f"{-min(values):+.1%} to {-max(values):+.1%}"

    inside = [model.name for model in given.MODELS if _spans(found, model)]
    usual = {
        (model.name, prices.name): cost.saving(found, model, given.MEAN_TOKENS, prices.name, cost.TOGETHER)
        for model in given.MODELS
        for prices in given.PRICES
    }
    community = f"{-usual['4B', 'community']:+.1%} for 4B and {-usual['8B', 'community']:+.1%} for 8B"
    mixed = f"{-usual['4B', 'secure + community']:+.1%} and {-usual['8B', 'secure + community']:+.1%}"
    return [
        "Where we stand against the paper's −33.3 to −36.3 %: against one set of cards that generates and then trains (the set-up of the",
        f"paper's named baseline) we compute {community} at community prices, {mixed} with the learner on secure and the workers on",
        f"community machines; over all prices and lengths tried {span(cost.TOGETHER, given.SMALL)} (4B) and"
        f" {span(cost.TOGETHER, given.LARGE)} (8B). The paper's range lies",
        f"within that span for {' and '.join(inside) or 'neither model'}: where in it one stands depends on two prices and on how long"
        " generation keeps a training",
        "node from training, and none of the three is public. Against a data centre that overlaps as ECHO-2 does (apart, the same S) what is left is the price of a token alone:",
        f"{span(cost.APART, given.SMALL)} (4B) and {span(cost.APART, given.LARGE)} (8B); a plus sign means that cheap cards were *not* cheaper"
        " there. Full snapshots",
        "over 500 Mbit/s lose that gain again where a broadcast is longer than a few steps: the table has the rows.",
    ]


def _spans(found: list[cost.Point], model: given.Model) -> bool:
    """Whether the paper's range lies between the least and the greatest saving of a model."""
    values = [cost.saving(found, model, mean, prices.name, cost.TOGETHER) for mean in cost.MEANS for prices in given.PRICES]
    return min(values) <= given.PAPER_SAVING[0] and given.PAPER_SAVING[1] <= max(values)
