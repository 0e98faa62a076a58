"""The session machine, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.wire.messages import SlotRefusal
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.session import EXIT_FAILED
from worker_node.domain.weights import Forthcoming, Version

Drive = Callable[..., Any]
Make = Callable[..., Any]


def test_joining_comes_first_and_is_retried_with_back_off(drive: Drive) -> None:
    """The first instruction is to join; a failure is tried again later, never sooner than the server says."""
    d = drive()
    assert d.wake() == [do.SendJoin()]
    assert d.wake() == []
    assert d.fail(ev.Call.JOIN, retry_after_s=7.0) == []
    assert d.session.next_deadline() >= d.now + 7.0
    assert d.wake_when_due() == [do.SendJoin()]


@pytest.mark.parametrize("outcome", [ev.Outcome.REFUSED, ev.Outcome.FATAL])
def test_a_join_refused_for_good_ends_the_worker(drive: Drive, outcome: ev.Outcome) -> None:
    """A used invite does not get better by asking again."""
    d = drive()
    d.wake()
    assert d.fail(ev.Call.JOIN, outcome, reason="the invite was used") == [do.Stop("the invite was used", EXIT_FAILED)]
    assert d.session.next_deadline() is None
    assert d.wake() == []


def test_the_first_beat_follows_the_join_and_the_next_its_answer(drive: Drive) -> None:
    """Beats go out every heartbeat_s, one at a time."""
    d = drive()
    d.join()
    assert d.only(do.SendBeat).epoch == 1
    d.wake(60.0)
    assert d.ordered(do.SendBeat) == []
    d.beat(heartbeat_s=3.0)
    assert d.session.next_deadline() == d.now + 3.0
    d.wake(3.0)
    assert len(d.ordered(do.SendBeat)) == 1
    d.fail(ev.Call.BEAT)
    assert d.wake_when_due() == d.ordered(do.SendBeat) != []


def test_a_new_version_is_fetched_swapped_confirmed_and_then_worked_with(drive: Drive, make_version: Make) -> None:
    """Nothing is advertised or asked for before the canary was accepted."""
    d = drive()
    v = make_version(3)
    d.join()
    assert d.only(do.SendBeat).held == ()
    assert d.beat(v) == [do.FetchManifest(v)]
    assert d.session.report().because == "fetching version 3 (00000000)"
    assert d.tell(ev.ManifestArrived(v)) == [do.FetchPieces(v)]
    assert d.tell(ev.FetchFinished(v, 100, 40, 2.0)) == [do.SwapWeights(v, abort_running=False)]
    assert d.session.report().because.startswith("loading")
    assert d.tell(ev.SwapFinished(v, (-1.0, -2.0), 0.5)) == [do.SendConfirm(1, v, (-1.0, -2.0), 100, 40, 2.0, 0.0, 0.5, 0)]
    assert "confirm" in d.session.report().because
    assert d.tell(ev.ConfirmAnswered(v, accepted=True, reason="")) == [do.AskLease(1, v, 8, 20.0)]
    d.wake(10.0)
    assert d.only(do.SendBeat).held == (v,)
    assert d.session.report().loaded == d.session.report().newest == str(v)


def test_a_version_on_disk_is_not_fetched_again(drive: Drive, make_version: Make) -> None:
    """A restarted worker resumes with what it verified before."""
    v = make_version(3)
    d = drive(stored=frozenset({v, make_version(1)}))
    d.join()
    assert d.beat(v) == [do.SwapWeights(v, abort_running=False)]
    d.tell(ev.SwapFinished(v, (-1.0,), 0.5))
    assert d.only(do.SendConfirm).fetched_bytes == 0
    d.tell(ev.ConfirmAnswered(v, accepted=True, reason=""))
    assert d.only(do.DropVersions) == do.DropVersions(frozenset({make_version(1)}))


def test_leases_become_generation_with_the_leases_seeds(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Every slot is asked of the engine once, with its own seed."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(4, 6)))
    requests = d.only(do.StartGeneration).requests
    assert [(request.key, request.seed) for request in requests] == [(("L1", 4), 104), (("L1", 6), 106)]
    assert d.session.report().because == "generating 2 completions"
    assert d.session.report().working
    assert d.only(do.AskLease).free_slots == 6
    d.grant(make_lease(slots=(4, 6)))
    assert d.ordered(do.StartGeneration) == []


def test_no_work_is_asked_for_while_no_slot_is_free(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """A lease larger than the free slots is queued, and the worker asks again only with a free slot."""
    d = drive(slots=2)
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1, 2)))
    assert d.ordered(do.AskLease) == []
    d.finish("L1", 0)
    d.finish("L1", 1)
    d.wake(1.0)
    assert d.ordered(do.AskLease) == []
    d.tell(ev.SubmitAnswered("L1", (0, 1)))
    assert d.only(do.AskLease).free_slots == 1


def test_an_answer_without_work_is_asked_again_after_the_servers_time(drive: Drive, make_version: Make) -> None:
    """The coordinator's reason is kept for status."""
    d = drive()
    d.hold(make_version())
    d.wake(5.0)
    d.beat(make_version())
    d.tell(ev.LeaseAnswered(1, (), "no group is grantable", 4.0))
    assert len(d.ordered(do.SendBeat)) == 1, "an idle worker asks for news at once"
    assert d.session.report().because == "no group is grantable"
    assert d.wake(3.9) == []
    assert d.wake(0.2) == [do.AskLease(1, make_version(), 8, 20.0)]
    d.tell(ev.LeaseAnswered(1))
    assert d.session.report().because == "no work was offered"
    d.fail(ev.Call.LEASE, reason="no route")
    assert "no route" in d.session.report().because


