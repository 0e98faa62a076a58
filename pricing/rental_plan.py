"""Rentals together: which handle belongs to which row, what the budgets allow, and what to open and to end.

A budget holds at any moment if, after each turn,

    cost so far + what each machine may cost until it can be stopped  <=  budget

where a machine that runs may cost its price for `blind_s` (until the next turn) and `stop_s` (until its bill ends), and one that is
being ended for `stop_s`, each with the margin by which a price may rise. New machines are opened only inside that; when time eats into
it, machines are ended while their `stop_s` still fits. The promise needs the provider to keep to `stop_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pricing.feeds.contract import Handle, RentalOffer, Shown
from pricing.rentals import Limits, Rental, RentalState, ended, overdue, requested, span_uusd

FORGIVEN = frozenset({"unwanted", "budget", "orphan", "no_balance", "not_sent"})  # ends that say nothing against the offer


@dataclass(frozen=True, slots=True)
class Match:
    """Handles by row id, and those that no row explains."""

    by_row: Mapping[str, Handle]
    strays: tuple[Handle, ...]


def match(rows: Iterable[Rental], handles: Iterable[Handle]) -> Match:
    """Who is who. A machine belongs to the row that knows its id, else to the open row with its label, else to a gone one.

    Pages may repeat a machine: it counts once. Two machines with one label: the row keeps the one it knows, or the older name.
    """
    alive = [handle for handle in handles if handle.state is not Shown.GONE]
    left = {handle.id: handle for handle in sorted(alive, key=lambda one: (len(one.id), one.id), reverse=True)}
    by_row: dict[str, Handle] = {}
    ordered = sorted(rows, key=lambda row: (not row.is_open, row.id))
    for row in ordered:
        if row.instance_id is not None and row.instance_id in left:
            by_row[row.id] = left.pop(row.instance_id)
    for row in ordered:
        if row.id in by_row or row.instance_id is not None or row.tries == 0:
            continue
        named = [handle for handle in left.values() if handle.label == row.label]
        if named:
            by_row[row.id] = left.pop(named[-1].id)
    return Match(by_row, tuple(left.values()))


@dataclass(frozen=True, slots=True)
class Purse:
    """A limit on what rentals cost: of a provider, or of a job. `spent_uusd`: by rentals that are gone."""

    name: str
    limit_uusd: int
    spent_uusd: int = 0


def most_uusd(rental: Rental, limits: Limits, *, at: float) -> int:
    """The most that an open rental will have cost in the end if the next turn decides to end it."""
    if not rental.is_open:
        return rental.cost_uusd
    seconds = limits.stop_s if rental.ending else limits.blind_s + limits.stop_s
    unseen = 0.0 if rental.paid_until is None else max(at - rental.paid_until, 0.0)
    return rental.cost_uusd + span_uusd(_risen(rental.price, limits), unseen + seconds)


def _risen(uusd_per_hour: int, limits: Limits) -> int:
    return -(-uusd_per_hour * (100 + limits.margin_percent) // 100)


def committed_uusd(rentals: Iterable[Rental], purse: Purse, limits: Limits, *, at: float) -> int:
    """What a purse has spent and may yet have to spend."""
    return purse.spent_uusd + sum(most_uusd(rental, limits, at=at) for rental in rentals)


def over_budget(rentals: Sequence[Rental], purse: Purse, limits: Limits, *, at: float) -> tuple[Rental, ...]:
    """The wanted rentals to end so that the purse holds, the dearest first."""
    committed = committed_uusd(rentals, purse, limits, at=at)
    ending = []
    for rental in sorted((one for one in rentals if one.is_wanted), key=lambda one: (-one.price, one.id)):
        if committed <= purse.limit_uusd:
            break
        committed -= span_uusd(_risen(rental.price, limits), limits.blind_s)
        if rental.tries == 0:
            committed -= span_uusd(_risen(rental.price, limits), limits.stop_s)
        ending.append(rental)
    return tuple(ending)


def afford(offer: RentalOffer, rentals: Iterable[Rental], purse: Purse, limits: Limits, *, at: float) -> str | None:
    """Why the purse cannot bear one more such machine, or None."""
    most = span_uusd(_risen(offer.uusd_per_hour, limits), limits.blind_s + limits.stop_s)
    committed = committed_uusd(rentals, purse, limits, at=at)
    if committed + most <= purse.limit_uusd:
        return None
    return (
        f"{purse.name}: {purse.limit_uusd} uUSD are allowed, {committed} are spent or bound, and a machine at "
        f"{offer.uusd_per_hour} uUSD/h may cost {most} before it can be stopped"
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job's wish: `count` machines of these offers, the first that can be had first."""

    job_id: str
    count: int
    candidates: tuple[RentalOffer, ...] = field(default=(), repr=False)


