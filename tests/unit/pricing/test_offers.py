"""Offers are read strictly: one line says which field, what it is, what to give."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pricing.errors import OfferRefused
from pricing.offers import MOST_OFFERS, UNKNOWN_RELIABILITY, Offer, offers_from_json, read_offer, read_offers

WHOLE: dict[str, Any] = {
    "id": "vast-1",
    "kind": "RTX 4090",
    "count": 3,
    "usd_per_hour": 0.35,
    "completions_per_second": 1.5,
    "up_mbps": 80,
    "down_mbps": 400,
    "usd_per_gb_up": 0.01,
    "usd_per_gb_down": 0.02,
    "reliability": 0.98,
    "min_hours": 1,
}
LEAST = {"id": "a", "usd_per_hour": 0, "completions_per_second": 1, "up_mbps": 8, "down_mbps": 80}


def test_every_field_of_a_market_file() -> None:
    """Money becomes micro-USD, Mbit/s bytes a second."""
    (offer,) = offers_from_json(json.dumps([WHOLE]))
    assert offer == Offer("vast-1", 350_000, 1.5, 80, 400, "RTX 4090", 3, 10_000, 20_000, 0.98, 1)
    assert (offer.usd_per_hour, offer.up, offer.down, offer.survival) == (0.35, 1e7, 5e7, 0.98)


def test_what_may_be_left_out() -> None:
    """A volunteer needs to say little; null is as good as nothing."""
    offer = read_offer({**LEAST, "reliability": None})
    assert (offer.uusd_per_hour, offer.count, offer.reliability, offer.survival) == (0, 1, None, UNKNOWN_RELIABILITY)


def test_limits_of_the_owner() -> None:
    """What posted offers add to a market file."""
    offer = read_offer({**LEAST, "owner": "ann", "trust": "named", "expires_at": 100, "available_hours": 2, "gb_limit": 50})
    assert (offer.owner, offer.trust, offer.available_hours, offer.gb_limit) == ("ann", "named", 2, 50)
    assert offer.holds(99.9)
    assert not offer.holds(100)
    assert read_offer(LEAST).holds(1e12)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("id", "", r"offer 0: id is '': give a text of 1 to 200 printable characters"),
        ("id", 7, "id is 7"),
        ("id", "a\nb", r"id is 'a\\nb'"),
        ("id", "a" * 201, "id is 'a+…"),
        ("kind", ["4090"], r"kind is \['4090'\]: give a text"),
        ("count", -1, "count is -1: give a whole number of workers from 0 to 1000000"),
        ("count", 1.5, r"count is 1\.5"),
        ("count", True, "count is True"),
        ("usd_per_hour", -0.1, r"usd_per_hour is -0\.1: give USD per hour, 0 to 1000000"),
        ("usd_per_hour", "0.35", r"usd_per_hour is '0\.35'"),
        ("usd_per_hour", True, "usd_per_hour is True"),
        ("completions_per_second", float("nan"), "completions_per_second is nan"),
        ("completions_per_second", 10**400, "completions_per_second is 1000"),
        ("up_mbps", 0, "up_mbps is 0: give the uplink in Mbit/s, above 0"),
        ("down_mbps", float("inf"), "down_mbps is inf"),
        ("reliability", 1.01, r"reliability is 1\.01: give the chance of lasting an hour, 0 to 1"),
        ("min_hours", -1, "min_hours is -1"),
        ("trust", "most", "trust is 'most': give one of any, audited, named"),
        ("colour", "red", "there is no field 'colour': the fields are id, kind, count"),
    ],
)
def test_refused(field: str, value: object, words: str) -> None:
    """Field, value, fix."""
    with pytest.raises(OfferRefused, match=words):
        read_offers([{**WHOLE, field: value}])


@pytest.mark.parametrize("field", LEAST)
def test_missing(field: str) -> None:
    """What cannot be guessed must be given."""
    with pytest.raises(OfferRefused, match=f"offer 0: {field} is missing: give "):
        read_offers([{name: value for name, value in LEAST.items() if name != field}])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the market is not JSON"),
        ("[" * 100_000, "the market is not JSON"),
        ('{"id": "a"}', "the market is a dict: give a list of offers"),
        ("[3]", "offer 0 is 3: give an object with id, kind"),
        (json.dumps([LEAST, {**LEAST, "id": "b"}, LEAST]), "offer 2: id 'a' is that of offer 0"),
        (json.dumps([0] * (MOST_OFFERS + 1)), "the market has 100001 offers: give at most 100000"),
    ],
)
def test_no_market(text: str, words: str) -> None:
    """The file as a whole."""
    with pytest.raises(OfferRefused, match=words):
        offers_from_json(text)
