"""Which workers are active for which job, decided again whenever something that matters changed (DESIGN 4.9, 5).

Three kinds of workers are active: those that ask for no money; those whose rate is to be measured (by the hour, for a short while);
and, of all others, the cheapest set that brings what is missing to the job's required rate times its headroom (`pricing.sharing`).
Until the learner's own time is measured, everyone that the budget allows is active. Who is not active is told why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.domain.capacity import Assessment, assess, fleet_kappa, pause_s
from coordinator.domain.capacity_inputs import CapacityInputs, Estimate, JobShape, Lengths, Loading, Transfer, WorkerCapacity
from coordinator.domain.market_moves import USUAL_MBPS, load_s, settling_s, why_it_stays
from coordinator.domain.market_trials import TRIAL_S, hourly, room, too_dear
from coordinator.domain.model import Job, QuoteRow
from p2p.domain.fluid import fluid_bound
from pricing.activation import Habits
from pricing.cost import HOUR_S, Terms, all_in, reserved_uusd
from pricing.decision import Activation
from pricing.money import usd_to_uusd, uusd_to_usd
from pricing.offers import BYTES_PER_MBIT, TRUST, Offer, Trust
from pricing.pool import Broadcast, Held, Limits, Need, Required
from pricing.sharing import Claim, Unmeasured, shared
from pricing.throughput import Throughput

LEAST_MADE = 16.0  # completions, and
LEAST_SEEN_S = 2.0  # seconds of full work, that make a rate a measured one
LEAST_HOURS = 1e-3  # a job near its end still has a horizon
LEAST_SHARE = 0.05  # of the time in which a worker generates: pauses longer than the time between publications ask for all there is
HOLD_S = (
    30.0  # after a worker became active a set is changed only if it falls short, or much can be saved: rates are still settling
)
HABITS = Habits()
CALM = Habits(margin=0.25, surplus=1.0)
Pauses = Sequence[tuple[float, float]]
"""Rate, and seconds, of each worker."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A job, measured over its newest steps, versions and completions. Seconds, bytes, tokens.

    Attributes:
        train_s: one step; None until enough steps were taken.
        bcast_p95_s: from publication until the version is served, 95th percentile; a forecast until one was measured (`is_bcast_forecast`).
        grade_s: from a completion's arrival to its reward.
        no_signal: share of groups that are replaced because their rewards are all alike.
        lengths: tokens of completions.
        refresh_bytes, start_bytes: of a new version for who holds the one before, and for who holds nothing.
        seeder_up: bytes a second that the coordinator serves weights with; 0: not limited.
    """

    train_s: float | None = None
    bcast_p95_s: float = 0.0
    grade_s: float = 0.0
    no_signal: float = 0.0
    lengths: tuple[int, ...] = ()
    refresh_bytes: float = 0.0
    start_bytes: float = 0.0
    seeder_up: float = 0.0
    is_bcast_forecast: bool = False


@dataclass(frozen=True, slots=True)
class Bidder:
    """A worker that may serve the job, as the market sees it.

    Attributes:
        rate: completions per second with all slots busy.
        tokens_per_s: accepted, in time with work, with all slots busy; 0: not known.
        up_mbps, down_mbps: None where not measured.
        bcast_s, apply_s: means, from publication to serving, and standing still for it.
        tried_until: since then it may be tried again; 0: its trial lasts, or it was never tried.
        quote: the open one.
        holds: it confirmed a version of this job; else it has to load the whole snapshot first.
        is_ready: it may be active now.
        barred: why it may not.
    """

    worker_id: str
    name: str
    owner: str
    uusd_per_hour: int
    slots: int
    rate: Throughput
    admitted: Estimate
    reliability: float
    session_epoch: int = 1
    tokens_per_s: float = 0.0
    bcast_s: float = 0.0
    apply_s: float = 0.0
    up_mbps: float | None = None
    down_mbps: float | None = None
    trust: Trust = "any"
    tried_until: float = 0.0
    quote: QuoteRow | None = None
    holds: bool = True
    is_ready: bool = True
    barred: str = "it has no version yet that can serve the next step"

    @property
    def is_measured(self) -> bool:
        """Whether its rate rests on its work."""
        return self.rate.done >= LEAST_MADE and self.rate.seconds >= LEAST_SEEN_S

    def planned_rate(self, now: float) -> float:
        """Admitted completions per second to count on.

        The best guess where it was measured (the job's headroom is for its error), one standard deviation less where it is claimed.
        """
        return self.rate.surely(now, 0.0 if self.is_measured else 1.0) * self.admitted.value

    def is_on_trial(self, now: float) -> bool:
        """Whether it is active to be measured, and paid by the hour for it."""
        return not self.is_measured and (self.tried_until == 0 or (self.tokens_per_s == 0 and now >= self.tried_until))


@dataclass(frozen=True, slots=True)
class JobMarket:
    """One running job and those who would work for it. Money: spent in all and in the last hour, and its rented machines' an hour."""

    job: Job
    figures: Figures
    bidders: tuple[Bidder, ...]
    spent_uusd: int = 0
    hour_uusd: int = 0
    rented_uusd: int = 0
    changed_at: float | None = None  # when a worker became active last


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided for one job.

    Attributes:
        active: why, by worker.
        timed: those of them that are paid by the hour to be measured.
        standby: why not, by worker.
        required, offered: completions per second; None before the learner's time is measured.
        usd_per_hour: asked by all active workers.
        reason: the decision in words.
    """

    active: Mapping[str, str]
    timed: frozenset[str]
    standby: Mapping[str, str]
    required: float | None
    offered: float
    usd_per_hour: float
    reason: str
    activation: Activation | None = None
    assessment: Assessment | None = None
    inputs: CapacityInputs | None = field(default=None, repr=False)


def decide(markets: Sequence[JobMarket], now: float) -> dict[str, Verdict]:
    """Each job's verdict, by job id. A worker that asks for money is active for one job at most."""
    pool = _Pool.of(markets)
    markets = [replace(market, bidders=tuple(_weighed(market, one, pool, now) for one in market.bidders)) for market in markets]
    chosen = _chosen(markets, pool, now)
    taken: set[str] = set()
    verdicts: dict[str, Verdict] = {}
    for market in sorted(markets, key=lambda market: (-market.job.config.workers.weight, market.job.id)):
        job_id = market.job.id
        elsewhere = taken | {pick.offer_id for other, activation in chosen.items() if other != job_id for pick in activation.picked}
        open_ = replace(market, bidders=tuple(bidder for bidder in market.bidders if bidder.worker_id not in elsewhere))
        verdict = _priced(open_, chosen[job_id], now) if job_id in chosen else _everyone(open_, now)
        taken |= {one for one in verdict.active if _price(market, one)}
        busy = {one.worker_id: "standby: it works for another job" for one in market.bidders if one.worker_id in elsewhere}
        verdicts[job_id] = replace(verdict, standby={**verdict.standby, **busy})
    return verdicts


@dataclass(frozen=True, slots=True)
class _Pool:
    """Workers that ask for money.

    Attributes:
        contested: those that several jobs could use.
        busy: for which job each is active.
        starting: jobs whose learner is being measured.
    """

    contested: frozenset[str]
    busy: Mapping[str, str]
    starting: frozenset[str]

    @classmethod
    def of(cls, markets: Sequence[JobMarket]) -> _Pool:
        """Of all running jobs."""
        able = [(market, one) for market in markets for one in market.bidders if one.is_ready and one.uusd_per_hour]
        jobs = Counter(one.worker_id for _, one in able)
        return cls(
            frozenset(worker_id for worker_id, count in jobs.items() if count > 1),
            {one.worker_id: market.job.id for market, one in able if one.quote is not None},
            frozenset(market.job.id for market in markets if _is_starting(market)),
        )


def _weighed(market: JobMarket, one: Bidder, pool: _Pool, now: float) -> Bidder:
    """The bidder, as one that may not be active where money may not be spent on it, or where it does not pay to take it from others."""
    why = (_unpaid(market, one, now) or _unmoved(market, one, pool)) if one.is_ready else ""
    return replace(one, is_ready=False, barred=why) if why else one


def _unmoved(market: JobMarket, one: Bidder, pool: _Pool) -> str:
    """Why the worker stays with another job; empty: it has none, or may come."""
    job_id = pool.busy.get(one.worker_id, market.job.id)
    if job_id == market.job.id:
        return ""
    if job_id in pool.starting:
        return "it makes the first steps of another job, whose learner is being measured"
    return "" if one.holds or market.figures.train_s is None else why_it_stays(_load_s(market, one), left_s(market))


def _load_s(market: JobMarket, one: Bidder) -> float:
    return load_s(market.figures.start_bytes, one.down_mbps, one.apply_s)


def _unpaid(market: JobMarket, one: Bidder, now: float) -> str:
    if not one.uusd_per_hour:
        return ""
    if not one.is_measured and not one.is_on_trial(now) and not one.tokens_per_s > 0:
        return (
            f"nothing of its work was accepted in {TRIAL_S:.0f} s that it was paid by the hour:"
            f" it is tried again in {one.tried_until - now:.0f} s"
        )
    if limits_of(market, now).uusd == 0:
        return "budget.usd is used up"
    return too_dear(one.uusd_per_hour, market.job.config.budget.usd)


def _is_priced(market: JobMarket) -> bool:
    """Whether there is a choice to be made: the learner's time is known, and the job wants the cheapest set."""
    return market.job.config.workers.activation == "market" and market.figures.train_s is not None


def _is_starting(market: JobMarket) -> bool:
    """Whether it will want the cheapest set as soon as its learner is measured."""
    return market.job.config.workers.activation == "market" and market.figures.train_s is None


def _price(market: JobMarket, worker_id: str) -> int:
    return next(one.uusd_per_hour for one in market.bidders if one.worker_id == worker_id)


# --- until it can be chosen


def _everyone(market: JobMarket, now: float) -> Verdict:
    """All that are ready, the cheapest first, as far as the budget goes."""
    why = (
        "workers.activation is all"
        if market.job.config.workers.activation == "all"
        else "the learner's time is not measured yet: everyone is active until the first steps are done"
    )
    active, standby = _affordable([one for one in market.bidders if one.is_ready], room(limits_of(market, now)), why)
    return _verdict(market, active, standby, why, now)


def _affordable(bidders: Sequence[Bidder], left: int | None, why: str) -> tuple[dict[str, str], dict[str, str]]:
    """Who can be paid by the hour, and why the others cannot. `left`: micro-USD an hour; None: any."""
    active: dict[str, str] = {}
    standby: dict[str, str] = {}
    for one in sorted(bidders, key=lambda one: (one.uusd_per_hour, one.quote is None, one.worker_id)):
        if left is not None and one.uusd_per_hour > left:
            standby[one.worker_id] = (
                f"standby: its price of {_usd(one.uusd_per_hour)} USD/h does not fit into the budget,"
                f" of which {_usd(max(left, 0))} USD/h are free"
            )
            continue
        if left is not None:
            left -= one.uusd_per_hour
        active[one.worker_id] = why
    return active, standby


# --- the cheapest set


def _chosen(markets: Sequence[JobMarket], pool: _Pool, now: float) -> dict[str, Activation]:
    """The market's choice for each job, among the workers that ask for money and are no trial."""
    offers: dict[str, Offer] = {}
    claims = []
    for market in (market for market in markets if _is_priced(market)):
        bidding = [one for one in market.bidders if _bids(one, now)]
        offers.update({one.worker_id: offer_of(one, now) for one in bidding})
        held = tuple(Held(one.worker_id, 1, uusd_per_hour=one.quote.uusd_per_idle_hour) for one in bidding if one.quote is not None)
        loads = [_load_s(market, one) for one in bidding if one.quote is not None and one.worker_id in pool.contested]
        settling = settling_s(loads, usual_s=HOLD_S)
        claims.append(
            Claim(
                market.job.id,
                need_of(market, now),
                terms_of(market, now),
                weight=market.job.config.workers.weight,
                limits=replace(limits_of(market, now), uusd=None),  # work goes on until the money is used up: `_shortage` warns
                held=held,
                usable=frozenset(one.worker_id for one in bidding),
                habits=CALM if market.changed_at is not None and now - market.changed_at < settling else HABITS,
            )
        )
    others = [
        Unmeasured(market.job.config.workers.weight, frozenset(one.worker_id for one in market.bidders if one.is_ready))
        for market in markets
        if not _is_priced(market)
    ]
    return shared(list(offers.values()), claims, now=now, unmeasured=others)


def _bids(one: Bidder, now: float) -> bool:
    return one.is_ready and one.uusd_per_hour > 0 and not one.is_on_trial(now)


def _priced(market: JobMarket, activation: Activation, now: float) -> Verdict:
    """The chosen, the free and the tried; and why the others wait."""
    ready = [one for one in market.bidders if one.is_ready]
    picked = {pick.offer_id: f"active: {pick.reason}" for pick in activation.picked}
    active = {one.worker_id: picked[one.worker_id] for one in ready if one.worker_id in picked}
    active |= {one.worker_id: "asks for no money" for one in ready if one.uusd_per_hour == 0}
    limits = limits_of(market, now)
    beside = None if limits.uusd_per_hour is None else limits.uusd_per_hour - activation.uusd_per_hour
    trials = [one for one in ready if one.uusd_per_hour > 0 and one.is_on_trial(now)]
    tried, unaffordable = _affordable(trials, room(replace(limits, uusd_per_hour=beside)), "its rate is being measured")
    standby = {**_unpicked(market, activation, now), **unaffordable}
    verdict = _verdict(market, {**active, **tried}, standby, activation.reason + _shortage(market, activation, now), now)
    return replace(verdict, activation=activation)


def _shortage(market: JobMarket, activation: Activation, now: float) -> str:
    """A warning where what is left of the budget does not pay the chosen until the last step; empty where it does."""
    left, hours = limits_of(market, now).uusd, terms_of(market, now).horizon_hours
    hours *= max(activation.required / activation.rate, 1.0) if activation.rate > 0 else 1.0
    cost = activation.usd_per_hour * hours
    if left is None or reserved_uusd(cost) <= left:
        return ""
    return (
        f"; all steps would cost {cost:.4f} USD over {hours:.2f} h and {uusd_to_usd(left):.4f} USD are left:"
        " the job works until budget.usd is used up"
    )


def _unpicked(market: JobMarket, activation: Activation, now: float) -> dict[str, str]:
    """Why each that bids and was not picked waits, with its place in the market."""
    terms = terms_of(market, now)
    picked = {pick.offer_id for pick in activation.picked}
    worth = {one.worker_id: all_in(offer_of(one, now), terms).per_thousand() for one in market.bidders if _bids(one, now)}
    places = {worker: place + 1 for place, worker in enumerate(sorted(worth, key=lambda one: (worth[one], one)))}
    found = {}
    for worker, usd in worth.items():
        if worker in picked:
            continue
        if worker in activation.refused:
            found[worker] = f"standby: {activation.refused[worker]}"
            continue
        others = "1 other worker keeps" if len(picked) == 1 else f"{len(picked)} others keep"
        why = activation.infeasible_because or f"{others} the learner busy for less"
        found[worker] = (
            f"standby: {why}; your all-in price is {usd:.4f} USD per 1,000 completions, place {places[worker]} of {len(worth)}"
        )
    return found


def _verdict(market: JobMarket, active: Mapping[str, str], standby: Mapping[str, str], reason: str, now: float) -> Verdict:
    serving = [one for one in market.bidders if one.worker_id in active]
    # Who asks for nothing serves the job whose weights it holds.
    bringing = [one for one in serving if one.holds or one.uusd_per_hour]
    waiting = {one.worker_id: f"standby: {one.barred}" for one in market.bidders if not one.is_ready}
    inputs = inputs_of(market, bringing, now)
    return Verdict(
        active=active,
        timed=frozenset(one.worker_id for one in serving if one.is_on_trial(now)),
        standby={**standby, **waiting},
        required=None if market.figures.train_s is None else required_of(market, now)(market.figures.bcast_p95_s),
        offered=sum(one.rate.rate(now) * one.admitted.value for one in bringing),
        usd_per_hour=uusd_to_usd(sum(one.uusd_per_hour for one in serving)),
        reason=reason,
        assessment=None if inputs is None else assess(inputs),
        inputs=inputs,
    )


# --- what the decision is made from


def offer_of(one: Bidder, now: float) -> Offer:
    """The bid as an offer; its rate counts what is admitted."""
    return Offer(
        id=one.worker_id,
        uusd_per_hour=one.uusd_per_hour,
        completions_per_second=one.planned_rate(now),
        up_mbps=one.up_mbps or USUAL_MBPS,
        down_mbps=one.down_mbps or USUAL_MBPS,
        reliability=one.reliability,
        owner=one.owner,
        trust=one.trust,
    )


def limits_of(market: JobMarket, now: float) -> Limits:
    """What is left of the job's budget."""
    budget, workers = market.job.config.budget, market.job.config.workers
    left = None if budget.usd is None else max(usd_to_uusd(budget.usd) - market.spent_uusd, 0)
    hours = None if budget.deadline_hours is None else budget.deadline_hours - (now - market.job.created_at) / HOUR_S
    per_hour = None
    if budget.usd_per_hour is not None:
        per_hour = hourly(usd_to_uusd(budget.usd_per_hour), spent_uusd=market.hour_uusd, rented_uusd=market.rented_uusd)
    assert workers.trust in TRUST
    return Limits(uusd=left, uusd_per_hour=per_hour, deadline_hours=hours, trust=workers.trust)


def terms_of(market: JobMarket, now: float) -> Terms:
    """What the job asks of whichever worker."""
    figures = market.figures
    refresh_s = kappa_of(market, figures.bcast_p95_s, pauses_of(market, now)) * (figures.train_s or 0.0)
    return Terms(
        horizon_hours=max(left_s(market) / HOUR_S, LEAST_HOURS),
        refresh_s=refresh_s if refresh_s > 0 else math.inf,
        refresh_bytes=figures.refresh_bytes,
        start_bytes=figures.start_bytes,
    )


def left_s(market: JobMarket) -> float:
    """Seconds until the last step, if the learner never waits."""
    return max(market.job.config.budget.steps - market.job.committed_steps, 0) * (market.figures.train_s or 0.0)


def pauses_of(market: JobMarket, now: float) -> Pauses:
    """Rate, and seconds lost at a publication, of each who would work."""
    inputs = inputs_of(market, market.bidders, now)
    return () if inputs is None else tuple((worker.rate, pause_s(worker, inputs)) for worker in inputs.workers)


def kappa_of(market: JobMarket, bcast_s: float, pauses: Pauses) -> int:
    """Updates between two publications, if a broadcast takes so long."""
    staleness = market.job.config.staleness
    return fleet_kappa(staleness.publish_every, staleness.max, market.figures.train_s, bcast_s, pauses)


def required_of(market: JobMarket, now: float) -> Required:
    """The capacity rule: completions per second, as a function of the broadcast's seconds (which move kappa, and so the pauses)."""
    shape, train_s, pauses = shape_of(market), market.figures.train_s, pauses_of(market, now)
    assert train_s is not None
    rate = math.fsum(rate for rate, _ in pauses)
    pause = math.fsum(rate * seconds for rate, seconds in pauses) / rate if pauses else 0.0

    def required(bcast_s: float) -> float:
        share = 1 - pause / (kappa_of(market, bcast_s, pauses) * train_s)
        return shape.generated_per_step / train_s / max(share, LEAST_SHARE)

    return required


def need_of(market: JobMarket, now: float) -> Need:
    """The rate that is still missing when those who ask for no money, and those on trial, do not count."""
    free = math.fsum(one.planned_rate(now) for one in market.bidders if one.is_ready and one.uusd_per_hour == 0 and one.holds)
    headroom = market.job.config.workers.headroom
    whole = required_of(market, now)
    return Need(lambda bcast_s: max(whole(bcast_s) - free / headroom, 0.0), headroom, broadcast_of(market))


def broadcast_of(market: JobMarket) -> Broadcast:
    """Seconds of a broadcast to a set: as measured, and for another set scaled as the fluid bound of its links is."""
    figures = market.figures
    serving = [one for one in market.bidders if one.quote is not None] or list(market.bidders)
    nbytes, seeder = figures.refresh_bytes, figures.seeder_up or math.inf
    if not nbytes or not all(one.up_mbps and one.down_mbps for one in serving):
        return lambda _ups, _downs: figures.bcast_p95_s
    ups = [(one.up_mbps or 0.0) * BYTES_PER_MBIT for one in serving]
    downs = [(one.down_mbps or 0.0) * BYTES_PER_MBIT for one in serving]
    now_s = fluid_bound(nbytes, seeder, ups, downs)
    return lambda ups, downs: figures.bcast_p95_s * fluid_bound(nbytes, seeder, ups, downs) / now_s


def shape_of(market: JobMarket) -> JobShape:
    """What the job asks for."""
    config = market.job.config
    return JobShape(
        group_size=config.algorithm.group_size,
        groups_per_step=config.algorithm.groups_per_step,
        bound=config.staleness.max,
        publish_every=config.staleness.publish_every,
        no_signal=market.figures.no_signal,
    )


def inputs_of(market: JobMarket, workers: Sequence[Bidder], now: float) -> CapacityInputs | None:
    """The capacity model's inputs with these workers; None until the learner, some completions and some worker are measured."""
    figures = market.figures
    able = [one for one in workers if one.rate.rate(now) > 0]
    if figures.train_s is None or not able or sum(figures.lengths) <= 0:
        return None
    loading = Loading.ABORT if market.job.config.staleness.on_update == "abort" else Loading.KEEP
    nbytes, seeder = figures.refresh_bytes, figures.seeder_up
    return CapacityInputs(
        job=shape_of(market),
        train_s=figures.train_s,
        bcast_p95_s=figures.bcast_p95_s,
        grade_s=figures.grade_s,
        lengths=Lengths.measured(figures.lengths),
        workers=tuple(
            WorkerCapacity(
                id=one.name,
                slots=one.slots,
                generating=Estimate(one.rate.rate(now), one.rate.deviation(now)),
                admitted=one.admitted,
                bcast_s=max(one.bcast_s, one.apply_s),
                apply_s=one.apply_s,
                loading=loading,
                up_mbps=one.up_mbps,
                down_mbps=one.down_mbps,
            )
            for one in able
        ),
        transfer=Transfer(nbytes, seeder / BYTES_PER_MBIT) if nbytes > 0 and seeder > 0 else None,
    )


def _usd(uusd: int) -> str:
    return f"{uusd_to_usd(uusd):.4f}"
