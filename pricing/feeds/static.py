"""A price file: offers that an operator wrote down, in JSON (a list) or TOML (`[[offer]]` tables), with the fields of `pricing.offers`."""

from __future__ import annotations

import tomllib
from typing import Literal

from pricing.errors import OfferRefused
from pricing.offers import Offer, offers_from_json, read_offers

MOST_FILE_BYTES = 64 << 20


def offers_of_file(content: bytes, form: Literal["json", "toml"]) -> tuple[Offer, ...]:
    """The offers of a price file. Raises OfferRefused, naming offer, field, value and fix."""
    if len(content) > MOST_FILE_BYTES:
        raise OfferRefused(f"the price file has {len(content)} bytes: give at most {MOST_FILE_BYTES}")
    if form == "json":
        return offers_from_json(content)
    try:
        tables = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise OfferRefused(f"the price file is not TOML ({error}): give [[offer]] tables") from None
    extra = sorted(set(tables) - {"offer"})
    if extra:
        raise OfferRefused(f"the price file has a table {extra[0]!r}: only [[offer]] is known")
    return read_offers(tables.get("offer", []))
