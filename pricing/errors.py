"""What can go wrong with prices.

PricingError
└── OfferRefused    an offer or a market file cannot be read
"""

from __future__ import annotations


class PricingError(ValueError):
    """Root of this package's errors; the message names the field, its value and the fix."""


class OfferRefused(PricingError):
    """The offer, or the market it stands in, is not one."""
