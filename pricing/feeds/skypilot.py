"""SkyPilot: one cluster for each worker, never a managed job, since replacing workers is our own business.

SkyPilot is a Python library, not an address. Its calls are written as `Call`s all the same (`POST /launch`, `GET /status`, `DELETE
/cluster`, `GET /accelerators`); the shell carries them out with an installed `sky` in a thread (docs.skypilot.co, Python SDK, read
2026-11-30) and answers with the JSON below. Each cluster takes itself down by its own autodown timer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pricing.feeds.contract import Answer, Call, Failed, Handle, Need, Offers, Page, RentalOffer, Shown, Spec, Trouble
from pricing.feeds.reading import Unreadable, document, error_words, mapping, needed, number, ours, price, text, uusd_up

AUTODOWN_MIN = 10
_STATES = {"INIT": Shown.STARTING, "UP": Shown.RUNNING, "STOPPED": Shown.PAUSED}
_CLUSTER = re.compile(r"[a-z]([a-z0-9-]{0,60}[a-z0-9])?")


class SkyPilot:
    """SkyPilot's catalogue and clusters; a machine's id is its cluster's name, which is its label."""

    name = "skypilot"
    farewell = ""  # idle, the cluster takes itself down

    def search(self, need: Need) -> Call:
        return Call("GET", "/accelerators", tuple(("name", card) for card in need.cards))

    def offers(self, answer: Answer, need: Need, *, now: float) -> Offers | Failed:
        """Reply: a list of {infra, instance_type, accelerator, count, device_memory_gb, price, region}, price in USD per hour."""
        found = _list(answer)
        if isinstance(found, Failed):
            return found
        offers: list[RentalOffer] = []
        skipped: list[str] = []
        for record in found:
            try:
                offer = _offer(mapping(record, "an accelerator"), now)
            except Unreadable as error:
                skipped.append(str(error))
                continue
            if offer.vram_mb >= need.min_vram_mb and offer.uusd_per_hour <= need.most_uusd_per_hour:
                offers.append(offer)
        offers.sort(key=lambda offer: (offer.uusd_per_hour, offer.id))
        return Offers(tuple(offers[: need.limit]), tuple(skipped))

    def create(self, offer: RentalOffer, spec: Spec, label: str) -> Call:
        """Raises ValueError for a label that no cluster may have."""
        if not _CLUSTER.fullmatch(label):
            raise ValueError(
                f"label {label!r}: a cluster's name is lower-case letters, digits and dashes, and starts with a letter"
            )
        body = {
            "cluster_name": label,
            "run": spec.script,
            "envs": dict(spec.env),
            "infra": offer.tier,
            "accelerators": f"{offer.card}:{offer.cards}",
            "image_id": f"docker:{spec.image}",
            "disk_size": spec.disk_gb,
            "max_hourly_cost": offer.uusd_per_hour / 1e6,
            "idle_minutes_to_autostop": AUTODOWN_MIN,
            "down": True,
        }
        return Call("POST", "/launch", body=body)

    def created(self, answer: Answer, label: str) -> Handle | Failed:
        return Handle(label, label, Shown.STARTING) if answer.status == 200 else _failed(answer)

    def get(self, instance_id: str) -> Call:
        return Call("GET", "/status", (("name", instance_id),))

    def got(self, answer: Answer) -> Handle | Failed:
        page = self.listed(answer, "")
        if isinstance(page, Failed):
            return page
        return page.handles[0] if page.handles else Failed(Trouble.GONE, "there is no such cluster")

    def list(self, label_prefix: str, page: str | None) -> Call:
        del label_prefix, page
        return Call("GET", "/status")

    def listed(self, answer: Answer, label_prefix: str) -> Page | Failed:
        """Reply: a list of {name, status, launched_at, usd_per_hour}, launched_at in Unix seconds."""
        found = _list(answer)
        if isinstance(found, Failed):
            return found
        handles, skipped = ours(found, "name", label_prefix, _handle)
        return Page(handles, None, skipped)

    def destroy(self, instance_id: str) -> Call:
        return Call("DELETE", "/cluster", (("name", instance_id),))

    def destroyed(self, answer: Answer) -> Failed | None:
        return None if answer.status in (200, 404) else _failed(answer)


def _list(answer: Answer) -> list[Any] | Failed:
    if answer.status != 200:
        return _failed(answer)
    parsed = document(answer)
    if isinstance(parsed, Failed):
        return parsed
    return parsed if isinstance(parsed, list) else Failed(Trouble.MALFORMED, f"the reply is no list: {error_words(answer)}")


def _offer(record: Mapping[str, Any], now: float) -> RentalOffer:
    kind, infra, card = text(record, "instance_type"), text(record, "infra"), text(record, "accelerator")
    cards = int(needed(record, "count", "cards", least=1, most=64))
    return RentalOffer(
        provider=SkyPilot.name,
        id=f"{infra}/{kind}/{card}:{cards}",
        card=card,
        cards=cards,
        uusd_per_hour=uusd_up(needed(record, "price", "USD per hour", least=0.001, most=1_000)),
        vram_mb=int((number(record, "device_memory_gb", "GB of one card", most=2_000) or 0) * 1000),
        region=text(record, "region"),
        fetched_at=now,
        tier=infra,
    )


def _handle(record: Mapping[str, Any]) -> Handle:
    name = text(record, "name")
    return Handle(
        id=name,
        label=name,
        state=_STATES.get(text(record, "status"), Shown.UNKNOWN),
        uusd_per_hour=price(record, "usd_per_hour"),
        started_at=number(record, "launched_at", "Unix seconds", most=1e11),
    )


def _failed(answer: Answer) -> Failed:
    """The shell says 404 for a cluster that is not there, 409 for no capacity, 501 where `sky` is not installed."""
    words = error_words(answer, "detail")
    match answer.status:
        case 404:
            return Failed(Trouble.GONE, words)
        case 409:
            return Failed(Trouble.NO_CAPACITY, words)
        case 501:
            return Failed(Trouble.REFUSED, words)
        case _:
            return Failed(Trouble.UNKNOWN, words)
