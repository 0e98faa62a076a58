"""Vast.ai's REST interface (docs: vast-ai/docs `api-reference/openapi.yaml`, read 2026-11-30).

Where the documents disagree the worse reading for us holds: `inet_up` and `inet_down` are called MB/s in one place and Mbit/s in
another (Mbit/s is taken: an eighth); `env` is a text in one and an object in another (the object is sent, the text form needs
quoting). Errors may be plain text; a 429 says nothing of how long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pricing.feeds.contract import Answer, Call, Failed, Handle, Need, Offers, Page, RentalOffer, Shown, Spec, Trouble
from pricing.feeds.reading import (
    MOST_MBPS,
    Unreadable,
    document,
    error_words,
    identifier,
    mapping,
    needed,
    number,
    ours,
    price,
    remark,
    retry_after_s,
    text,
    uusd_up,
)
from pricing.money import uusd_to_usd

PAGE_SIZE = 25  # the most that is allowed
MOST_SCRIPT = 4048  # characters of a start script
LEAST_VRAM_MB = 1_000  # below it GB were meant
_STARTING = frozenset({"loading", "created", "scheduling", "creating", "starting"})
_BALANCE = ("insufficient", "credit", "balance")


class Vast:
    """Vast.ai, on-demand and interruptible machines."""

    name = "vast"
    farewell = (  # a machine there is given a key for itself alone
        "python3 -c 'import os, urllib.request as u; u.urlopen(u.Request("
        '"https://console.vast.ai/api/v0/instances/%s/" % os.environ["CONTAINER_ID"], method="DELETE", '
        'headers={"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"]}), timeout=30)'
        "'"
    )

    def search(self, need: Need) -> Call:
        body: dict[str, Any] = {
            "limit": need.limit,
            "type": "ondemand",
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "order": [["dph_total", "asc"]],
            "allocated_storage": need.disk_gb,
            "dph_total": {"lte": uusd_to_usd(need.most_uusd_per_hour)},
            "gpu_ram": {"gte": need.min_vram_mb},
            "reliability": {"gte": need.min_reliability},
        }
        if need.cards:
            body["gpu_name"] = {"in": [card.replace("_", " ") for card in need.cards]}
        return Call("POST", "/api/v0/bundles/", body=body)

    def offers(self, answer: Answer, need: Need, *, now: float) -> Offers | Failed:
        found = _records(answer, "offers")
        if isinstance(found, Failed):
            return found
        offers: list[RentalOffer] = []
        skipped: list[str] = []
        for record in found[: need.limit]:
            try:
                offer = _offer(mapping(record, "an offer"), now)
            except Unreadable as error:
                skipped.append(str(error))
                continue
            if _fits(offer, need):
                offers.append(offer)
        return Offers(tuple(offers), tuple(skipped))

    def create(self, offer: RentalOffer, spec: Spec, label: str) -> Call:
        """Raises ValueError when the script is longer than Vast takes."""
        if len(spec.script) > MOST_SCRIPT:
            raise ValueError(f"the start script has {len(spec.script)} characters: Vast.ai takes {MOST_SCRIPT}")
        body: dict[str, Any] = {
            "image": spec.image,
            "disk": float(spec.disk_gb),
            "label": label,
            "env": dict(spec.env),
            "runtype": "args",
            "args": ["bash", "-c", spec.script],
            "target_state": "running",
            "cancel_unavail": True,
        }
        if spec.bid_uusd_per_hour is not None:
            body["price"] = uusd_to_usd(spec.bid_uusd_per_hour)
        return Call("PUT", f"/api/v0/asks/{offer.id}/", body=body)

    def created(self, answer: Answer, label: str) -> Handle | Failed:
        named = _named_instance(answer)
        if answer.status != 200:
            return _failed(answer, named)
        if named is None:
            return Failed(Trouble.MALFORMED, f"the reply names no new_contract: {error_words(answer, 'msg', 'error')}")
        if not _says_success(answer):
            return Failed(Trouble.UNKNOWN, f"the reply is no success: {error_words(answer, 'msg', 'error')}", instance_id=named)
        return Handle(named, label, Shown.STARTING)

    def get(self, instance_id: str) -> Call:
        return Call("GET", f"/api/v0/instances/{instance_id}/")

    def got(self, answer: Answer) -> Handle | Failed:
        if answer.status != 200:
            return _failed(answer)
        parsed = document(answer)
        if isinstance(parsed, Failed):
            return parsed
        record = parsed.get("instances") if isinstance(parsed, Mapping) else None
        if record is None:
            return Failed(Trouble.GONE, "there is no such instance")
        try:
            return _handle(mapping(record, "instances"))
        except Unreadable as error:
            return Failed(Trouble.MALFORMED, str(error))

    def list(self, label_prefix: str, page: str | None) -> Call:
        """Labels cannot be asked for by prefix: all instances come, and `listed` takes ours."""
        del label_prefix
        query = (("limit", str(PAGE_SIZE)), ("order_by", json.dumps([{"col": "id", "dir": "asc"}])))
        return Call("GET", "/api/v1/instances/", (*query, ("after_token", page)) if page is not None else query)

    def listed(self, answer: Answer, label_prefix: str) -> Page | Failed:
        found = _records(answer, "instances")
        if isinstance(found, Failed):
            return found
        handles, skipped = ours(found, "label", label_prefix, _handle)
        token = mapping(document(answer), "the reply").get("next_token")
        if token is not None and not isinstance(token, str):
            return Failed(Trouble.MALFORMED, "next_token is no text: the list may be cut")
        return Page(handles, token or None, skipped)

    def destroy(self, instance_id: str) -> Call:
        return Call("DELETE", f"/api/v0/instances/{instance_id}/")

    def destroyed(self, answer: Answer) -> Failed | None:
        if answer.status in (404, 410):
            return None
        if answer.status != 200:
            return _failed(answer)
        if not _says_success(answer):
            return Failed(Trouble.UNKNOWN, f"the reply is no success: {error_words(answer, 'msg', 'error')}")
        return None


def _records(answer: Answer, name: str) -> list[Any] | Failed:
    """The list of that name; the documents' sample shows a lone object instead."""
    if answer.status != 200:
        return _failed(answer)
    parsed = document(answer)
    if isinstance(parsed, Failed):
        return parsed
    found = parsed.get(name) if isinstance(parsed, Mapping) else None
    if isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, list):
        return Failed(Trouble.MALFORMED, f"the reply holds no list {name}: {error_words(answer, 'msg', 'error')}")
    return found


