"""Vast.ai's shapes, read and written; what its documents say, not what the adapter happens to do."""

from __future__ import annotations

from typing import Any

import pytest

from pricing.feeds.contract import Failed, Handle, Need, Offers, Page, Shown, Spec, Trouble
from pricing.feeds.vast import Vast
from tests.unit.pricing.feeds.answers import LABEL, OFFER, SPEC, reply

VAST = Vast()
RECORD: dict[str, Any] = {
    "id": 77,
    "machine_id": 9,
    "gpu_name": "RTX 4090",
    "num_gpus": 2,
    "gpu_ram": 24576,
    "dph_total": 0.3500001,
    "min_bid": 0.2,
    "inet_up": 800.0,
    "inet_down": 900.0,
    "inet_up_cost": 0.0012,
    "inet_down_cost": None,
    "reliability": 0.99,
    "geolocation": "Sweden, SE",
    "duration": 7200.0,
    "cpu_cores": None,
}
INSTANCE: dict[str, Any] = {
    "id": 5,
    "label": LABEL,
    "actual_status": "running",
    "dph_total": 0.35,
    "start_date": 1000.5,
    "status_msg": "ok",
}


def _offers(*records: Any, need: Need | None = None) -> Offers:
    found = VAST.offers(reply({"offers": list(records)}), need or Need(), now=3.0)
    assert isinstance(found, Offers)
    return found


def test_a_search_asks_for_what_is_needed_with_the_disk_in_the_price() -> None:
    call = VAST.search(Need(cards=("RTX_4090",), min_vram_mb=24_000, most_uusd_per_hour=500_000, disk_gb=50))
    assert (call.method, call.path) == ("POST", "/api/v0/bundles/")
    assert call.body is not None
    assert call.body["gpu_name"] == {"in": ["RTX 4090"]}
    assert call.body["dph_total"] == {"lte": 0.5}
    assert call.body["gpu_ram"] == {"gte": 24_000}
    assert call.body["allocated_storage"] == 50
    assert "gpu_name" not in (VAST.search(Need()).body or {})


def test_an_offer_is_read_with_money_rounded_up() -> None:
    """0.3500001 USD is 350001 uUSD: what we may owe is never taken for less."""
    offer = _offers(RECORD).offers[0]
    assert (offer.id, offer.machine, offer.card, offer.cards, offer.vram_mb) == ("77", "9", "RTX 4090", 2, 24576)
    assert offer.uusd_per_hour == 350_001
    assert (offer.min_bid_uusd_per_hour, offer.uusd_per_gb_up, offer.uusd_per_gb_down) == (200_000, 1_200, 0)
    assert (offer.up_mbps, offer.down_mbps, offer.reliability, offer.most_hours) == (800.0, 900.0, 0.99, 2.0)
    assert (offer.region, offer.fetched_at) == ("Sweden, SE", 3.0)
    bare = _offers({k: v for k, v in RECORD.items() if k not in ("machine_id", "duration", "min_bid")}).offers[0]
    assert (bare.machine, bare.most_hours, bare.min_bid_uusd_per_hour) == ("", None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_ram": 24}, "gpu_ram is 24: expected MB of one card"),
        ({"dph_total": "cheap"}, "dph_total is 'cheap'"),
        ({"dph_total": 0}, "dph_total is 0: expected USD per hour"),
        ({"dph_total": None}, "dph_total is missing"),
        ({"dph_total": True}, "dph_total is True"),
        ({"dph_total": 1e9}, "dph_total is 1000000000.0"),
        ({"reliability": 99.5}, "reliability is 99.5: expected a share, 0 to 1"),
        ({"inet_up": 1e9}, "inet_up is 1000000000.0: expected Mbit/s"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"id": "../x"}, "id is '../x': expected an identifier"),
        ({"gpu_name": 5}, "gpu_name is 5"),
    ],
)
def test_a_bad_field_is_named_and_its_offer_left_out(changes: dict[str, Any], words: str) -> None:
    found = _offers({**RECORD, **changes}, RECORD)
    assert len(found.offers) == 1
    assert found.skipped[0].startswith(words)


def test_the_providers_filters_are_checked_again() -> None:
    need = Need(cards=("RTX_4090",), min_vram_mb=24_000, most_uusd_per_hour=400_000, min_reliability=0.95, min_down_mbps=500.0)
    fits = {**RECORD, "reliability": None, "inet_down": None}
    others = [{"gpu_name": "RTX 3090"}, {"gpu_ram": 8_000}, {"dph_total": 0.5}, {"reliability": 0.5}, {"inet_down": 10.0}]
    assert len(_offers(RECORD, fits, *({**RECORD, **other} for other in others), need=need).offers) == 2


def test_a_lone_object_stands_for_a_list_and_anything_else_is_malformed() -> None:
    assert isinstance(VAST.offers(reply({"offers": RECORD}), Need(), now=0.0), Offers)
    for content in ({"offers": 3}, [], {}, b"OK", b""):
        failed = VAST.offers(reply(content), Need(), now=0.0)
        assert isinstance(failed, Failed)
        assert failed.trouble is Trouble.MALFORMED
    assert _offers(3).skipped == ("an offer is 3: expected an object",)


def test_a_create_carries_label_and_invite_and_no_key() -> None:
    call = VAST.create(OFFER, SPEC, LABEL)
    assert (call.method, call.path) == ("PUT", "/api/v0/asks/77/")
    assert call.body is not None
    assert call.body["label"] == LABEL
    assert call.body["env"] == {"ECHO2_INVITE": "secret-invite"}
    assert call.body["args"] == ["bash", "-c", "echo2-worker join"]
    assert "price" not in call.body
    assert "secret-invite" not in repr(call)  # calls may be logged
    assert "secret-invite" not in repr(SPEC)
    bid = VAST.create(OFFER, Spec("i", "s", {}, bid_uusd_per_hour=250_000), LABEL)
    assert bid.body is not None
    assert bid.body["price"] == 0.25
    with pytest.raises(ValueError, match="4049 characters"):
        VAST.create(OFFER, Spec("i", "x" * 4049, {}), LABEL)


