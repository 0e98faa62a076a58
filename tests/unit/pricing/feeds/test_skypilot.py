"""SkyPilot's calls and replies, as the shell carries them."""

from __future__ import annotations

from typing import Any

import pytest

from pricing.feeds.contract import Failed, Handle, Need, Offers, Page, RentalOffer, Shown, Trouble
from pricing.feeds.skypilot import SkyPilot
from tests.unit.pricing.feeds.answers import LABEL, SPEC, reply

SKY = SkyPilot()
RECORD: dict[str, Any] = {
    "infra": "aws",
    "instance_type": "g5.xlarge",
    "accelerator": "A10G",
    "count": 1,
    "device_memory_gb": 24,
    "price": 1.0,
    "region": "us-east-1",
}
CLUSTER: dict[str, Any] = {"name": LABEL, "status": "UP", "launched_at": 1000}


def test_the_catalogue_becomes_offers_the_cheapest_first() -> None:
    assert SKY.search(Need(cards=("A10G",))).query == (("name", "A10G"),)
    dear = {**RECORD, "price": 9.0, "instance_type": "big", "device_memory_gb": None}
    small = {**RECORD, "device_memory_gb": 8}
    found = SKY.offers(reply([dear, RECORD, small, {**RECORD, "price": None}, 5]), Need(min_vram_mb=20_000), now=2.0)
    assert isinstance(found, Offers)
    assert found.offers == (
        RentalOffer(
            "skypilot", "aws/g5.xlarge/A10G:1", "A10G", 1_000_000, vram_mb=24_000, region="us-east-1", fetched_at=2.0, tier="aws"
        ),
    )
    assert len(found.skipped) == 2
    both = SKY.offers(reply([{**dear, "device_memory_gb": 24}, RECORD]), Need(), now=2.0)
    assert isinstance(both, Offers)
    assert [offer.uusd_per_hour for offer in both.offers] == [1_000_000, 9_000_000]
    capped = SKY.offers(reply([RECORD]), Need(most_uusd_per_hour=10), now=2.0)
    assert isinstance(capped, Offers)
    assert capped.offers == ()


def test_a_launch_takes_itself_down_and_names_a_cluster() -> None:
    call = SKY.create(RentalOffer("skypilot", "x", "A10G", 1_000_000, cards=2, tier="aws"), SPEC, LABEL)
    assert call.body is not None
    assert (call.body["cluster_name"], call.body["accelerators"], call.body["down"]) == (LABEL, "A10G:2", True)
    assert call.body["max_hourly_cost"] == 1.0
    with pytest.raises(ValueError, match="cluster's name"):
        SKY.create(RentalOffer("skypilot", "x", "A10G", 1), SPEC, "Not_A_Name")
    assert SKY.created(reply({}), LABEL) == Handle(LABEL, LABEL, Shown.STARTING)


@pytest.mark.parametrize(
    ("status", "state"), [("INIT", Shown.STARTING), ("UP", Shown.RUNNING), ("STOPPED", Shown.PAUSED), ("?", Shown.UNKNOWN)]
)
def test_clusters_are_listed(status: str, state: Shown) -> None:
    page = SKY.listed(reply([{**CLUSTER, "status": status}, {"name": "mine"}]), "echo2-")
    assert page == Page((Handle(LABEL, LABEL, state, None, 1000.0),), None, ())
    assert SKY.list("echo2-", None).path == "/status"
    assert SKY.got(reply([{**CLUSTER, "status": status}])) == Handle(LABEL, LABEL, state, None, 1000.0)
    assert SKY.get(LABEL).query == (("name", LABEL),)


@pytest.mark.parametrize(
    ("status", "trouble"), [(404, Trouble.GONE), (409, Trouble.NO_CAPACITY), (501, Trouble.REFUSED), (500, Trouble.UNKNOWN)]
)
def test_errors_become_values(status: int, trouble: Trouble) -> None:
    for failed in (
        SKY.created(reply({"detail": "why"}, status), LABEL),
        SKY.got(reply({"detail": "why"}, status)),
        SKY.offers(reply({"detail": "why"}, status), Need(), now=0.0),
    ):
        assert failed == Failed(trouble, "why")
    assert SKY.destroy(LABEL).method == "DELETE"
    assert (SKY.destroyed(reply({"detail": "why"}, status)) is None) is (status == 404)
    assert SKY.destroyed(reply({})) is None


def test_what_is_no_list_is_malformed_and_an_empty_one_is_gone() -> None:
    for content in ({}, b"x"):
        assert isinstance(SKY.listed(reply(content), "echo2-"), Failed)
    assert SKY.got(reply([])) == Failed(Trouble.GONE, "there is no such cluster")
