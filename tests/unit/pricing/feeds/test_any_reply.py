"""Whatever a provider sends, reading it brings a value: a loop that dies of a reply destroys nothing any more."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pricing.feeds.contract import Answer, Failed, Feed, Handle, Need, Offers, Page
from pricing.feeds.runpod import RunPod
from pricing.feeds.skypilot import SkyPilot
from pricing.feeds.vast import Vast
from tests.unit.pricing.feeds.answers import LABEL, SPEC

NAMES = re.findall(
    r"\w+",
    """offers instances next_token success new_contract msg error detail id label name status actual_status cur_state next_state
    intended_status status_msg dph_total start_date gpu_name num_gpus gpu_ram machine_id duration min_bid inet_up reliability
    geolocation gpus pods price memory secure community availability cost createdAt launched_at usd_per_hour accelerator infra
    instance_type count device_memory_gb region""",
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([LABEL, "stopped", "running", "RUNNING", "UP", "x" * 300])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=25,
)
RECORDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12).map(
    lambda one: {"label": LABEL, "name": LABEL, "id": 5, **one}
)
BODIES = (
    VALUES
    | st.builds(lambda some: {"offers": some, "instances": some, "gpus": some, "pods": some}, st.lists(RECORDS, max_size=3))
    | RECORDS
)


def _answer(body: Any, status: int) -> Answer:
    return Answer(status, {}, json.dumps(body).encode())


@pytest.mark.parametrize("feed", [Vast(), RunPod(), SkyPilot()], ids=lambda feed: feed.name)
@settings(max_examples=60)
@given(body=BODIES, status=st.sampled_from([200, 201, 204, 302, 400, 402, 404, 429, 500]))
def test_any_json_is_read_or_refused_in_words(feed: Feed, body: Any, status: int) -> None:
    answer = _answer(body, status)
    assert isinstance(feed.offers(answer, Need(), now=0.0), Offers | Failed)
    assert isinstance(feed.listed(answer, LABEL[:6]), Page | Failed)
    assert isinstance(feed.got(answer), Handle | Failed)
    assert isinstance(feed.created(answer, LABEL), Handle | Failed)
    assert isinstance(feed.destroyed(answer), Failed | None)


@pytest.mark.parametrize("feed", [Vast(), RunPod(), SkyPilot()], ids=lambda feed: feed.name)
def test_no_reply_brings_the_invite_into_words(feed: Feed) -> None:
    """A provider may show what a machine was started with."""
    invite = "echo2-invite-1.00ff.SECRET"
    spec = {**SPEC.env, "ECHO2_INVITE": invite}
    record = {
        "id": 5,
        "label": LABEL,
        "name": LABEL,
        "status": "ERROR",
        "status_msg": f"docker run -e ECHO2_INVITE={invite} failed",
    }
    for bad in (
        record,
        {**record, "dph_total": {"env": spec}, "cost": {"env": spec}, "usd_per_hour": {"env": spec}},
        [spec],
        {"detail": f"{spec}"},
    ):
        for body in (bad, {"instances": [bad], "pods": [bad]}, {"instances": bad}, [bad]):
            for status in (200, 201, 400):
                answer = _answer(body, status)
                read = (feed.listed(answer, LABEL[:6]), feed.got(answer), feed.created(answer, LABEL), feed.destroyed(answer))
                assert "SECRET" not in repr(read)