def test_a_created_machine_is_known_by_its_contract() -> None:
    assert VAST.created(reply({"success": True, "new_contract": 5}), LABEL) == Handle("5", LABEL, Shown.STARTING)


def test_a_failed_create_may_have_left_a_machine() -> None:
    """A bid that is refused may leave a stopped instance; the error names it."""
    refused = VAST.created(reply({"success": False, "error": "invalid_price", "msg": "too low", "new_contract": 5}, 400), LABEL)
    assert isinstance(refused, Failed)
    assert (refused.trouble, refused.instance_id) == (Trouble.NO_CAPACITY, "5")
    unsure = VAST.created(reply({"success": False, "new_contract": 5}), LABEL)
    assert isinstance(unsure, Failed)
    assert (unsure.trouble, unsure.instance_id) == (Trouble.UNKNOWN, "5")
    for content in ({"success": True}, {"success": True, "new_contract": "a/b"}, b"OK", []):
        nameless = VAST.created(reply(content), LABEL)
        assert isinstance(nameless, Failed)
        assert nameless.trouble is Trouble.MALFORMED


@pytest.mark.parametrize(
    ("status", "content", "trouble"),
    [
        (429, {"detail": "API requests too frequent endpoint threshold=4.5"}, Trouble.RETRY_AFTER),
        (404, {"msg": "no_such_ask"}, Trouble.GONE),
        (410, {"msg": "no_such_ask"}, Trouble.GONE),
        (402, {}, Trouble.NO_BALANCE),
        (400, {"msg": "insufficient credit"}, Trouble.NO_BALANCE),
        (400, {"msg": "cannot start"}, Trouble.NO_CAPACITY),
        (409, {"msg": "taken"}, Trouble.NO_CAPACITY),
        (401, {"msg": "bad key"}, Trouble.REFUSED),
        (403, {"msg": "not yours"}, Trouble.REFUSED),
        (500, b"Internal Server Error", Trouble.UNKNOWN),
        (302, b"", Trouble.UNKNOWN),
    ],
)
def test_errors_become_values(status: int, content: Any, trouble: Trouble) -> None:
    for failed in (
        VAST.created(reply(content, status), LABEL),
        VAST.listed(reply(content, status), "e"),
        VAST.got(reply(content, status)),
    ):
        assert isinstance(failed, Failed)
        assert failed.trouble is trouble
        assert failed.words.startswith(str(status))


def test_a_page_holds_ours_and_leads_to_the_next() -> None:
    records = [INSTANCE, {**INSTANCE, "id": 6, "label": "another"}, {**INSTANCE, "id": 7, "label": None}]
    page = VAST.listed(reply({"instances": records, "next_token": "t"}), "echo2-abc-")
    assert page == Page((Handle("5", LABEL, Shown.RUNNING, 350_000, 1000.5, "ok"),), "t", ())
    call = VAST.list("echo2-abc-", "t")
    assert ("after_token", "t") in call.query
    assert ("limit", "25") in call.query
    assert "after_token" not in dict(VAST.list("echo2-abc-", None).query)


def test_a_machine_with_a_bad_field_is_unknown_and_not_absent() -> None:
    page = VAST.listed(reply({"instances": [{**INSTANCE, "dph_total": -1}], "next_token": None}), "echo2-")
    assert isinstance(page, Page)
    assert (page.handles[0].id, page.handles[0].state) == ("5", Shown.UNKNOWN)
    nameless = VAST.listed(reply({"instances": [{**INSTANCE, "id": None}, 3], "next_token": None}), "echo2-")
    assert isinstance(nameless, Page)
    assert nameless.handles == ()
    assert len(nameless.skipped) == 1
    cut = VAST.listed(reply({"instances": [], "next_token": 3}), "echo2-")
    assert isinstance(cut, Failed)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"actual_status": "running"}, Shown.RUNNING),
        ({"actual_status": None}, Shown.STARTING),
        ({"actual_status": "loading"}, Shown.STARTING),
        ({"actual_status": "exited"}, Shown.PAUSED),
        ({"actual_status": "offline"}, Shown.UNKNOWN),
        ({"actual_status": "running", "cur_state": "stopped", "intended_status": "stopped", "next_state": "stopped"}, Shown.PAUSED),
    ],
)
def test_states(fields: dict[str, Any], state: Shown) -> None:
    """Outbid: current, intended and next state are all `stopped`."""
    one = VAST.got(reply({"instances": {**INSTANCE, **fields}}))
    assert isinstance(one, Handle)
    assert one.state is state
    assert VAST.get("5").path == "/api/v0/instances/5/"


def test_what_is_not_there_is_gone_and_what_is_strange_malformed() -> None:
    for content, trouble in (
        ({"instances": None}, Trouble.GONE),
        ([], Trouble.GONE),
        ({"instances": 5}, Trouble.MALFORMED),
        (b"x", Trouble.MALFORMED),
    ):
        failed = VAST.got(reply(content))
        assert isinstance(failed, Failed)
        assert failed.trouble is trouble


def test_destroying_what_is_not_there_is_a_success() -> None:
    assert VAST.destroy("5").method == "DELETE"
    assert VAST.destroyed(reply({"success": True})) is None
    assert VAST.destroyed(reply({"success": False}, 404)) is None
    for content, status in (({"success": False}, 200), (b"OK", 200), (b"", 500)):
        assert isinstance(VAST.destroyed(reply(content, status)), Failed)
