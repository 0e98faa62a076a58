"""What renting is given: providers, what the market wants of them, and the operator's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pricing.feeds.contract import Failed, Handle, Need, Offers, RentalOffer, Spec
from pricing.rental_plan import Wanted
from pricing.rentals import Limits

RENTALS = "rentals"  # woken when the market wants something else


@dataclass(frozen=True, slots=True)
class Look:
    """All machines with our labels. `at`: the provider's clock, None: it did not say.

    `partial`: why it may not be all of them, "": it is. Absence counts, and creates are sent, only after a look at all.
    """

    handles: tuple[Handle, ...]
    at: float | None
    partial: str = ""


class Provider(Protocol):
    """A provider that can be called. Every call has a deadline; what goes wrong is an answer."""

    @property
    def name(self) -> str: ...

    @property
    def farewell(self) -> str: ...

    async def search(self, need: Need, *, now: float) -> Offers | Failed: ...

    async def look(self, label_prefix: str) -> Look | Failed: ...

    async def get(self, instance_id: str) -> Handle | Failed: ...

    async def create(self, offer: RentalOffer, spec: Spec, label: str) -> Handle | Failed: ...

    async def destroy(self, instance_id: str) -> Failed | None: ...


@dataclass(frozen=True, slots=True)
class RentingSettings:
    """What an operator says of one provider.

    Attributes:
        budget_uusd: the most that its machines may cost, over all time.
        url: where a rented worker finds the coordinator.
        image: the container that holds `echo2-worker`.
        worker_options: further options of `echo2-worker join`.
        give_up_min: after so many minutes without the coordinator a worker, and its machine, end by themselves.
        need: what is searched for.
        look_s, search_s: between two turns, and two searches.
        turn_s: the longest that a turn starts new calls, half of it for looking; `limits.blind_s` must cover it, `look_s` and a restart.
    """

    budget_uusd: int
    url: str
    image: str
    worker_options: tuple[str, ...] = ()
    give_up_min: float = 30.0
    disk_gb: int = 40
    need: Need = field(default_factory=Need)
    limits: Limits = field(default_factory=Limits)
    look_s: float = 30.0
    search_s: float = 300.0
    turn_s: float = 180.0


@dataclass(slots=True)
class RentalDesk:
    """Where the market reads what could be rented and says what it wants. Nothing here must survive: the market says it again."""

    offers: dict[str, tuple[RentalOffer, ...]] = field(
        default_factory=dict
    )  # by provider: of the last search, what its budget bears
    _wishes: dict[str, dict[str, Wanted]] = field(default_factory=dict)

    def want(self, provider: str, job_id: str, count: int, candidates: Sequence[RentalOffer] = ()) -> None:
        """`count` machines of the provider for the job, the first of `candidates` that can be had first. 0: give all back."""
        self._wishes.setdefault(provider, {})[job_id] = Wanted(job_id, count, tuple(candidates))

    def wishes(self, provider: str) -> Mapping[str, Wanted]:
        """By job. A job without one keeps what it has."""
        return dict(self._wishes.get(provider, {}))
