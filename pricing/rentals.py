"""The life of one rented machine, decided from what the provider's list shows. No I/O, no clock.

Rules:

* the row is there before the create is sent, and its label (deployment and request key) is in the create: what was made can be found;
* a create whose fate is unknown is sent again only when complete looks at the list, for long enough, did not show the label;
* what shall end is destroyed until `gone_looks` looks in a row do not show it, however often that takes, and costs until then;
* a machine that shows up after it was gone, or that no row knows, is ours by its label, and is destroyed;
* money runs by the provider's clock, at the higher of the price that was agreed and the price that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from pricing.feeds.contract import Failed, Handle, RentalOffer, Trouble

HOUR_MS = 3_600_000


class RentalState(StrEnum):
    """REQUESTED: a create was or will be sent, and nothing was seen of it. UNKNOWN: not shown, or shown as something strange."""

    REQUESTED = "requested"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    UNKNOWN = "unknown"
    GONE = "gone"


OPEN: Final = tuple(state for state in RentalState if state is not RentalState.GONE)
"""States in which a machine may cost money."""

_SEEN: Final[Mapping[str, RentalState]] = {
    "seen_starting": RentalState.STARTING,
    "seen_running": RentalState.RUNNING,
    "seen_paused": RentalState.PAUSED,
    "seen_unknown": RentalState.UNKNOWN,
}
TABLE: Final[Mapping[RentalState, Mapping[str, RentalState]]] = {
    RentalState.REQUESTED: {**_SEEN, "not_shown": RentalState.REQUESTED, "absent": RentalState.GONE},
    RentalState.STARTING: {**_SEEN, "not_shown": RentalState.UNKNOWN, "absent": RentalState.GONE},
    RentalState.RUNNING: {**_SEEN, "not_shown": RentalState.UNKNOWN, "absent": RentalState.GONE},
    RentalState.PAUSED: {**_SEEN, "not_shown": RentalState.UNKNOWN, "absent": RentalState.GONE},
    RentalState.UNKNOWN: {**_SEEN, "not_shown": RentalState.UNKNOWN, "absent": RentalState.GONE},
    RentalState.GONE: {"seen_again": RentalState.UNKNOWN},
}
TIMERS: Final[Mapping[RentalState, str]] = {
    RentalState.REQUESTED: "offer_s unsent, then gone (overdue); appear_s without a sign, then asked again or gone (absorb)",
    RentalState.STARTING: "start_s, then destroyed (overdue)",
    RentalState.RUNNING: "join_s for its worker, silent_s once it was heard, then destroyed (overdue)",
    RentalState.PAUSED: "none left: destroyed at once (overdue)",
    RentalState.UNKNOWN: "unknown_s, then destroyed (overdue); gone_looks looks that do not show it, then gone (absorb)",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Patience, in seconds of the coordinator's clock where nothing else is said."""

    appear_s: float = 120.0  # the longest from a create to its place in the list
    gone_looks: int = 3  # complete looks in a row that must not show a machine
    most_tries: int = 3  # creates for one request
    start_s: float = 900.0
    join_s: float = 900.0  # from running to the first word of its worker
    silent_s: float = 600.0
    unknown_s: float = 300.0
    blind_s: float = 600.0  # the longest between two turns, a restart of the coordinator included
    stop_s: float = 1800.0  # the longest from the decision to end a machine to the end of its bill
    margin_percent: int = 25  # by which a price may rise before the machine is given up
    cool_s: float = 1800.0  # an offer that failed, and its machine, are left alone for so long
    offer_s: float = 900.0  # after which an offer says nothing of today's price: it is asked for no more