def affordable(offers: Iterable[RentalOffer], facts: Facts, limits: Limits) -> tuple[RentalOffer, ...]:
    """Those that the provider's purse bears one of."""
    purse = facts.provider_purse
    return tuple(offer for offer in offers if afford(offer, facts.rentals, purse, limits, at=facts.at) is None)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn decided. `opened`: offers to request, with their job; `rows`: changed rows; `notes`: why something was not done."""

    rows: tuple[Rental, ...]
    opened: tuple[tuple[str, RentalOffer], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a turn is decided on.

    Attributes:
        rentals: the provider's open rows, after the look.
        recent: its rows that ended lately, for cool-downs.
        wishes: by job. A job without one keeps what it has: nobody has said anything yet.
        purses: by job. A job without one has no limit of its own.
        provider_purse: what the provider's machines may cost together.
        at, now: the provider's clock and ours.
        up_since: since when workers can be heard, by our clock.
    """

    rentals: Sequence[Rental]
    provider_purse: Purse
    at: float
    now: float
    recent: Sequence[Rental] = ()
    wishes: Mapping[str, Wanted] = field(default_factory=dict)
    purses: Mapping[str, Purse] = field(default_factory=dict)
    up_since: float = 0.0


def decide(facts: Facts, limits: Limits) -> Turn:
    """End what is overdue, unwanted or not affordable; open what is missing."""
    rows = {rental.id: rental for rental in facts.rentals}
    for rental, why in _endings(facts, limits):
        rows[rental.id] = ended(rows[rental.id], why, facts.now)
    _end_for_money(rows, facts, limits)
    opened, notes = _open(facts, list(rows.values()), limits)
    return Turn(_changed(rows, facts), tuple(opened), tuple(notes))


def decide_blind(facts: Facts, limits: Limits) -> Turn:
    """Without a look only money counts: it runs on, and machines can be stopped without being seen."""
    rows = {rental.id: rental for rental in facts.rentals}
    _end_for_money(rows, facts, limits)
    return Turn(_changed(rows, facts), (), ())


def _end_for_money(rows: dict[str, Rental], facts: Facts, limits: Limits) -> None:
    for purse in (facts.provider_purse, *facts.purses.values()):
        paid = _of(rows.values(), purse, facts.provider_purse)
        for rental in over_budget(paid, purse, limits, at=facts.at):
            rows[rental.id] = ended(rental, f"budget: {purse.name} would be passed before it could be stopped", facts.now)


def _changed(rows: Mapping[str, Rental], facts: Facts) -> tuple[Rental, ...]:
    return tuple(rows[rental.id] for rental in facts.rentals if rows[rental.id] is not rental)


def _endings(facts: Facts, limits: Limits) -> Iterable[tuple[Rental, str]]:
    """What is overdue, then what is too many of the rest."""
    timely = []
    for rental in facts.rentals:
        why = overdue(rental, now=facts.now, limits=limits, up_since=facts.up_since)
        if why is None:
            timely.append(rental)
        else:
            yield rental, why
    for wish in facts.wishes.values():
        for rental in _surplus(timely, wish):
            yield rental, "unwanted: its job needs it no more"


