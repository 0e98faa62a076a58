"""How a session ends, is lost, joins again, and changes jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.session import EXIT_ENGINE, EXIT_FENCED, EXIT_OK

Drive = Callable[..., Any]
Make = Callable[..., Any]


def test_draining_finishes_the_leases_in_hand_and_leaves(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """No new work, no new weights; the beat says so; then leave and stop with exit code 0."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0,)))
    d.wake(10.0)
    d.beat(make_version())
    d.tell(ev.DrainRequested("SIGTERM"))
    assert d.only(do.SendBeat).draining
    d.beat(make_version(1), drain="the operator too")
    assert d.ordered(do.FetchManifest) == []
    d.grant(make_lease("L2"))
    assert d.ordered(do.StartGeneration) == []
    d.finish("L1", 0)
    assert len(d.ordered(do.SubmitCompletions)) == 1
    assert d.tell(ev.SubmitAnswered("L1", (0,)))[-1] == do.SendLeave(1, "SIGTERM")
    assert d.session.report().phase == "leaving"
    assert d.tell(ev.Left()) == [do.Stop("SIGTERM", EXIT_OK)]


def test_draining_ends_at_its_deadline_and_at_once_when_asked_again(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """What is unfinished then is handed back by leaving."""
    for again in (False, True):
        d = drive(drain_s=30.0)
        d.hold(make_version())
        d.grant(make_lease(slots=(0,)))
        d.tell(ev.DrainRequested("SIGTERM"))
        if again:
            d.tell(ev.DrainRequested("SIGTERM"))
        else:
            d.wake(29.0)
            assert d.ordered(do.SendLeave) == []
            d.wake(1.0)
        assert len(d.ordered(do.SendLeave)) == 1
        assert d.only(do.AbortGeneration).slots == (0,)


def test_the_coordinator_can_order_a_drain(drive: Drive, make_version: Make) -> None:
    """Its reason becomes the worker's."""
    d = drive()
    d.hold(make_version())
    d.wake(10.0)
    d.beat(drain="maintenance")
    assert d.only(do.SendLeave).reason == "the coordinator asked: maintenance"


def test_leaving_is_tried_for_a_while_and_then_done_without_an_answer(drive: Drive) -> None:
    """An unreachable coordinator cannot keep a worker."""
    d = drive(leave_s=10.0)
    d.join()
    d.tell(ev.DrainRequested("SIGTERM"))
    assert len(d.ordered(do.SendLeave)) == 1
    d.fail(ev.Call.LEAVE, epoch=1)
    sent = 0
    while not d.ordered(do.Stop):
        d.wake_when_due()
        for _ in d.ordered(do.SendLeave):
            sent += 1
            d.fail(ev.Call.LEAVE, epoch=1)
    assert sent >= 1
    assert d.now <= 1000.0 + 10.0 + 1e-6


def test_asked_to_go_while_leaving_it_stops_without_an_answer(drive: Drive) -> None:
    """Whoever asks again does not want to wait."""
    d = drive()
    d.join()
    d.tell(ev.DrainRequested("SIGTERM"))
    assert d.tell(ev.DrainRequested("SIGTERM")) == [do.Stop("SIGTERM", EXIT_OK)]


def test_a_definite_no_to_leave_is_an_end_too(drive: Drive) -> None:
    """There is nothing more to say."""
    d = drive()
    d.join()
    d.tell(ev.DrainRequested("SIGTERM"))
    assert d.fail(ev.Call.LEAVE, ev.Outcome.FENCED, epoch=1) == [do.Stop("SIGTERM", EXIT_OK)]


def test_draining_before_having_joined_stops_at_once(drive: Drive) -> None:
    """There is nothing to leave."""
    d = drive()
    d.wake()
    assert d.tell(ev.DrainRequested("SIGINT")) == [do.Stop("SIGINT", EXIT_OK)]


def test_an_unexpected_goodbye_is_an_end(drive: Drive) -> None:
    """Left without having asked."""
    d = drive()
    d.join()
    assert d.tell(ev.Left()) == [do.Stop("the coordinator let this worker go", EXIT_OK)]


@pytest.mark.parametrize("call", [ev.Call.BEAT, ev.Call.LEASE, ev.Call.SUBMIT])
def test_an_older_session_fenced_by_a_newer_one_stops_clearly(drive: Drive, make_version: Make, call: ev.Call) -> None:
    """Two processes with one key: the newer wins."""
    d = drive()
    d.hold(make_version())
    (stop,) = d.fail(call, ev.Outcome.FENCED, reason="session 1 is old", epoch=1, lease_id="L1")
    assert stop.exit_code == EXIT_FENCED
    assert "newer session" in stop.reason


def test_a_forgotten_session_joins_again_and_confirms_again(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Its leases are with others by then; its weights are still good, but unconfirmed in the new session."""
    d = drive()
    v = make_version()
    d.hold(v)
    d.grant(make_lease(slots=(0, 1)))
    d.fail(ev.Call.BEAT, ev.Outcome.REJOIN, code="worker_gone", reason="silent for 40 s", epoch=1)
    assert d.only(do.AbortGeneration).lease_id == "L1"
    d.new = []
    while not d.ordered(do.SendJoin):
        d.wake_when_due()
    assert "silent" in d.session.report().because
    d.tell(ev.Joined("w-1", 2, 10.0))
    assert d.only(do.SendBeat).held == ()
    assert d.only(do.SendConfirm).epoch == 2
    assert d.ordered(do.AskLease) == []
    assert d.grant(make_lease("L2"), epoch=1) == []
    assert d.fail(ev.Call.LEASE, ev.Outcome.FENCED, epoch=1) == []
    d.tell(ev.ConfirmAnswered(v, accepted=True, reason=""))
    assert d.only(do.AskLease).epoch == 2
    assert d.tell(ev.Joined("w-1", 3, 10.0)) == []


def test_a_forgotten_session_that_drains_just_stops(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Nothing is left to finish."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0,)))
    d.tell(ev.DrainRequested("SIGTERM"))
    d.fail(ev.Call.BEAT, ev.Outcome.REJOIN, epoch=1)
    assert d.only(do.Stop) == do.Stop("SIGTERM", EXIT_OK)


def test_answers_are_ignored_while_joining_again(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """A long poll that ends late grants nothing."""
    d = drive()
    d.hold(make_version())
    d.fail(ev.Call.BEAT, ev.Outcome.REJOIN, epoch=1)
    assert d.grant(make_lease(), epoch=1) == []
    assert d.session.report().live_leases == 0


def test_a_failed_engine_sends_what_is_finished_and_ends_with_its_own_code(
    drive: Drive, make_version: Make, make_lease: Make
) -> None:
    """Running slots are handed back by leaving; finished ones are not lost."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)), make_lease("L2", slots=(0,)))
    d.finish("L1", 0)
    d.tell(ev.EngineFailed("CUDA error"))
    assert len(d.ordered(do.SubmitCompletions)) == 1
    assert d.session.report().live_leases == 1
    d.tell(ev.SubmitAnswered("L1", (0,)))
    assert d.only(do.SendLeave).reason == "the engine failed: CUDA error"
    assert d.tell(ev.Left())[-1] == do.Stop("the engine failed: CUDA error", EXIT_ENGINE)


def test_a_swap_that_hangs_is_an_engine_failure(drive: Drive, make_version: Make) -> None:
    """Every state has a timer."""
    d = drive(swap_s=60.0)
    d.join()
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.now += 60.0
    d.wake()
    assert d.only(do.SendLeave).reason.startswith("the engine failed: a weight update took more than 60 s")


def test_a_call_that_never_reports_counts_as_failed(drive: Drive, make_version: Make) -> None:
    """A lost report cannot stop the worker: beats, and the fetch that waited for a manifest, start again."""
    d = drive(silence_s=100.0)
    d.join()
    d.beat(make_version(1))
    d.now += 100.0
    d.wake()
    assert "no_report" in d.codes()
    d.new = []
    while not d.ordered(do.FetchManifest):
        d.wake_when_due()
        if d.ordered(do.SendBeat):
            d.beat(make_version(1))


def test_a_worker_changes_jobs_only_with_empty_hands(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """One engine holds one model: a lease of the old job is never generated with the new one's weights."""
    d = drive()
    other = make_version(7, job="other")
    d.hold(make_version(0))
    d.grant(make_lease(slots=(0,)))
    d.wake(10.0)
    assert d.ordered(do.SendBeat)
    assert d.beat(other) == []
    d.finish("L1", 0)
    assert d.tell(ev.SubmitAnswered("L1", (0,)))[0] == do.FetchManifest(other)
    d.fetch(other)
    assert d.only(do.SwapWeights).version == other
    assert d.grant(make_lease("L2", slots=(0,))) == []
    d.tell(ev.SwapFinished(other, (-1.0,), 0.1))
    d.tell(ev.ConfirmAnswered(other, accepted=True, reason=""))
    assert d.only(do.DropVersions).versions == {make_version(0)}
    d.grant(make_lease("L3", slots=(0,), job="other", version=7))
    assert d.ordered(do.StartGeneration)
    d.finish("L3", 0, (0, 0))  # a version number that this model never had
    assert d.session.report().unsent == 0
    assert d.ordered(do.StartGeneration)


def test_a_backlog_of_unanswered_completions_stops_the_asking(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Every queue has a bound: the worker does not pile up what it cannot deliver."""
    d = drive(slots=2)
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)))
    d.finish("L1", 0)
    d.finish("L1", 1)
    assert d.ordered(do.AskLease) == []
    d.tell(ev.SubmitAnswered("L1", (0, 1)))
    assert d.only(do.AskLease).free_slots == 2


def test_a_quarantined_worker_says_so(drive: Drive, make_version: Make) -> None:
    """The coordinator's verdict is the reason shown."""
    d = drive()
    d.hold(make_version())
    d.wake(10.0)
    d.beat(state="quarantined", reason="quarantined: wrong canary")
    assert d.session.report().because == "quarantined: quarantined: wrong canary"
    assert not d.session.report().working
    d.tell(ev.DrainRequested("SIGTERM"))
    assert d.session.report().because == "SIGTERM"


def test_events_of_the_past_change_nothing(drive: Drive, make_version: Make) -> None:
    """Late reports about things that are over are ignored."""
    d = drive()
    d.hold(make_version(0))
    for late in (
        ev.ManifestArrived(make_version(9)),
        ev.FetchFinished(make_version(9), 1, 1, 1.0),
        ev.SwapFinished(make_version(9), (), 1.0),
        ev.ConfirmAnswered(make_version(0), accepted=False, reason="late"),
        ev.SubmitAnswered("L9", (0,)),
        ev.CompletionFailed("L9", 0, "late"),
    ):
        assert d.tell(late) == []
    assert d.session.report().loaded == str(make_version(0))


def test_a_large_lease_is_sent_in_bounded_submissions(
    drive: Drive, make_version: Make, make_lease: Make, make_completion: Make
) -> None:
    """At most 2^20 tokens a submission (the frame has a limit), at least one completion."""
    d = drive(slots=4)
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1, 2)))
    big = make_completion((0,) * ((1 << 19) + 1))
    for slot in (0, 1, 2):
        d.tell(ev.CompletionFinished("L1", slot, big))
    assert [slot for slot, _ in d.only(do.SubmitCompletions).completions] == [0]
    d.tell(ev.SubmitAnswered("L1", (0,)))
    assert [slot for slot, _ in d.only(do.SubmitCompletions).completions] == [1]


def test_two_calls_that_lost_the_session_make_one_join(drive: Drive, make_version: Make) -> None:
    """A second join would open a newer session, and this worker would then be fenced by itself."""
    d = drive()
    d.hold(make_version())
    d.wake(10.0)
    d.fail(ev.Call.BEAT, ev.Outcome.REJOIN, code="worker_gone", epoch=1)
    while not d.ordered(do.SendJoin):
        d.wake_when_due()
    for late in (ev.Outcome.REJOIN, ev.Outcome.FENCED):  # the long poll of the old session, answered while the join is under way
        d.fail(ev.Call.LEASE, late, epoch=1)
        assert d.new == []
    d.wake(60.0)
    assert d.ordered(do.SendJoin) == []
    d.tell(ev.Joined("w-1", 2, 10.0))
    assert d.session.report().phase == "joined"


def test_a_join_that_is_answered_with_join_again_is_tried_again(drive: Drive) -> None:
    """Whatever the coordinator means by it, the worker neither stops nor hangs."""
    d = drive()
    d.wake()
    d.fail(ev.Call.JOIN, ev.Outcome.REJOIN)
    assert d.wake_when_due() == [do.SendJoin()]


def test_a_manifest_asked_in_a_lost_session_is_asked_again(drive: Drive, make_version: Make) -> None:
    """Its answer, or its failure, belongs to the past: the fetch must not wait for it for ever."""
    for answered in (False, True):
        d = drive()
        d.join()
        assert d.beat(make_version(1)) == [do.FetchManifest(make_version(1))]
        d.wake(10.0)
        d.fail(ev.Call.BEAT, ev.Outcome.REJOIN, epoch=1)
        d.new = []
        while not d.ordered(do.SendJoin):
            d.wake_when_due()
        d.tell(ev.Joined("w-1", 2, 10.0))
        assert d.ordered(do.FetchManifest) == [do.FetchManifest(make_version(1))]
        if answered:
            assert d.tell(ev.ManifestArrived(make_version(1))) == [do.FetchPieces(make_version(1))]
            assert d.tell(ev.ManifestArrived(make_version(1))) == []
        else:
            assert d.fail(ev.Call.MANIFEST, epoch=1) == []
            assert d.tell(ev.ManifestArrived(make_version(1))) == [do.FetchPieces(make_version(1))]


def test_a_swap_under_way_while_joining_again_is_confirmed_in_the_new_session(drive: Drive, make_version: Make) -> None:
    """The old version is not confirmed any more when another is just being swapped in: one confirmation at a time."""
    d = drive()
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.fail(ev.Call.LEASE, ev.Outcome.REJOIN, epoch=1)
    d.new = []
    while not d.ordered(do.SendJoin):
        d.wake_when_due()
    d.tell(ev.Joined("w-1", 2, 10.0))
    assert d.ordered(do.SendConfirm) == []
    d.tell(ev.SwapFinished(make_version(1), (-1.0,), 0.1))
    assert d.only(do.SendConfirm).version == make_version(1)
    assert d.only(do.SendConfirm).epoch == 2
    assert d.ordered(do.DropVersions) == []


def test_a_swap_that_fails_while_joining_again_confirms_the_old_version(drive: Drive, make_version: Make) -> None:
    """The engine kept it, and the new session does not know of it yet."""
    d = drive()
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.fail(ev.Call.LEASE, ev.Outcome.REJOIN, epoch=1)
    d.new = []
    while not d.ordered(do.SendJoin):
        d.wake_when_due()
    d.tell(ev.Joined("w-1", 2, 10.0))
    d.tell(ev.SwapFailed(make_version(1), "shape differs"))
    assert d.only(do.SendConfirm).version == make_version(0)


def test_a_confirmation_of_a_lost_session_does_not_count(drive: Drive, make_version: Make) -> None:
    """The new session's coordinator knows nothing of it: without a confirmation of its own no lease would ever come."""
    d = drive()
    v = make_version(1)
    d.join()
    d.beat(v)
    d.fetch(v)
    d.tell(ev.SwapFinished(v, (-1.0,), 0.1))
    d.fail(ev.Call.BEAT, ev.Outcome.REJOIN, epoch=1)
    d.new = []
    while not d.ordered(do.SendJoin):
        d.wake_when_due()
    d.tell(ev.Joined("w-1", 2, 10.0))
    assert d.only(do.SendConfirm).epoch == 2
    assert d.tell(ev.ConfirmAnswered(v, accepted=True, reason="", epoch=1)) == []
    d.tell(ev.ConfirmAnswered(v, accepted=True, reason="", epoch=2))
    assert d.only(do.AskLease).epoch == 2


def test_a_job_that_cannot_be_loaded_leaves_nothing_loaded(drive: Drive, make_version: Make) -> None:
    """The engine gave up the old model to load the new one: no work is asked for with weights that are gone."""
    d = drive(tries_a_version=1)
    other = make_version(7, job="other")
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(other)
    d.fetch(other)
    d.tell(ev.LeaseAnswered(1))
    d.tell(ev.SwapFailed(other, "out of memory", kept=False))
    assert d.session.report().loaded == ""
    d.wake(20.0)
    assert d.ordered(do.AskLease) == []
    assert "version 7 (00000000) failed 1 times here" in d.session.report().because
    d.beat(make_version(0))
    assert d.only(do.SwapWeights).version == make_version(0)