@dataclass(frozen=True, slots=True)
class Rental:
    """One rented machine, or the wish for one; a row of the store.

    Attributes:
        id: the request key: one wish, at most one machine.
        job_id: whose; "" for a stray that no wish of ours explains.
        label: what the provider shows: deployment and request key.
        uusd_per_hour: agreed. `shown_uusd_per_hour`: what the provider showed last, 0: nothing.
        invite_id: the single-use invite of its worker.
        tries, called_at: creates that were ordered, and when the last one was, by the provider's clock (ours may jump).
        absent_looks: complete looks in a row that did not show it.
        paid_until: provider's clock: up to where `cost_uusd` counts. None: nothing was ordered yet.
        cost_uusd: cumulative, each part rounded up.
        ending, ending_since: why it shall end (starts with a stable code); "": it shall not.
        destroys: destroy orders that were given.
        worker_seen_at: when its worker was last heard.
        offer: what was asked for, as it was offered: a create that is sent again after a restart needs it.
    """

    id: str
    provider: str
    job_id: str
    offer_id: str
    machine: str
    label: str
    state: RentalState
    reason: str
    state_since: float
    requested_at: float
    uusd_per_hour: int
    shown_uusd_per_hour: int = 0
    invite_id: str = ""
    instance_id: str | None = None
    tries: int = 0
    called_at: float | None = None
    absent_looks: int = 0
    paid_until: float | None = None
    cost_uusd: int = 0
    ending: str = ""
    ending_since: float | None = None
    destroys: int = 0
    worker_seen_at: float | None = None
    offer: dict[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it may cost money."""
        return self.state is not RentalState.GONE

    @property
    def is_wanted(self) -> bool:
        """Whether it stands for a worker that is, or is going to be."""
        return self.is_open and not self.ending

    @property
    def price(self) -> int:
        """Micro-USD per hour that it is taken to cost."""
        return max(self.uusd_per_hour, self.shown_uusd_per_hour)


@dataclass(frozen=True, slots=True)
class Create:
    """Order: send a create, after the row of `called` was saved."""

    rental: Rental


@dataclass(frozen=True, slots=True)
class Destroy:
    """Order: send a destroy."""

    rental: Rental
    instance_id: str


def requested(offer: RentalOffer, *, key: str, job_id: str, label: str, now: float) -> Rental:
    """A wish for a machine; nothing was sent yet."""
    return Rental(
        id=key,
        provider=offer.provider,
        job_id=job_id,
        offer_id=offer.id,
        machine=offer.machine,
        label=label,
        state=RentalState.REQUESTED,
        reason="to be created",
        state_since=now,
        requested_at=now,
        uusd_per_hour=offer.uusd_per_hour,
        offer=asdict(offer),
    )


def stray(handle: Handle, *, provider: str, at: float, now: float) -> Rental:
    """A machine with our label that no row explains: it ends, and what it costs from its start is counted."""
    since = at if handle.started_at is None else min(handle.started_at, at)
    return Rental(
        id=f"stray-{provider}-{handle.id}",
        provider=provider,
        job_id="",
        offer_id="",
        machine="",
        label=handle.label,
        state=RentalState.UNKNOWN,
        reason="orphan: its label is ours and no request asked for it",
        state_since=now,
        requested_at=now,
        uusd_per_hour=handle.uusd_per_hour or 0,
        instance_id=handle.id,
        tries=1,
        called_at=at,
        paid_until=since,
        ending="orphan: its label is ours and no request asked for it",
        ending_since=now,
    )


def move(rental: Rental, event: str, reason: str, now: float) -> Rental:
    """The rental after `event`; the state's age starts anew only when the state changes."""
    state = TABLE[rental.state][event]
    if state is rental.state:
        return rental
    return replace(rental, state=state, reason=reason, state_since=now)


def absorb(rental: Rental, handle: Handle | None, *, at: float, now: float, limits: Limits) -> Rental:
    """The rental after a complete look at the list, `at` the provider's clock. `handle` None: the list does not show it."""
    if not rental.is_open and handle is None:
        return rental
    if rental.tries == 0:
        return rental  # nothing was sent: nothing can be there
    if handle is None:
        return _absent(rental, at=at, now=now, limits=limits)
    if not rental.is_open:
        again = replace(rental, ending="orphan: shown again after it was gone", ending_since=now, destroys=0)
        rental = move(again, "seen_again", "shown again after it was gone", now)
    return _seen(rental, handle, at=at, now=now)


def _seen(rental: Rental, handle: Handle, *, at: float, now: float) -> Rental:
    shown = rental.shown_uusd_per_hour if handle.uusd_per_hour is None else handle.uusd_per_hour
    dearer = replace(_starting(rental, handle, at=at), shown_uusd_per_hour=max(shown, rental.shown_uusd_per_hour))
    paid = replace(accrued(dearer, at=at), shown_uusd_per_hour=shown, instance_id=handle.id, absent_looks=0)
    words = f": {handle.words}" if handle.words else ""
    return move(paid, f"seen_{handle.state.value}", f"the provider shows it as {handle.state.value}{words}", now)


def _starting(rental: Rental, handle: Handle, *, at: float) -> Rental:
    """The bill starts when the provider says, if that can be: not before it was ordered and not in the future."""
    since, start = rental.paid_until, handle.started_at
    if rental.instance_id is not None or since is None or start is None or not since < start <= at:
        return rental
    return replace(rental, paid_until=start, cost_uusd=0)


def _absent(rental: Rental, *, at: float, now: float, limits: Limits) -> Rental:
    """Counted up to the first look that does not show it; what is shown again later is counted for the time between, too."""
    if rental.absent_looks == 0 and rental.instance_id is not None:
        rental = accrued(rental, at=at)
    rental = replace(rental, absent_looks=rental.absent_looks + 1)
    if not is_absent(rental, at=at, limits=limits):
        return move(rental, "not_shown", "the provider's list does not show it", now)
    if rental.instance_id is None:
        return _never_made(rental, now=now, limits=limits)
    return _over(rental, "vanished: the provider lists it no more", now)


def _over(rental: Rental, why: str, now: float) -> Rental:
    """Gone; why it was to end says more than that it is not there."""
    closed = rental if rental.ending else replace(rental, ending=why, ending_since=now)
    return move(closed, "absent", closed.ending, now)


def _never_made(rental: Rental, *, now: float, limits: Limits) -> Rental:
    """No create was carried out: nothing was spent, and it is tried again unless enough was tried or it shall end."""
    if rental.ending or rental.tries >= limits.most_tries or now - rental.requested_at > limits.offer_s:
        return _over(rental, f"not_created: {rental.tries} creates brought no machine; the last: {rental.reason}", now)
    return rental


def is_absent(rental: Rental, *, at: float, limits: Limits) -> bool:
    """Whether enough looks, long enough after the last create, did not show it."""
    since = at if rental.called_at is None else rental.called_at
    return rental.absent_looks >= limits.gone_looks and at - since >= limits.appear_s


def called(rental: Rental, *, at: float, looked_at: float, invite_id: str) -> Rental:
    """Saved before the create is sent: from here on the machine may be there.

    Both times by the provider's clock: `looked_at` when the list was seen, from where the bill may run; `at` now.
    """
    since = looked_at if rental.paid_until is None else rental.paid_until
    reason = f"create {rental.tries + 1} was sent"
    return replace(
        rental,
        tries=rental.tries + 1,
        called_at=at,
        absent_looks=0,
        paid_until=since,
        invite_id=invite_id,
        reason=reason,
    )


def answered(rental: Rental, answer: Handle | Failed, *, now: float) -> Rental:
    """The rental after the create's reply. A refusal ends it, and it is looked for all the same."""
    if isinstance(answer, Handle):
        return move(replace(rental, instance_id=answer.id), "seen_starting", "created", now)
    known = replace(rental, instance_id=answer.instance_id or rental.instance_id, reason=f"{answer.trouble.value}: {answer.words}")
    if answer.trouble in (Trouble.RETRY_AFTER, Trouble.UNKNOWN, Trouble.MALFORMED) and answer.instance_id is None:
        return known
    return ended(known, f"{answer.trouble.value}: {answer.words}", now)


def ended(rental: Rental, why: str, now: float) -> Rental:
    """Marked to end; the first reason stays. What was never sent is gone at once."""
    if not rental.is_wanted:
        return rental
    if rental.tries == 0:
        return replace(rental, state=RentalState.GONE, state_since=now, reason=why, ending=why, ending_since=now)
    return replace(rental, ending=why, ending_since=now)


def overdue(rental: Rental, *, now: float, limits: Limits, up_since: float = 0.0) -> str | None:
    """Why the rental must end now (law 5), or None. Before `up_since` no worker could be heard: that is not held against it."""
    stayed = now - rental.state_since
    listened = now - max(rental.state_since, up_since)
    silent = 0.0 if rental.worker_seen_at is None else now - max(rental.worker_seen_at, up_since)
    if rental.shown_uusd_per_hour * 100 > rental.uusd_per_hour * (100 + limits.margin_percent):
        return f"dearer: {rental.shown_uusd_per_hour} uUSD/h is shown, {rental.uusd_per_hour} was agreed"
    match rental.state:
        case RentalState.REQUESTED if rental.tries == 0 and stayed > limits.offer_s:
            return f"not_sent: no create could be sent for {stayed:.0f} s, and its offer is old"
        case RentalState.STARTING if stayed > limits.start_s:
            return f"slow_start: not running after {stayed:.0f} s"
        case RentalState.RUNNING if rental.worker_seen_at is None and listened > limits.join_s:
            return f"no_worker: it runs for {stayed:.0f} s and its worker has not joined"
        case RentalState.RUNNING if silent > limits.silent_s:
            return f"silent: its worker was not heard for {silent:.0f} s"
        case RentalState.PAUSED:
            return f"paused: {rental.reason}"
        case RentalState.UNKNOWN if stayed > limits.unknown_s:
            return f"unknown: {rental.reason} for {stayed:.0f} s"
        case _:
            return None


def order(rental: Rental, *, at: float, limits: Limits) -> Create | Destroy | None:
    """What to send for the rental, after a complete look was absorbed at `at`, the provider's clock."""
    if not rental.is_open:
        return None
    if rental.ending:
        if rental.instance_id is None or (rental.absent_looks and rental.destroys):
            return None
        return Destroy(rental, rental.instance_id)
    if rental.state is not RentalState.REQUESTED:
        return None
    if rental.tries == 0 or is_absent(rental, at=at, limits=limits):
        return Create(rental)
    return None


def accrued(rental: Rental, *, at: float) -> Rental:
    """With what it cost up to `at`, the provider's clock; a clock that stepped back adds nothing."""
    return replace(rental, cost_uusd=projected(rental, at=at), paid_until=_later(rental.paid_until, at))


def projected(rental: Rental, *, at: float) -> int:
    """Micro-USD that it cost up to `at` if it was there all the time."""
    if rental.paid_until is None or not rental.is_open:
        return rental.cost_uusd
    return rental.cost_uusd + span_uusd(rental.price, at - rental.paid_until)


def span_uusd(uusd_per_hour: int, seconds: float) -> int:
    """Micro-USD of a span, rounded up; 0 for a negative one."""
    milliseconds = max(int(seconds * 1000) + 1, 0) if seconds > 0 else 0
    return -(-uusd_per_hour * milliseconds // HOUR_MS)


def _later(one: float | None, other: float) -> float | None:
    return None if one is None else max(one, other)
