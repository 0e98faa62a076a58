"""Replies, by hand."""

from __future__ import annotations

import json
from typing import Any

from pricing.feeds.contract import Answer, RentalOffer, Spec

LABEL = "echo2-abc-0001"
SPEC = Spec("img:1", "echo2-worker join", {"ECHO2_INVITE": "secret-invite"}, disk_gb=50)
OFFER = RentalOffer("vast", "77", "RTX 4090", 350_000, machine="9")


def reply(content: Any = None, status: int = 200, **headers: str) -> Answer:
    body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body, 5.0)