def _offer(record: Mapping[str, Any], now: float) -> RentalOffer:
    machine = number(record, "machine_id", "an id", most=1e18)
    hours = number(record, "duration", "seconds", least=-1e9, most=1e12)
    vram = needed(record, "gpu_ram", "MB of one card", least=LEAST_VRAM_MB, most=2_000_000)
    return RentalOffer(
        provider=Vast.name,
        id=identifier(record, "id"),
        card=text(record, "gpu_name"),
        uusd_per_hour=uusd_up(needed(record, "dph_total", "USD per hour", least=0.001, most=1_000)),
        machine="" if machine is None else str(int(machine)),
        cards=int(needed(record, "num_gpus", "cards", least=1, most=64)),
        vram_mb=int(vram),
        min_bid_uusd_per_hour=price(record, "min_bid"),
        uusd_per_gb_up=uusd_up(number(record, "inet_up_cost", "USD per GB", most=10) or 0.0),
        uusd_per_gb_down=uusd_up(number(record, "inet_down_cost", "USD per GB", most=10) or 0.0),
        up_mbps=number(record, "inet_up", "Mbit/s", most=MOST_MBPS),
        down_mbps=number(record, "inet_down", "Mbit/s", most=MOST_MBPS),
        reliability=number(record, "reliability", "a share", most=1.0),
        region=text(record, "geolocation"),
        most_hours=None if hours is None else max(hours, 0.0) / 3600,
        fetched_at=now,
    )


def _fits(offer: RentalOffer, need: Need) -> bool:
    """The provider's own filters are not trusted."""
    wanted = {card.replace("_", " ") for card in need.cards}
    return (
        (not wanted or offer.card in wanted)
        and offer.vram_mb >= need.min_vram_mb
        and offer.uusd_per_hour <= need.most_uusd_per_hour
        and (offer.reliability is None or offer.reliability >= need.min_reliability)
        and (offer.down_mbps is None or offer.down_mbps >= need.min_down_mbps)
        and max(offer.uusd_per_gb_up, offer.uusd_per_gb_down) <= need.most_uusd_per_gb
    )


def _handle(record: Mapping[str, Any]) -> Handle:
    return Handle(
        id=identifier(record, "id"),
        label=text(record, "label"),
        state=_state(record),
        uusd_per_hour=price(record, "dph_total"),
        started_at=number(record, "start_date", "Unix seconds", most=1e11),
        words=remark(record, "status_msg"),
    )


def _state(record: Mapping[str, Any]) -> Shown:
    """Outbid shows as current, intended and next state all `stopped`; `exited`, `unknown` and `offline` never run again."""
    if {text(record, name) for name in ("cur_state", "intended_status", "next_state")} == {"stopped"}:
        return Shown.PAUSED
    status = text(record, "actual_status")
    if status == "running":
        return Shown.RUNNING
    if not status or status in _STARTING:
        return Shown.STARTING
    return Shown.PAUSED if status in ("stopped", "exited") else Shown.UNKNOWN


def _named_instance(answer: Answer) -> str | None:
    """The instance that a reply names, an error too: a bid that is refused may leave one."""
    parsed = document(answer)
    if not isinstance(parsed, Mapping) or parsed.get("new_contract") is None:
        return None
    try:
        return identifier(parsed, "new_contract")
    except Unreadable:
        return None


def _says_success(answer: Answer) -> bool:
    parsed = document(answer)
    return isinstance(parsed, Mapping) and parsed.get("success") is True


def _failed(answer: Answer, instance_id: str | None = None) -> Failed:
    words = f"{answer.status}: {error_words(answer, 'msg', 'detail', 'error')}"
    if answer.status == 429:
        return Failed(Trouble.RETRY_AFTER, words, retry_after_s(answer), instance_id)
    if answer.status in (404, 410):
        return Failed(Trouble.GONE, words, None, instance_id)
    if answer.status == 402 or (answer.status in (400, 403) and any(word in words.lower() for word in _BALANCE)):
        return Failed(Trouble.NO_BALANCE, words, None, instance_id)
    if answer.status in (400, 409):
        return Failed(Trouble.NO_CAPACITY, words, None, instance_id)
    if 400 < answer.status < 500:
        return Failed(Trouble.REFUSED, words, None, instance_id)
    return Failed(Trouble.UNKNOWN, words, retry_after_s(answer), instance_id)
