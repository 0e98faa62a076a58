"""A lying worker beside an honest one in a whole, real system: the job ends sound, and the liar gets what it earned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import load_module
from tests.e2e.cluster import Cluster, scripted_job

Hostile = load_module("echo2_attack_hostile", Path(__file__).with_name("hostile.py")).Hostile


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        made.start_coordinator()
        made.start_worker("honest")
        yield made


def outsider(cluster: Cluster) -> Any:
    served = json.loads((cluster.home / "serve.json").read_text())
    code = cluster.run(lambda c: c.post("/invites", {}))["code"]
    return Hostile(served["url"], served["public_key"], code)


def ends_sound(cluster: Cluster, job: str) -> dict[str, Any]:
    ended = cluster.until_ended(job, within_s=60, restart=False)
    assert ended["state"] == "completed", ended["reason"]
    result = cluster.audit(job)
    assert result["ok"], result["findings"]
    return ended


LIES: dict[str, Any] = {
    "nan": lambda n, _: {"logprobs": np.full(n, np.nan, np.float32)},
    "positive": lambda n, _: {"logprobs": np.full(n, 0.1, np.float32)},
    "impossible": lambda n, _: {"logprobs": np.full(n, -3e38, np.float32)},
    "infinite": lambda n, _: {"logprobs": np.full(n, -np.inf, np.float32)},
    "huge_ids": lambda n, _: {"token_ids": np.full(n, 2**31 - 1, np.int32)},
    "negative_ids": lambda n, _: {"token_ids": np.full(n, -1, np.int32)},
    "other_version": lambda n, _: {"versions": np.full(n, 2**31 - 1, np.int32), "digests": {str(2**31 - 1): "a" * 64}},
    "other_digest": lambda n, lease: {"digests": {str(lease["version"]): "b" * 64}},
    "old_fence": lambda n, lease: {"fence": lease["fence"] - 1},
    "endless_fence": lambda n, _: {"fence": -(2**80)},
    "of_nobody": lambda n, _: {"lease_id": "../../etc/passwd\x1b[2J"},
    "too_fast": lambda n, lease: {"completions": [_done(slot, lease, 0.0) for slot in lease["slots"]]},
    "twice": lambda n, lease: {"completions": [_done(lease["slots"][0], lease, 1.0) for _ in lease["slots"]]},
    "stop": lambda n, lease: {"completions": [{**_done(s, lease, 1.0), "stop_reason": "stop"} for s in lease["slots"]]},
}


def _done(slot: int, lease: Any, seconds: float) -> dict[str, Any]:
    cap = lease["sampling"]["max_new_tokens"]
    return {"slot": slot, "length": cap, "stop_reason": "length", "generate_s": seconds}


async def _tell_all_lies(outside: Any) -> list[str]:
    """Tell lies until quarantined; what was said to each."""
    said: list[str] = []
    async with outside as liar:
        await liar.join()
        for name, lie in LIES.items():
            lease = await _granted(liar)
            if lease is None:
                break
            tokens = lease["sampling"]["max_new_tokens"] * len(lease["slots"])
            status, reply = await liar.submit(lease, **lie(tokens, lease))
            assert status == 200, (name, reply)
            assert reply["accepted"] in ([], [lease["slots"][0]]), name
            said += [f"{name}: {refused['code']}" for refused in reply["refused"]]
        _, beat = await liar.say("heartbeat", held=[])
        said.append(beat["state"])
    return said


async def _granted(liar: Any) -> Any:
    """A lease of the newest version, confirmed first; None when there will be none."""
    for _ in range(60):
        _, beat = await liar.say("heartbeat", held=[])
        if beat.get("state") == "quarantined":
            return None
        if beat.get("versions") and (await liar.confirm(beat["versions"][0]))["accepted"]:
            lease = await liar.lease(beat["versions"][0], wait_s=1.0)
            if lease is not None:
                return lease
        await asyncio.sleep(0.1)
    return None


@pytest.mark.long
def test_lies_in_submissions_lead_to_quarantine_and_the_honest_one_finishes(cluster: Cluster, tiny_model: Path) -> None:
    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 14}))
    said = asyncio.run(_tell_all_lies(outsider(cluster)))
    assert said[-1] == "quarantined", said
    assert {"nan: logprob_not_finite", "positive: logprob_positive", "huge_ids: outside_vocabulary"} <= set(said)
    ended = ends_sound(cluster, job)
    assert ended["work"]["refused"]["logprob_not_finite"] >= 1
    (liar,) = (w for w in cluster.run(lambda c: c.get("/workers"))["workers"] if w["name"] == "mallory")
    assert (liar["state"], liar["accepted_rollouts"]) == ("quarantined", 0)


def test_log_probs_that_are_finite_and_absurd_do_not_reach_the_weights(cluster: Cluster, tiny_model: Path) -> None:
    """-104 passes the structural ring; the learner's guard drops it. A figure without a number is left out, and harms nobody."""

    async def poison(outside: Any) -> int:
        accepted = 0
        async with outside as liar:
            await liar.join()
            for worst in (-104.0, -103.0, -50.0):
                lease = await _granted(liar)
                if lease is not None:
                    tokens = lease["sampling"]["max_new_tokens"] * len(lease["slots"])
                    words = _varied(tokens, lease["sampling"]["stop_token_ids"])  # other rewards: a group that teaches
                    _, reply = await liar.submit(lease, logprobs=np.full(tokens, worst, np.float32), token_ids=words)
                    accepted += len(reply["accepted"])
        return accepted

    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 14}, algorithm={"loss": "dppo", "learning_rate": 1e-4}))
    assert asyncio.run(poison(outsider(cluster))) > 0
    ends_sound(cluster, job)
    for name in ("optim/grad_norm", "optim/applied", "reward/all/mean"):
        points = cluster.run(lambda c, name=name: c.get(f"/jobs/{job}/metrics", {"name": name}))["points"]
        assert len(points) == 14, name
        assert all(point["value"] is not None for point in points), name
    guarded = cluster.run(lambda c: c.get(f"/jobs/{job}/metrics", {"name": "is_guarded/mean"}))["points"]
    assert any(point["value"] > 0 for point in guarded)


