"""A price file: offers that an operator wrote down, in JSON (a list) or TOML (`[[offer]]` tables), with the fields of `pricing.offers`."""

from __future__ import annotations

import json
import tomllib
from typing import Literal

from pricing.errors import OfferRefused
from pricing.offers import Offer, read_offers

MOST_FILE_BYTES = 8 << 20


def offers_of_file(content: bytes, form: Literal["json", "toml"]) -> tuple[Offer, ...]:
    """The offers of a price file. Raises OfferRefused, naming offer, field, value and fix."""
    if len(content) > MOST_FILE_BYTES:
        raise OfferRefused(f"the price file has {len(content)} bytes: give at most {MOST_FILE_BYTES}")
    try:
        if form == "json":
            return read_offers(json.loads(content))
        tables = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise OfferRefused(f"the price file is not {form.upper()} ({error})") from None
    extra = sorted(set(tables) - {"offer"})
    if extra:
        raise OfferRefused(f"the price file has a table {extra[0]!r}: only [[offer]] is known")
    return read_offers(tables.get("offer", []))
