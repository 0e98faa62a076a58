"""Offers: who would work, how fast, behind which link, at what price.

An offer is posted by a worker (`count` 1) or comes from a provider or a price file (several equal machines). In JSON it has the fields
of `FIELDS`, money in USD; here money is integer micro-USD.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from pricing.errors import OfferRefused
from pricing.money import usd_to_uusd, uusd_to_usd

Trust = Literal["any", "audited", "named"]
TRUST: Sequence[str] = get_args(Trust)  # rising

MOST_OFFERS = 100_000
MOST_TEXT = 200
BYTES_PER_MBIT = 125_000.0
UNKNOWN_RELIABILITY = 0.9


@dataclass(frozen=True, slots=True)
class Offer:
    """`count` equal workers at one price.

    Attributes:
        id: unique in a market.
        uusd_per_hour: asked for one worker, by the hour of active time (a worker's own offer) or of the provider's clock.
        completions_per_second: of one worker while it generates, as measured or claimed.
        up_mbps, down_mbps: of one worker, Mbit/s.
        kind: free text: the card, or what sort of machine it is.
        count: workers there are, those included that work already.
        uusd_per_gb_up, uusd_per_gb_down: what the operator pays for one worker's traffic, per 10^9 bytes.
        reliability: chance that a worker is still there one hour later; None is not known.
        min_hours: paid at least.
        owner: whose limit counts; "" is nobody's.
        trust: how far the owner is known.
        expires_at: until when the price holds, Unix seconds; None without end.
        available_hours: how long the owner lets it work; None without end.
        gb_limit: traffic in both directions that the owner allows; None without limit.
    """

    id: str
    uusd_per_hour: int
    completions_per_second: float
    up_mbps: float
    down_mbps: float
    kind: str = "worker"
    count: int = 1
    uusd_per_gb_up: int = 0
    uusd_per_gb_down: int = 0
    reliability: float | None = None
    min_hours: float = 0.0
    owner: str = ""
    trust: Trust = "any"
    expires_at: float | None = None
    available_hours: float | None = None
    gb_limit: float | None = None

    @property
    def usd_per_hour(self) -> float:
        """Asked, for display."""
        return uusd_to_usd(self.uusd_per_hour)

    @property
    def up(self) -> float:
        """Bytes a second."""
        return self.up_mbps * BYTES_PER_MBIT

    @property
    def down(self) -> float:
        """Bytes a second."""
        return self.down_mbps * BYTES_PER_MBIT

    @property
    def survival(self) -> float:
        """`reliability`, with the assumption where it is not known."""
        return UNKNOWN_RELIABILITY if self.reliability is None else self.reliability

    def holds(self, now: float) -> bool:
        """Whether the price is still good."""
        return self.expires_at is None or now < self.expires_at


@dataclass(frozen=True, slots=True)
class _Field:
    """How one JSON field is read."""

    name: str
    read: Callable[[object], Any]
    wanted: str
    to: str = ""
    is_required: bool = False


def offers_from_json(text: str | bytes) -> tuple[Offer, ...]:
    """The offers of a market file. Raises OfferRefused."""
    try:
        market = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OfferRefused(f"the market is not JSON ({error}): give a list of offers") from None
    return read_offers(market)


def read_offers(market: object) -> tuple[Offer, ...]:
    """The offers of a parsed market file. Raises OfferRefused for the first field that cannot be read."""
    if not isinstance(market, list):
        raise OfferRefused(f"the market is a {type(market).__name__}: give a list of offers")
    if len(market) > MOST_OFFERS:
        raise OfferRefused(f"the market has {len(market)} offers: give at most {MOST_OFFERS}")
    offers = tuple(read_offer(offer, f"offer {place}") for place, offer in enumerate(market))
    seen: dict[str, int] = {}
    for place, offer in enumerate(offers):
        if (first := seen.setdefault(offer.id, place)) != place:
            raise OfferRefused(f"offer {place}: id {offer.id!r} is that of offer {first}: give each offer an id of its own")
    return offers


def read_offer(offer: object, name: str = "the offer") -> Offer:
    """One parsed offer; `name` says in the error which one. Raises OfferRefused."""
    if not isinstance(offer, Mapping):
        raise OfferRefused(f"{name} is {_shown(offer)}: give an object with {', '.join(FIELDS)}")
    for key in offer:
        if key not in FIELDS:
            raise OfferRefused(f"{name}: there is no field {_shown(key)}: the fields are {', '.join(FIELDS)}")
    values = {known.to or known.name: _value(offer, known, name) for known in FIELDS.values() if _is_given(offer, known)}
    for known in FIELDS.values():
        if known.is_required and not _is_given(offer, known):
            raise OfferRefused(f"{name}: {known.name} is missing: give {known.wanted}")
    return Offer(**values)


def _is_given(offer: Mapping[str, object], known: _Field) -> bool:
    """Null says that it is not known, as leaving it out does."""
    return offer.get(known.name) is not None


def _value(offer: Mapping[str, object], known: _Field, name: str) -> Any:
    try:
        return known.read(offer[known.name])
    except (TypeError, ValueError, OverflowError):
        raise OfferRefused(f"{name}: {known.name} is {_shown(offer[known.name])}: give {known.wanted}") from None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MOST_TEXT else f"{shown[:MOST_TEXT]}…"


def _number(most: float, *, least: float = 0.0, above: float = -1.0) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        number = float(value)
        if not isfinite(number) or not least <= number <= most or number <= above:
            raise ValueError
        return number

    return read


def _money(most: float) -> Callable[[object], int]:
    number = _number(most)
    return lambda value: usd_to_uusd(number(value))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000:
        raise ValueError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT or not value.isprintable():
        raise ValueError
    return value


def _name(value: object) -> str:
    if not _text(value).strip():
        raise ValueError
    return _text(value)


def _trust(value: object) -> str:
    if value not in TRUST:
        raise ValueError
    return str(value)


FIELDS: Mapping[str, _Field] = {
    known.name: known
    for known in (
        _Field("id", _name, f"a text of 1 to {MOST_TEXT} printable characters", is_required=True),
        _Field("kind", _text, f"a text of at most {MOST_TEXT} printable characters"),
        _Field("count", _whole, "a whole number of workers from 0 to 1000000"),
        _Field("usd_per_hour", _money(1e6), "USD per hour, 0 to 1000000", to="uusd_per_hour", is_required=True),
        _Field("completions_per_second", _number(1e9), "completions per second of one worker, 0 to 1e9", is_required=True),
        _Field("up_mbps", _number(1e7, above=0), "the uplink in Mbit/s, above 0 and at most 1e7", is_required=True),
        _Field("down_mbps", _number(1e7, above=0), "the downlink in Mbit/s, above 0 and at most 1e7", is_required=True),
        _Field("usd_per_gb_up", _money(1e4), "USD per 10^9 bytes sent, 0 to 10000", to="uusd_per_gb_up"),
        _Field("usd_per_gb_down", _money(1e4), "USD per 10^9 bytes received, 0 to 10000", to="uusd_per_gb_down"),
        _Field("reliability", _number(1.0), "the chance of lasting an hour, 0 to 1"),
        _Field("min_hours", _number(1e5), "the hours paid at least, 0 to 100000"),
        _Field("owner", _text, f"a text of at most {MOST_TEXT} printable characters"),
        _Field("trust", _trust, f"one of {', '.join(TRUST)}"),
        _Field("expires_at", _number(1e12), "Unix seconds"),
        _Field("available_hours", _number(1e6), "hours, 0 to 1000000"),
        _Field("gb_limit", _number(1e9), "10^9 bytes in both directions, 0 to 1e9"),
    )
}