def _varied(tokens: int, stops: list[int]) -> Any:
    allowed = np.setdiff1d(np.arange(3, 60, dtype=np.int32), np.array(stops, np.int32))
    return np.random.default_rng(0).choice(allowed, tokens).astype(np.int32)


@pytest.mark.long
def test_a_wrong_canary_is_never_leased_to_and_ends_in_quarantine(cluster: Cluster, tiny_model: Path) -> None:
    async def lie(outside: Any) -> list[Any]:
        answers = []
        async with outside as liar:
            await liar.join()
            version = await _first_version(liar)
            for canary in ([-1.0] * 23, [], [-1e300] * 23, [0.5] * 23, [-1.0] * 22, [-1.0] * 4096):
                answers.append(await liar.confirm(version, canary))
            answers.append(await liar.lease(version, wait_s=0.0))
            answers.append((await liar.say("heartbeat", held=[]))[1]["state"])
        return answers

    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 8}))
    *canaries, lease, state = asyncio.run(lie(outsider(cluster)))
    assert not any(answer["accepted"] for answer in canaries)
    assert all(answer["reason"] for answer in canaries)
    assert lease is None
    assert state == "quarantined"
    ends_sound(cluster, job)


async def _first_version(liar: Any) -> Any:
    for _ in range(300):
        _, beat = await liar.say("heartbeat", held=[])
        if beat["versions"]:
            return beat["versions"][0]
        await asyncio.sleep(0.1)
    raise AssertionError("no version was published")


@pytest.mark.long
def test_a_worker_that_takes_work_and_goes_silent_holds_nothing_up(cluster: Cluster, tiny_model: Path) -> None:
    """It takes as much as it is given, never beats, never answers; its slots go to the honest one with the same seeds."""

    async def grab(outside: Any) -> int:
        taken = 0
        async with outside as liar:
            await liar.join()
            version = await _first_version(liar)
            for _ in range(40):
                if (await liar.confirm(version))["accepted"] and await liar.lease(version, free=64, wait_s=0.5) is not None:
                    taken += 1
                    break
                version = await _first_version(liar)
        return taken

    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 14}))
    assert asyncio.run(grab(outsider(cluster))) > 0
    ends_sound(cluster, job)
    gone = cluster.run(lambda c: c.get("/workers", {"state": "gone"}))["workers"]
    assert [(w["name"], "not heard" in w["reason"]) for w in gone] == [("mallory", True)]


def test_a_price_holds_from_join_to_join_and_never_passes_the_ceiling(cluster: Cluster) -> None:
    """A higher price needs a new session, whose old one is paid at the old price; above the ceiling nobody joins."""
    served = json.loads((cluster.home / "serve.json").read_text())
    code = cluster.run(lambda c: c.post("/invites", {"price_ceiling_uusd_per_hour": 300_000}))["code"]

    async def haggle() -> list[Any]:
        async with Hostile(served["url"], served["public_key"], code) as liar:
            await liar.join(price_uusd_per_hour=1)
            status, problem = await _join(liar, 300_001)
            welcome = await liar.join(price_uusd_per_hour=300_000)
            return [status, problem["code"], welcome["session_epoch"]]

    assert asyncio.run(haggle()) == [403, "price_above_ceiling", 2]
    prices = cluster.rows(
        "SELECT epoch, price_uusd_per_hour FROM worker_sessions WHERE worker_id LIKE 'w-%' ORDER BY price_uusd_per_hour"
    )
    assert (1, 1) in prices
    assert (2, 300_000) in prices


async def _join(liar: Any, price: int) -> tuple[int, Any]:
    try:
        return 200, await liar.join(price_uusd_per_hour=price)
    except AssertionError as refused:
        return 403, refused.args[0]