def _open(facts: Facts, rentals: list[Rental], limits: Limits) -> tuple[list[tuple[str, RentalOffer]], list[str]]:
    """What to request, each inside both purses with all before it; `rentals` grows by what is."""
    opened: list[tuple[str, RentalOffer]] = []
    notes: list[str] = []
    for job_id, wish in sorted(facts.wishes.items()):
        missing = wish.count - sum(rental.is_wanted and rental.job_id == job_id for rental in rentals)
        dear: list[str] = []
        for offer in _candidates(wish, rentals, facts, limits):
            if missing <= 0:
                break
            if (no := _too_dear(offer, job_id, facts, rentals, limits)) is not None:
                dear.append(no)
                continue
            opened.append((job_id, offer))
            rentals.append(_unwritten(offer, job_id, len(rentals), facts.now))
            missing -= 1
        if missing > 0:
            notes.append("; ".join([f"job {job_id}: {missing} of {wish.count} machines cannot be had now", *dear[:1]]))
    return opened, notes


def _too_dear(offer: RentalOffer, job_id: str, facts: Facts, rentals: Sequence[Rental], limits: Limits) -> str | None:
    for purse in (facts.provider_purse, facts.purses.get(job_id)):
        if purse is not None:
            no = afford(offer, _of(rentals, purse, facts.provider_purse), purse, limits, at=facts.at)
            if no is not None:
                return no
    return None


def _of(rentals: Iterable[Rental], purse: Purse, provider_purse: Purse) -> list[Rental]:
    """Whose rentals a purse pays for: the provider's all, a job's its own."""
    return [rental for rental in rentals if purse is provider_purse or rental.job_id == purse.name]


def _surplus(rentals: Iterable[Rental], wish: Wanted) -> list[Rental]:
    """Beyond the count: what runs least is ended first, then the dearest."""
    ranks = {RentalState.RUNNING: 0, RentalState.STARTING: 1}
    own = [rental for rental in rentals if rental.is_wanted and rental.job_id == wish.job_id]
    own.sort(key=lambda rental: (ranks.get(rental.state, 2), rental.price, rental.id))
    return own[max(wish.count, 0) :]


def _candidates(wish: Wanted, rentals: Sequence[Rental], facts: Facts, limits: Limits) -> Iterable[RentalOffer]:
    """Offers in the wish's order that can be asked for, without what we hold already."""
    held = {(rental.offer_id, rental.machine) for rental in rentals if rental.is_open and rental.machine}
    for offer in usable(wish.candidates, (*facts.recent, *rentals), facts.now, limits):
        if (offer.id, offer.machine) not in held:
            yield from [offer] if offer.machine else [offer] * wish.count


def usable(offers: Iterable[RentalOffer], rentals: Iterable[Rental], now: float, limits: Limits) -> list[RentalOffer]:
    """A provider's offers that are fresh and did not fail lately, nor their machine: it comes back under another offer."""
    failed = [rental for rental in rentals if _failed_lately(rental, now, limits)]
    cold = {rental.offer_id for rental in failed}
    cold_machines = {rental.machine for rental in failed if rental.machine}
    fresh = [offer for offer in offers if now - offer.fetched_at <= limits.offer_s]
    return [offer for offer in fresh if offer.id not in cold and offer.machine not in cold_machines]


def _failed_lately(rental: Rental, now: float, limits: Limits) -> bool:
    if rental.ending_since is None or now - rental.ending_since >= limits.cool_s:
        return False
    return rental.ending.partition(":")[0] not in FORGIVEN


def _unwritten(offer: RentalOffer, job_id: str, number: int, now: float) -> Rental:
    """Counts against the purses until its row is written."""
    return requested(offer, key=f"new-{number}", job_id=job_id, label="", now=now)
