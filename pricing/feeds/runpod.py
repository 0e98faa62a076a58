"""RunPod's REST interface v2 (docs: runpod/docs `api-reference-v2/openapi.json`, read 2026-11-30).

On-demand pods only: v2 has no interruptible ones. A list price belongs to a card and a cloud, not to a machine, so an offer is such a
pair; a create has no fallback, candidates are tried in order. A 400 on a create is a broken rule or no capacity, and nothing tells
them apart: the next candidate is tried. Unknown fields are refused there, so that only what is needed is sent.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pricing.feeds.contract import Answer, Call, Failed, Handle, Need, Offers, Page, RentalOffer, Shown, Spec, Trouble
from pricing.feeds.reading import (
    Unreadable,
    document,
    error_words,
    identifier,
    mapping,
    needed,
    ours,
    price,
    retry_after_s,
    text,
    timestamp,
    uusd_up,
)

CLOUDS = {"SECURE": "secure", "COMMUNITY": "community"}
MOST_VRAM_GB = 2_000
_STATES = {
    "PROVISIONING": Shown.STARTING,
    "STARTING": Shown.STARTING,
    "RUNNING": Shown.RUNNING,
    "EXITED": Shown.PAUSED,
    "TERMINATED": Shown.GONE,
}


class RunPod:
    """RunPod, on-demand pods of both clouds."""

    name = "runpod"
    farewell = 'runpodctl remove pod "$RUNPOD_POD_ID"'  # installed in each pod, with a key for the pod alone

    def search(self, need: Need) -> Call:
        del need  # the catalogue is short and has no filters of this kind
        return Call("GET", "/v2/catalog/gpus", (("include", "AVAILABILITY"), ("product", "POD")))

    def offers(self, answer: Answer, need: Need, *, now: float) -> Offers | Failed:
        found = _records(answer, "gpus")
        if isinstance(found, Failed):
            return found
        offers: list[RentalOffer] = []
        skipped: list[str] = []
        for record in found:
            try:
                offers += [offer for offer in _offers(mapping(record, "a card"), now) if _fits(offer, need)]
            except Unreadable as error:
                skipped.append(str(error))
        offers.sort(key=lambda offer: (offer.uusd_per_hour, offer.id))
        return Offers(tuple(offers[: need.limit]), tuple(skipped))

    def create(self, offer: RentalOffer, spec: Spec, label: str) -> Call:
        body = {
            "name": label,
            "image": spec.image,
            "args": f"bash -c {shlex.quote(spec.script)}",
            "disk": spec.disk_gb,
            "env": dict(spec.env),
            "cloud": offer.tier,
            "gpu": {"id": offer.card, "count": offer.cards},
        }
        return Call("POST", "/v2/pods", body=body)

    def created(self, answer: Answer, label: str) -> Handle | Failed:
        if answer.status not in (200, 201):
            return _failed(answer)
        parsed = document(answer)
        if isinstance(parsed, Failed):
            return parsed
        try:
            handle = _handle(mapping(parsed, "the pod"))
        except Unreadable as error:
            return Failed(Trouble.MALFORMED, str(error), instance_id=_named_pod(parsed))
        if handle.label != label:
            return Failed(
                Trouble.MALFORMED, f"the pod has the name {handle.label!r}, asked for was {label!r}", instance_id=handle.id
            )
        return handle

    def get(self, instance_id: str) -> Call:
        return Call("GET", f"/v2/pods/{instance_id}")

    def got(self, answer: Answer) -> Handle | Failed:
        if answer.status != 200:
            return _failed(answer)
        parsed = document(answer)
        if isinstance(parsed, Failed):
            return parsed
        try:
            return _handle(mapping(parsed, "the pod"))
        except Unreadable as error:
            return Failed(Trouble.MALFORMED, str(error))

    def list(self, label_prefix: str, page: str | None) -> Call:
        """All pods come at once; `listed` takes ours."""
        del label_prefix, page
        return Call("GET", "/v2/pods")

    def listed(self, answer: Answer, label_prefix: str) -> Page | Failed:
        found = _records(answer, "pods")
        if isinstance(found, Failed):
            return found
        handles, skipped = ours(found, "name", label_prefix, _handle)
        return Page(handles, None, skipped)

    def destroy(self, instance_id: str) -> Call:
        return Call("DELETE", f"/v2/pods/{instance_id}")

    def destroyed(self, answer: Answer) -> Failed | None:
        return None if answer.status in (200, 204, 404, 410) else _failed(answer)


def _records(answer: Answer, name: str) -> list[Any] | Failed:
    if answer.status != 200:
        return _failed(answer)
    parsed = document(answer)
    if isinstance(parsed, Failed):
        return parsed
    if isinstance(parsed, list):
        return Failed(
            Trouble.MALFORMED, "the reply is a bare list: that is the shape of API v1, which is retired; use the v2 address"
        )
    found = parsed.get(name) if isinstance(parsed, Mapping) else None
    if not isinstance(found, list):
        return Failed(Trouble.MALFORMED, f"the reply holds no list {name}: {error_words(answer, 'detail', 'message')}")
    return found


def _offers(record: Mapping[str, Any], now: float) -> list[RentalOffer]:
    """One for each cloud that has the card; none where the catalogue says that there is none to be had."""
    if record.get("availability") == "NONE":
        return []
    card = text(record, "id")
    prices = mapping(record.get("price"), "price")
    vram_mb = int(needed(record, "memory", "GB of one card", least=1, most=MOST_VRAM_GB)) * 1000
    found = []
    for tier, name in CLOUDS.items():
        if record.get(name) is True:
            usd = needed(prices, name, "USD per hour of one card", least=0.001, most=1_000)
            found.append(RentalOffer(RunPod.name, f"{tier}/{card}", card, uusd_up(usd), vram_mb=vram_mb, fetched_at=now, tier=tier))
    return found


def _fits(offer: RentalOffer, need: Need) -> bool:
    return (
        (not need.cards or offer.card in need.cards)
        and offer.vram_mb >= need.min_vram_mb
        and offer.uusd_per_hour <= need.most_uusd_per_hour
    )


def _handle(record: Mapping[str, Any]) -> Handle:
    status = text(record, "status")
    return Handle(
        id=identifier(record, "id"),
        label=text(record, "name"),
        state=_STATES.get(status, Shown.UNKNOWN),
        uusd_per_hour=price(record, "cost"),
        started_at=timestamp(record.get("createdAt")),
        words=status,
    )


def _named_pod(parsed: object) -> str | None:
    try:
        return identifier(mapping(parsed, "the pod"), "id")
    except Unreadable:
        return None


def _failed(answer: Answer) -> Failed:
    words = f"{answer.status}: {error_words(answer, 'detail', 'message', 'title')}"
    match answer.status:
        case 429:
            return Failed(Trouble.RETRY_AFTER, words, retry_after_s(answer))
        case 404 | 410:
            return Failed(Trouble.GONE, words)
        case 402:
            return Failed(Trouble.NO_BALANCE, words)
        case 400 | 403 | 409:
            return Failed(Trouble.NO_CAPACITY, words)
        case status if 400 < status < 500:
            return Failed(Trouble.REFUSED, words)
        case _:
            return Failed(Trouble.UNKNOWN, words, retry_after_s(answer))
