"""Which of the fleets that do are called cheapest, balanced and fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.domain.plan_answer import Named
from coordinator.domain.plan_fleet import Fleet

ALIKE = 0.005  # times that differ by less are one
Time = Callable[[Fleet], float]


def three(
    fleets: Sequence[Fleet], *, time: Time, worth: Callable[[Fleet], float], rule: str, said: Callable[[Fleet], str]
) -> tuple[Named, ...]:
    """The three, of at least one fleet.

    Cheapest: the least USD per hour. Fastest: the least `time`; of those within half a percent the one that costs least. Balanced: the
    least `worth`, which `rule` names. None of the others costs less than the cheapest.
    """
    cheapest = min(fleets, key=lambda one: (one.usd_per_hour, time(one)))
    quickest = min(map(time, fleets))
    fastest = min((one for one in fleets if time(one) <= quickest * (1 + ALIKE)), key=lambda one: (one.usd_per_hour, time(one)))
    balanced = min(fleets, key=lambda one: (worth(one), one.usd_per_hour))
    count = f"of the {len(fleets)} fleets that were found" if len(fleets) > 1 else "of the one fleet that was found"
    return (
        Named("cheapest", cheapest, f"the least USD per hour {count}: {said(cheapest)}"),
        Named("balanced", balanced, _reason(balanced, cheapest, f"the least {rule} {count}", said)),
        Named("fastest", fastest, _reason(fastest, cheapest, f"the least time {count}", said)),
    )


def _reason(fleet: Fleet, cheapest: Fleet, claim: str, said: Callable[[Fleet], str]) -> str:
    if fleet is cheapest:
        return f"{claim}; it is the cheapest one as well"
    more = fleet.usd_per_hour - cheapest.usd_per_hour
    return f"{claim}: {said(fleet)}; {more:.4f} USD/h more than the cheapest"
