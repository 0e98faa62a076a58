"""RunPod v2's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from pricing.feeds.contract import Failed, Handle, Need, Offers, Page, RentalOffer, Shown, Trouble
from pricing.feeds.runpod import RunPod
from tests.unit.pricing.feeds.answers import LABEL, SPEC, reply

RUNPOD = RunPod()
CARD = "NVIDIA GeForce RTX 4090"
TYPE: dict[str, Any] = {
    "id": CARD,
    "memory": 24,
    "secure": True,
    "community": True,
    "price": {"secure": 0.74, "community": 0.34},
    "availability": "LOW",
}
POD: dict[str, Any] = {"id": "7h9k", "name": LABEL, "status": "RUNNING", "cost": 0.34, "createdAt": "2026-06-01T12:00:00Z"}


def _offers(*types: Any, need: Need | None = None) -> Offers:
    found = RUNPOD.offers(reply({"gpus": list(types)}), need or Need(), now=1.0)
    assert isinstance(found, Offers)
    return found


def test_a_card_is_one_offer_in_each_cloud_the_cheapest_first() -> None:
    assert RUNPOD.search(Need()).query == (("include", "AVAILABILITY"), ("product", "POD"))
    found = _offers(TYPE)
    assert [(offer.tier, offer.uusd_per_hour, offer.vram_mb) for offer in found.offers] == [
        ("COMMUNITY", 340_000, 24_000),
        ("SECURE", 740_000, 24_000),
    ]
    assert _offers({**TYPE, "availability": "NONE"}).offers == ()
    assert [offer.tier for offer in _offers({**TYPE, "community": False}).offers] == ["SECURE"]


def test_offers_that_do_not_fit_are_left_out_and_bad_ones_named() -> None:
    need = Need(cards=(CARD,), min_vram_mb=20_000, most_uusd_per_hour=400_000)
    found = _offers(TYPE, {**TYPE, "id": "L4"}, {**TYPE, "memory": 8}, need=need)
    assert [offer.id for offer in found.offers] == [f"COMMUNITY/{CARD}"]
    bad = _offers({**TYPE, "memory": 24_000}, {**TYPE, "price": None}, 3)
    assert bad.offers == ()
    assert bad.skipped[0] == "memory is 24000: expected GB of one card, 1 to 2000"
    assert len(bad.skipped) == 3


def test_a_create_sends_only_what_the_schema_knows() -> None:
    call = RUNPOD.create(RentalOffer("runpod", "x", CARD, 1, tier="COMMUNITY"), SPEC, LABEL)
    assert (call.method, call.path) == ("POST", "/v2/pods")
    assert call.body == {
        "name": LABEL,
        "image": "img:1",
        "args": "bash -c 'echo2-worker join'",
        "disk": 50,
        "env": {"ECHO2_INVITE": "secret-invite"},
        "cloud": "COMMUNITY",
        "gpu": {"id": CARD, "count": 1},
    }


def test_a_created_pod_is_read() -> None:
    assert RUNPOD.created(reply(POD, 201), LABEL) == Handle("7h9k", LABEL, Shown.RUNNING, 340_000, 1_780_315_200.0, "RUNNING")
    for content, status, trouble in (
        ({**POD, "name": "other"}, 201, Trouble.MALFORMED),
        ({**POD, "cost": "free"}, 201, Trouble.MALFORMED),
        ([], 201, Trouble.MALFORMED),
        (b"", 201, Trouble.MALFORMED),
    ):
        failed = RUNPOD.created(reply(content, status), LABEL)
        assert isinstance(failed, Failed)
        assert failed.trouble is trouble
        assert failed.instance_id == ("7h9k" if isinstance(content, dict) else None)


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        (429, Trouble.RETRY_AFTER),
        (404, Trouble.GONE),
        (402, Trouble.NO_BALANCE),
        (400, Trouble.NO_CAPACITY),
        (403, Trouble.NO_CAPACITY),
        (422, Trouble.REFUSED),
        (401, Trouble.REFUSED),
        (503, Trouble.UNKNOWN),
        (301, Trouble.UNKNOWN),
    ],
)
def test_problem_documents_become_values(status: int, trouble: Trouble) -> None:
    content = {"title": "T", "status": status, "detail": "why"}
    for failed in (
        RUNPOD.created(reply(content, status, retry_after="12"), LABEL),
        RUNPOD.listed(reply(content, status), "e"),
        RUNPOD.got(reply(content, status)),
    ):
        assert isinstance(failed, Failed)
        assert failed.trouble is trouble
        assert failed.words == f"{status}: why"
    late = RUNPOD.created(reply(content, 429, retry_after="12"), LABEL)
    assert isinstance(late, Failed)
    assert late.retry_after_s == 12.0


def test_pods_are_listed_by_name() -> None:
    page = RUNPOD.listed(reply({"pods": [POD, {**POD, "name": "mine"}]}), "echo2-abc-")
    assert isinstance(page, Page)
    assert [one.id for one in page.handles] == ["7h9k"]
    assert page.next_page is None
    assert RUNPOD.list("echo2-", None).path == "/v2/pods"


def test_the_retired_shape_is_told_apart() -> None:
    """API v1 answers with a bare list."""
    failed = RUNPOD.listed(reply([POD]), "echo2-")
    assert isinstance(failed, Failed)
    assert "v1" in failed.words
    for content in ({"pods": 3}, b"<html>", {}):
        assert isinstance(RUNPOD.listed(reply(content), "echo2-"), Failed)
    assert isinstance(RUNPOD.offers(reply([]), Need(), now=0.0), Failed)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("PROVISIONING", Shown.STARTING),
        ("STARTING", Shown.STARTING),
        ("RUNNING", Shown.RUNNING),
        ("EXITED", Shown.PAUSED),
        ("ERROR", Shown.UNKNOWN),
        ("TERMINATED", Shown.GONE),
        ("new word", Shown.UNKNOWN),
    ],
)
def test_states(status: str, state: Shown) -> None:
    one = RUNPOD.got(reply({**POD, "status": status}))
    assert isinstance(one, Handle)
    assert one.state is state
    assert RUNPOD.get("7h9k").path == "/v2/pods/7h9k"


def test_a_strange_pod_is_malformed() -> None:
    for content in ({**POD, "id": "a/b"}, b"x"):
        failed = RUNPOD.got(reply(content))
        assert isinstance(failed, Failed)
        assert failed.trouble is Trouble.MALFORMED


def test_destroying_what_is_not_there_is_a_success() -> None:
    assert RUNPOD.destroy("7h9k").method == "DELETE"
    assert RUNPOD.destroyed(reply(None, 204)) is None
    assert RUNPOD.destroyed(reply({"detail": "not found"}, 404)) is None
    assert isinstance(RUNPOD.destroyed(reply(None, 500)), Failed)