def test_completions_are_coalesced_and_the_last_of_a_lease_leaves_at_once(
    drive: Drive, make_version: Make, make_lease: Make
) -> None:
    """One submission in flight for a lease; the rest follows together."""
    d = drive(coalesce_s=0.25)
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1, 2, 3)))
    d.finish("L1", 2)
    assert d.ordered(do.SubmitCompletions) == []
    d.now += 0.1
    d.finish("L1", 0)
    d.wake(0.15)
    first = d.only(do.SubmitCompletions)
    assert (first.epoch, first.lease_id, first.fence) == (1, "L1", 1)
    assert [slot for slot, _ in first.completions] == [0, 2]
    assert first.digests == ((0, f"{0:064x}"),)
    d.finish("L1", 1)
    d.finish("L1", 3)
    d.wake(1.0)
    assert d.ordered(do.SubmitCompletions) == []
    d.tell(ev.SubmitAnswered("L1", (0, 2)))
    assert [slot for slot, _ in d.only(do.SubmitCompletions).completions] == [1, 3]
    d.tell(ev.SubmitAnswered("L1", (1, 3)))
    assert d.session.report().live_leases == 0


def test_a_submission_is_repeated_until_it_is_answered(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """The same completions leave again after each failure, even past the lease's deadline."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0,)), ends_in=5.0)
    d.finish("L1", 0)
    first = d.only(do.SubmitCompletions)
    for _ in range(20):
        d.fail(ev.Call.SUBMIT, lease_id="L1", epoch=1)
        d.new = []
        while not d.ordered(do.SubmitCompletions):
            d.wake_when_due()
        assert d.only(do.SubmitCompletions).completions == first.completions
    d.tell(ev.SubmitAnswered("L1", (0,)))
    assert d.session.report().unsent == 0


def test_a_slot_that_the_answer_does_not_name_is_sent_again(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Only an answer for the slot itself settles it."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)))
    d.finish("L1", 0)
    d.finish("L1", 1)
    d.tell(ev.SubmitAnswered("L1", (0,)))
    assert d.session.report().unsent == 1
    d.new = []
    while not d.ordered(do.SubmitCompletions):
        d.wake_when_due()
    assert [slot for slot, _ in d.only(do.SubmitCompletions).completions] == [1]


def test_refused_slots_are_settled_and_their_reason_kept(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """The owner reads why, whose fault, and whether it was paid."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)))
    d.finish("L1", 0)
    d.finish("L1", 1)
    paid = SlotRefusal(slot=0, code="lease_dead", reason="the learner moved on", blame="coordinator", paid=True)
    unpaid = SlotRefusal(slot=1, code="bad_logprob", reason="log-prob above 0", blame="worker", paid=False)
    d.tell(ev.SubmitAnswered("L1", (), (paid, unpaid)))
    notes = d.session.report().notes
    assert [(note.code, note.blame) for note in notes] == [("lease_dead", "coordinator"), ("bad_logprob", "worker")]
    assert "(paid)" in notes[0].reason
    assert "(not paid)" in notes[1].reason
    assert d.session.report().live_leases == 0
    assert d.tell(ev.SubmitAnswered("L1", (0,))) == []


def test_a_submission_refused_for_good_drops_its_lease(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """A definite no is not repeated."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)))
    d.finish("L1", 0)
    d.wake(1.0)
    d.fail(ev.Call.SUBMIT, ev.Outcome.REFUSED, code="invalid_frame", lease_id="L1", epoch=1)
    assert d.only(do.AbortGeneration) == do.AbortGeneration("L1", (1,))
    assert d.session.report().live_leases == 0
    d.fail(ev.Call.SUBMIT, lease_id="L1", epoch=1)
    assert d.finish("L1", 1) == []


def test_fetching_goes_on_beside_generation_and_a_running_fetch_is_finished(
    drive: Drive, make_version: Make, make_lease: Make
) -> None:
    """Version 2 is announced while 1 is under way: a jump would cost more than what is left, so 1 is finished, and 2 is swapped in."""
    d = drive()
    d.hold(make_version(0))
    d.grant(make_lease(slots=(0, 1)))
    d.wake(10.0)
    assert d.beat(make_version(1)) == [do.FetchManifest(make_version(1))]
    d.tell(ev.ManifestArrived(make_version(1)))
    assert "generating 2 completions, fetching version 1" in d.session.report().because
    d.wake(10.0)
    assert d.beat(make_version(2)) == [do.Weigh(make_version(2))]
    assert d.tell(ev.Weighed(make_version(2), left=50, jump=50)) == []
    assert d.tell(ev.FetchFinished(make_version(1), 1, 0, 1.0)) == [do.FetchManifest(make_version(2))]
    d.fetch(make_version(2))
    assert d.only(do.SwapWeights).version == make_version(2)
    d.tell(ev.SwapFinished(make_version(2), (-1.0,), 0.1))
    d.tell(ev.ConfirmAnswered(make_version(2), accepted=True, reason=""))
    assert d.only(do.DropVersions).versions == {make_version(0), make_version(1)}


def test_a_jump_that_is_cheaper_than_what_is_left_is_made_and_counted(drive: Drive, make_version: Make) -> None:
    """Version 1 is skipped on purpose: the confirmation of 2 says so. What of 1 arrives a moment too late is dropped again."""
    d = drive()
    d.hold(make_version(0))
    d.beat(make_version(1))
    d.tell(ev.ManifestArrived(make_version(1)))
    d.wake(10.0)
    assert d.beat(make_version(2)) == [do.Weigh(make_version(2))]
    assert d.tell(ev.Weighed(make_version(1), left=9, jump=1)) == [], "an answer about what was not asked"
    assert d.tell(ev.Weighed(make_version(2), left=51, jump=50)) == [do.StopFetch(make_version(1)), do.FetchPieces(make_version(2))]
    assert "fetching version 2" in d.session.report().because
    d.tell(ev.FetchFailed(make_version(1), "given up"))
    d.tell(ev.FetchFinished(make_version(1), 1, 0, 1.0))
    assert d.tell(ev.FetchFinished(make_version(2), 50, 0, 1.0)) == [do.SwapWeights(make_version(2), abort_running=False)]
    assert d.tell(ev.SwapFinished(make_version(2), (-1.0,), 0.1))[0].skipped == 1
    d.tell(ev.ConfirmAnswered(make_version(2), accepted=True, reason=""))
    assert d.only(do.DropVersions).versions == {make_version(0), make_version(1)}


def test_pieces_of_a_forthcoming_version_are_fetched_ahead_once(drive: Drive, make_version: Make) -> None:
    """Only on a base that is here, and not while anything else is fetched."""
    d = drive()
    d.hold(make_version(0))
    news = Forthcoming("job", 1, make_version(0).digest, "t" * 64)
    alien, again = Forthcoming("job", 2, "f" * 64, "u" * 64), Forthcoming("job", 0, make_version(0).digest, "v" * 64)

    def beat(*versions: Version) -> list[do.Instruction]:
        d.wake(10.0)
        return d.tell(ev.BeatAnswered("active", "", 10.0, versions=versions, forthcoming=(news, alien, again)))

    assert beat(make_version(0)) == [do.Prefetch(news)]
    assert beat(make_version(0)) == [], "asked once"
    assert beat(make_version(1)) == [do.FetchManifest(make_version(1))]


def test_completions_with_an_unconfirmed_version_wait_for_its_confirmation(
    drive: Drive, make_version: Make, make_lease: Make
) -> None:
    """Tokens of a version may only be sent once the coordinator accepted it."""
    d = drive()
    d.hold(make_version(0))
    d.grant(make_lease(slots=(0, 1)))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.finish("L1", 0, (0, 0))
    d.tell(ev.SwapFinished(make_version(1), (-1.0,), 0.1))
    d.finish("L1", 1, (0, 1))
    assert [slot for slot, _ in d.only(do.SubmitCompletions).completions] == [0]
    d.tell(ev.SubmitAnswered("L1", (0,)))
    d.wake(5.0)
    assert d.ordered(do.SubmitCompletions) == []
    d.tell(ev.ConfirmAnswered(make_version(1), accepted=True, reason=""))
    mixed = d.only(do.SubmitCompletions)
    assert [slot for slot, _ in mixed.completions] == [1]
    assert [number for number, _ in mixed.digests] == [0, 1]


def test_abort_on_update_makes_the_running_slots_again(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """on_update = abort: stopped slots start over under the new version, in the same lease."""
    d = drive()
    d.hold(make_version(0))
    d.grant(make_lease(slots=(0, 1), on_update="abort"))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    assert d.only(do.SwapWeights).abort_running
    d.tell(ev.CompletionAborted("L1", 0))
    assert [request.key for request in d.only(do.StartGeneration).requests] == [("L1", 0)]
    assert d.tell(ev.CompletionAborted("gone", 0)) == []
    assert d.tell(ev.CompletionAborted("L1", 9)) == []


def test_a_version_published_anew_stops_what_runs_on_the_lost_bits(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Same number, other digest: a completion never mixes the two, and what is finished keeps its own digest."""
    d = drive()
    lost, anew = make_version(1, digest="a" * 64), make_version(1, digest="b" * 64)
    d.hold(lost)
    d.grant(make_lease(slots=(0, 1)))
    d.wake(10.0)
    d.beat(anew)
    d.finish("L1", 0, (1, 1))
    d.fetch(anew)
    assert d.only(do.SwapWeights) == do.SwapWeights(anew, abort_running=True)
    d.tell(ev.CompletionAborted("L1", 1))
    d.tell(ev.SwapFinished(anew, (-1.0,), 0.1))
    d.wake(1.0)
    assert d.only(do.SubmitCompletions).digests == ((1, "a" * 64),)


def test_a_refused_canary_discards_what_the_version_made_and_fetches_it_anew(
    drive: Drive, make_version: Make, make_lease: Make
) -> None:
    """Nothing made with wrong weights is ever sent; after three failures the version is given up."""
    d = drive(tries_a_version=2)
    bad = make_version(1)
    d.hold(make_version(0))
    d.grant(make_lease(slots=(0, 1, 2)))
    d.wake(10.0)
    d.beat(bad)
    d.fetch(bad)
    d.tell(ev.SwapFinished(bad, (-9.0,), 0.1))
    d.finish("L1", 0, (0, 1))
    d.tell(ev.ConfirmAnswered(bad, accepted=False, reason="wrong_canary: 3.2 off"))
    assert d.only(do.AbortGeneration) == do.AbortGeneration("L1", (1, 2))
    assert d.only(do.DropVersions).versions == {bad}
    assert d.ordered(do.StartGeneration) == []
    d.finish("L1", 1, (0, 1))  # it had finished before the order to stop reached the engine
    assert d.session.report().unsent == 0
    d.tell(ev.CompletionAborted("L1", 2))
    d.fetch(bad)
    while not d.ordered(do.SwapWeights):
        if d.ordered(do.FetchManifest):
            d.fetch(bad)
        else:
            d.wake_when_due()
    d.tell(ev.SwapFinished(bad, (-1.0,), 0.1))
    assert [request.key[1] for request in d.only(do.StartGeneration).requests] == [0, 1, 2]
    d.new = []
    while not d.ordered(do.SendConfirm):
        d.wake_when_due()
    d.tell(ev.ConfirmAnswered(bad, accepted=False, reason="wrong_canary: again"))
    for _ in range(10):
        d.wake_when_due()
        d.beat(bad)
        assert d.ordered(do.FetchManifest) == []
    assert d.codes().count("not_confirmed") == 2


def test_a_confirmation_is_asked_until_it_is_answered(drive: Drive, make_version: Make) -> None:
    """A lost answer is asked for again; a definite no counts as one."""
    d = drive()
    v = make_version(1)
    d.join()
    d.beat(v)
    d.fetch(v)
    d.tell(ev.SwapFinished(v, (-1.0,), 0.1))
    d.fail(ev.Call.CONFIRM, epoch=1)
    d.new = []
    while not d.ordered(do.SendConfirm):
        d.wake_when_due()
    d.fail(ev.Call.CONFIRM, ev.Outcome.REFUSED, code="gone", epoch=1)
    assert d.only(do.DropVersions).versions == {v}
    assert d.tell(ev.ConfirmAnswered(v, accepted=True, reason="")) == []
    d.fail(ev.Call.CONFIRM, ev.Outcome.REFUSED, code="gone", epoch=1)
    assert "not_confirmed" in d.codes()


def test_a_failed_fetch_keeps_the_old_version_and_is_tried_again(drive: Drive, make_version: Make) -> None:
    """The manifest is asked anew: sources and the newest version may have changed."""
    d = drive()
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fail(ev.Call.MANIFEST, epoch=1)
    d.new = []
    while not d.ordered(do.FetchManifest):
        d.wake_when_due()
    d.tell(ev.ManifestArrived(make_version(1)))
    assert d.tell(ev.ManifestArrived(make_version(1))) == []
    d.tell(ev.FetchFailed(make_version(1), "no progress for 30 s"))
    assert d.tell(ev.FetchFailed(make_version(1), "late")) == []
    d.new = []
    while not d.ordered(do.FetchManifest):
        d.wake_when_due()
    assert d.session.report().loaded == str(make_version(0))
    assert "fetch_failed" in d.codes()


def test_a_failed_swap_keeps_the_old_version_and_says_so(drive: Drive, make_version: Make) -> None:
    """The bits on disk are dropped and fetched anew."""
    d = drive()
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.tell(ev.SwapFailed(make_version(1), "shape differs"))
    assert d.only(do.DropVersions).versions == {make_version(1)}
    assert d.tell(ev.SwapFailed(make_version(1), "late")) == []
    assert d.session.report().loaded == str(make_version(0))
    assert "swap_failed" in d.codes()


def test_a_cancelled_lease_is_stopped(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """The order names the reason; a lease that is not here is no error."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)), make_lease("L2", slots=(0,)))
    d.wake(10.0)
    d.beat(make_version(), cancelled=(ev.CancelledLease("L1", "job paused"), ev.CancelledLease("L9", "who?")))
    assert d.only(do.AbortGeneration) == do.AbortGeneration("L1", (0, 1))
    assert d.codes() == ["cancelled"]
    d.wake(10.0)
    assert d.only(do.SendBeat).live_leases == ("L2",)


def test_a_cancelled_lease_that_only_waits_for_its_answer_needs_no_stop(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Nothing of it runs; a late answer changes nothing."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0,)))
    d.finish("L1", 0)
    d.beat(make_version(), cancelled=(ev.CancelledLease("L1", "the job ended"),))
    assert d.ordered(do.AbortGeneration) == []
    assert d.session.report().unsent == 0
    assert d.tell(ev.SubmitAnswered("L1", (0,))) == []


def test_an_overdue_lease_is_given_up_long_after_its_deadline(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """A restarted coordinator may have moved the deadline, so the worker is slow to give up."""
    d = drive(overdue_s=120.0)
    d.hold(make_version())
    d.grant(make_lease(slots=(0,)), ends_in=5.0)
    d.now += 124.0
    d.wake()
    assert d.ordered(do.AbortGeneration) == []
    d.wake(1.0)
    assert d.only(do.AbortGeneration).lease_id == "L1"
    assert "overdue" in d.codes()


def test_a_slot_that_cannot_be_made_is_given_up_alone(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """Its batch mates go on; a lease with nothing left is over."""
    d = drive()
    d.hold(make_version())
    d.grant(make_lease(slots=(0, 1)))
    d.tell(ev.CompletionFailed("L1", 0, "the prompt does not fit"))
    assert d.session.report().live_leases == 1
    d.tell(ev.CompletionFailed("L1", 1, "the prompt does not fit"))
    d.tell(ev.CompletionFailed("L1", 1, "the prompt does not fit"))
    assert d.session.report().live_leases == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_compute_nothing_finite_are_not_served(
    drive: Drive, make_version: Make, make_lease: Make, value: float
) -> None:
    """A canary of NaN says that the engine cannot use these bits (float16 overflow, say): nothing is sent, the reason is told."""
    d = drive(tries_a_version=1)
    bad = make_version(1)
    d.hold(make_version(0))
    d.grant(make_lease(slots=(0,)))
    d.wake(10.0)
    d.beat(bad)
    d.fetch(bad)
    d.tell(ev.SwapFinished(bad, (-1.0, value), 0.1))
    assert d.ordered(do.SendConfirm) == []
    assert d.only(do.AbortGeneration) == do.AbortGeneration("L1", (0,))
    assert d.only(do.DropVersions).versions == {bad}
    assert "not finite" in d.session.report().notes[-1].reason
    assert d.session.report().loaded == ""


def test_going_back_to_an_older_version_stops_what_runs(drive: Drive, make_version: Make, make_lease: Make) -> None:
    """After a roll-back the newest version may have a lower number: versions within a completion never fall."""
    d = drive()
    d.hold(make_version(6))
    d.grant(make_lease(slots=(0,), version=6))
    d.wake(10.0)
    d.beat(make_version(4))
    d.fetch(make_version(4))
    assert d.only(do.SwapWeights) == do.SwapWeights(make_version(4), abort_running=True)


def test_a_version_is_not_dropped_while_it_is_swapped_in(drive: Drive, make_version: Make) -> None:
    """The engine may be reading its files."""
    d = drive()
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.wake(10.0)
    d.beat(make_version(2))
    d.tell(ev.SwapFinished(make_version(1), (-1.0,), 0.1))
    d.fetch(make_version(2))
    d.tell(ev.ConfirmAnswered(make_version(1), accepted=True, reason=""))
    assert d.only(do.SwapWeights).version == make_version(2)
    for drop in d.ordered(do.DropVersions):
        assert make_version(2) not in drop.versions


def test_what_a_session_remembers_of_versions_is_bounded(drive: Drive, make_version: Make) -> None:
    """A job has any number of versions; those that no lease can name any more are forgotten."""
    d = drive()
    d.hold(make_version(0))
    for number in range(1, 600):
        d.wake(10.0)
        d.beat(make_version(number))
        d.fetch(make_version(number))
        d.tell(ev.SwapFinished(make_version(number), (-1.0,), 0.1))
        d.tell(ev.ConfirmAnswered(make_version(number), accepted=True, reason=""))
    holding = d.session._holding
    assert len(holding.confirmed) <= 257
    assert len(holding.labels) <= 257


def test_failures_remembered_are_bounded(drive: Drive, make_version: Make) -> None:
    """A worker that can use nothing does not grow."""
    d = drive(tries_a_version=1)
    d.join()
    for number in range(100):
        d.new = []
        while not d.ordered(do.FetchManifest):
            d.wake_when_due()
            if d.ordered(do.SendBeat):
                d.beat(make_version(number))
        d.fetch(make_version(number))
        while not d.ordered(do.SwapWeights):
            d.wake_when_due()
        d.tell(ev.SwapFailed(make_version(number), "shape differs"))
    assert len(d.session._holding._failures) <= 64


def test_a_lease_answer_that_names_a_newer_version_starts_its_fetch(drive: Drive, make_version: Make) -> None:
    """As if a heartbeat had named it; another job's newest stays what it was."""
    d = drive()
    d.hold(make_version(0))
    d.beat(make_version(0), make_version(3, job="other"))
    assert d.tell(ev.LeaseAnswered(1, newer=make_version(1)))[0] == do.FetchManifest(make_version(1))
    assert d.session.report().newest == str(make_version(1))
