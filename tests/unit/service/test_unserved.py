"""What a job's author is told while nobody serves it, and while it learns nothing."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.domain.model import Event, Job, JobState, Metric, Worker, WorkerState
from coordinator.service.operator_warnings import doing, warnings
from coordinator.service.worker_places import may_serve, refusal, why_unserved
from coordinator.wire.job import JobConfig
from coordinator.wire.rest import WorkView


def job(**sections: Any) -> Job:
    """A running job."""
    config = {"name": "sort", "model": "m", "environment": {"type": "digit_sort"}, "budget": {"steps": 9}, **sections}
    return Job("j-1", "sort", "o", JobConfig.model_validate(config), JobState.RUNNING, "", 0.0, 0.0, "m")


def worker(
    name: str, *, state: WorkerState = WorkerState.STANDBY, engine: str = "torch", invite: str = "i", activity: str = ""
) -> Worker:
    """A worker of the pool."""
    return Worker(name, "", name, "o", invite, state, "", 0.0, 0.0, 0.0, 1, {"kind": engine}, 0, 1, activity=activity)


def work(**counts: Any) -> WorkView:
    """What was made so far."""
    none: dict[str, Any] = {"groups": {}, "rollouts": {}, "refused": {}, "rejected": {}}
    return WorkView(**{**none, "accepted_tokens": 0, "workers_serving": 0, "live_leases": 0, **counts})


@pytest.mark.parametrize(
    ("wanted", "invited_to", "words"),
    [
        ({"trust": "named"}, (), "asks for trust 'named' (workers.trust), which w-1 does not have"),
        ({"engines": ["vllm"]}, (), "takes engines vllm (workers.engines), and w-1 has torch"),
        ({"names": ["w-2"]}, (), "takes named workers only (workers.names), and w-1 is not among them"),
        ({}, ("j-9",), "takes workers whose invite names it or names no job, and that of w-1 names others"),
    ],
)
def test_worker_and_author_read_the_same_reason(wanted: dict[str, Any], invited_to: tuple[str, ...], words: str) -> None:
    """One rule: what `echo2-worker status` shows is in the job's own sentence."""
    asked, one = job(workers=wanted), worker("w-1")
    assert may_serve(asked, one, invited_to) == (False, f"job sort {words}")
    assert why_unserved(asked, [one], {"i": invited_to}, gone=0) == f"no worker serves it, of 1 connected: it {words}"


@pytest.mark.parametrize("invited_to", [(), ("j-1",), ("sort", "other")])
def test_who_may_serve_is_refused_nothing(invited_to: tuple[str, ...]) -> None:
    """By id or by name; a worker that the job names has the trust it asks for."""
    named = job(workers={"trust": "named", "names": ["w-1"]})
    assert refusal(named, worker("w-1"), invited_to) is None
    assert may_serve(named, worker("w-1"), invited_to) == (True, "serves job sort")


def test_reasons_are_told_once_each_and_counted() -> None:
    """Three of a kind are one clause; each state of those that may serve has its own, with what the worker says itself."""
    pool = [
        worker("a", engine="scripted"),
        worker("b", engine="scripted"),
        worker("c", engine="scripted"),
        worker("d", activity="not fetched: the model does not fit"),
        worker("e", state=WorkerState.ACTIVE),
    ]
    assert why_unserved(job(), pool, {}, gone=1) == (
        "no worker serves it, of 5 connected: it takes engines torch, vllm (workers.engines), and a has scripted (and 2 more alike); "
        "d is standby: no version of a running job is confirmed in this session yet (it says: not fetched: the model does not fit); "
        "e holds no version that the next step may train on"
    )


@pytest.mark.parametrize(("gone", "lost"), [(0, ""), (3, " (3 left or were lost)")])
def test_an_empty_pool(gone: int, lost: str) -> None:
    """The fix is a command."""
    words = f"no worker serves it: none is connected{lost}; let one join with an invite: echo2 invite create"
    assert why_unserved(job(), [], {}, gone=gone) == words


def test_a_failing_reward_is_told() -> None:
    """No state says it, so the job's page does, with the command that shows why."""
    (words,) = warnings(job(), work(rollouts={"grader_failed": 7, "grader_timeout": 1, "scored": 9}), None)
    assert words == "the reward failed or ran out of time for 8 rollouts; read why: echo2 job rollouts j-1"


@pytest.mark.parametrize(("alike", "groups", "told"), [(0, 0, False), (15, 2, False), (16, 2, True), (8, 0, True)])
def test_rewards_that_are_all_alike_are_told(alike: int, groups: int, told: bool) -> None:
    """When they outnumber what was trained."""
    some = work(rejected={"no_signal": alike}, groups={"trained": groups})
    assert bool(warnings(job(algorithm={"group_size": 8}), some, None)) is told


@pytest.mark.parametrize(
    ("truncated", "share", "told"), [("mask", 0.24, False), ("mask", 0.25, True), ("mask", 1.0, True), ("keep", 1.0, False)]
)
def test_masked_rollouts_are_told(truncated: str, share: float, told: bool) -> None:
    """From a quarter on, with both ways out."""
    asked = job(algorithm={"truncated": truncated}, sampling={"max_new_tokens": 64})
    found = warnings(asked, work(), Metric("j-1", "is_truncated/all/mean", 3, 0.0, share))
    assert found == (
        [
            f"{share:.0%} of the rollouts of step 3 hit sampling.max_new_tokens (64) and are masked, so they train nothing: "
            "raise it, or set algorithm.truncated to 'keep'"
        ]
        if told
        else []
    )


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [
        (["evaluating"], "evaluating step 4: 256 held-out prompts"),
        (["evaluating", "published"], "evaluating step 4: 256 held-out prompts"),
        (["evaluating", "evaluated"], ""),
        (["evaluating", "learner_lost"], ""),
        (["evaluated", "evaluating"], "evaluating step 4: 256 held-out prompts"),
        ([], ""),
    ],
)
def test_an_evaluation_under_way_is_told(kinds: list[str], shown: str) -> None:
    """From the events alone: it is over when it is recorded, or when its learner is lost."""
    events = [Event("j-1", seq, 0.0, kind, {"version": 4, "prompts": 256}) for seq, kind in enumerate(kinds)]
    assert doing(events[::-1]) == shown
