"""The worker as a machine: events and the time in, instructions out. No I/O, no clock, seeded randomness only.

Level-triggered: an event changes the state, then `_advance` looks at the state and starts what is due. The weights are in
`holding.py`, the leases in `work.py`. Rules:

* one fetch at a time, beside generation; a running fetch is finished before another starts;
* only versions whose canary the coordinator accepted are advertised, and work is asked for with such a one loaded;
* a completion leaves only when the coordinator answered for it or its lease ended; it waits while a version in it is unconfirmed;
* draining finishes the leases in hand until a deadline, then leaves; a session fenced by a newer one stops at once;
* never two joins at once, and what calls of a lost session say while the next join is under way is not heard: the newer
  session they may tell of is our own;
* until it stopped, the machine always has a next deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random

from worker_node.domain import weights
from worker_node.domain.events import (
    BeatAnswered,
    Call,
    CallFailed,
    CompletionAborted,
    CompletionFailed,
    CompletionFinished,
    ConfirmAnswered,
    DrainRequested,
    EngineFailed,
    Event,
    FetchFailed,
    FetchFinished,
    HeardOf,
    Joined,
    LeaseAnswered,
    Left,
    ManifestArrived,
    Outcome,
    SubmitAnswered,
    SwapFailed,
    SwapFinished,
    Weighed,
    Woke,
)
from worker_node.domain.hearsay import Hearsay
from worker_node.domain.holding import Holding, HoldingLimits
from worker_node.domain.instructions import AskLease, Instruction, SendBeat, SendJoin, SendLeave, StartGeneration, Stop
from worker_node.domain.lane import Lane
from worker_node.domain.outbox import Outbox
from worker_node.domain.report import Report, activity
from worker_node.domain.weights import Version
from worker_node.domain.work import Finished, Work, made_by

EXIT_OK, EXIT_FAILED, EXIT_ENGINE, EXIT_FENCED = 0, 1, 3, 4
HEARD = (Joined, BeatAnswered, LeaseAnswered, ConfirmAnswered, SubmitAnswered)  # the coordinator itself spoke


class Phase(StrEnum):
    """Where the session is; JOINING also after the coordinator forgot this worker."""

    JOINING = "joining"
    JOINED = "joined"
    LEAVING = "leaving"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits and periods of a session."""

    slots: int
    lease_wait_s: float = 20.0
    idle_ask_s: float = 0.5  # pause after an answer without work that came with no retry time
    coalesce_s: float = 0.25
    overdue_s: float = 120.0  # a restarted coordinator may have moved a deadline this far without our knowing
    drain_s: float = 120.0
    leave_s: float = 10.0
    silence_s: float = 180.0  # longer than every call's own deadline
    swap_s: float = 900.0
    retry_first_s: float = 0.5
    retry_most_s: float = 30.0
    tries_a_version: int = 3
    give_up_s: float = inf  # without a word from the coordinator: a rented machine must not wait, and cost, for ever


@dataclass(frozen=True, slots=True)
class _Exit:
    reason: str
    code: int


class Session:
    """One stay of a worker with one coordinator. Start it with `handle(Woke(), now)`."""

    def __init__(self, settings: SessionSettings, *, rng: Random, stored: frozenset[Version] = frozenset()) -> None:
        self._settings = settings
        self._rng = rng
        self._phase = Phase.JOINING
        self._epoch = 0
        self._heartbeat_s = 10.0
        self._outbox = Outbox()
        self._lanes = self._fresh_lanes()
        limits = HoldingLimits(
            silence_s=settings.silence_s,
            swap_s=settings.swap_s,
            retry_first_s=settings.retry_first_s,
            retry_most_s=settings.retry_most_s,
            tries_a_version=settings.tries_a_version,
        )
        self._holding = Holding(limits, outbox=self._outbox, rng=rng, stored=stored)
        self._work = Work(
            coalesce_s=settings.coalesce_s,
            overdue_s=settings.overdue_s,
            retry_first_s=settings.retry_first_s,
            retry_most_s=settings.retry_most_s,
            rng=rng,
        )
        self._notices: tuple[Version, ...] = ()
        self._hearsay = Hearsay()
        self._exit: _Exit | None = None  # set: draining
        self._drain_at = inf
        self._stop_at = inf
        self._state, self._state_reason, self._idle_reason = "", "", "not joined yet"
        self._now = -inf
        self._heard_at = inf  # inf: not started

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at `now` (any clock that never goes back); what to do, in order. Nothing once stopped."""
        if self._phase is Phase.STOPPED:
            return []
        self._now = now
        if self._heard_at == inf or isinstance(event, HEARD):
            self._heard_at = now
        self._take(event)
        self._advance()
        return self._outbox.take()

    def next_deadline(self) -> float | None:
        """When to hand in `Woke` if nothing else happens; None once stopped."""
        if self._phase is Phase.STOPPED:
            return None
        lanes = min(lane.next_deadline(self._now) for lane in self._lanes.values())
        work = self._work.next_deadline(self._holding.confirmed)
        hearsay = self._hearsay.next_deadline(self._notices, self._now)
        own = min(self._drain_at, self._stop_at, self._heard_at + self._settings.give_up_s)
        return min(lanes, hearsay, self._holding.next_deadline(self._now), work, own)

    def report(self) -> Report:
        """How the session stands, for people."""
        working, because = self._activity()
        newest = self._target()
        return Report(
            working=working and self._phase is Phase.JOINED,
            because=because,
            phase=self._phase.value,
            coordinator_state=self._state,
            coordinator_reason=self._state_reason,
            loaded=str(self._holding.loaded or ""),
            newest=str(newest or ""),
            live_leases=len(self._work.ids),
            generating=self._work.unfinished,
            unsent=self._work.backlog,
            notes=self._outbox.notes,
        )

    # --- events

    def _take(self, event: Event) -> None:  # noqa: PLR0912 (one line for each kind of event)
        match event:
            case Joined():
                self._joined(event)
            case BeatAnswered():
                self._beat_answered(event)
            case LeaseAnswered():
                self._lease_answered(event)
            case ManifestArrived(version):
                self._holding.manifest_arrived(version, self._now)
            case FetchFinished() | FetchFailed():
                self._holding.fetch_ended(event, self._now)
            case Weighed():
                self._holding.weighed(event, self._now)
            case SwapFinished() | SwapFailed():
                self._make_again(self._holding.swap_ended(event, self._now))
            case ConfirmAnswered():
                self._confirm_answered(event)
            case CompletionFinished():
                self._completion_finished(event)
            case CompletionAborted(lease_id, slot):
                self._work.put_back(lease_id, slot)
            case CompletionFailed(lease_id, slot, reason):
                self._note("not_generated", f"slot {slot} of lease {lease_id}: {reason}", "worker")
                self._work.give_up(lease_id, slot)
            case SubmitAnswered():
                self._submit_answered(event)
            case CallFailed():
                self._call_failed(event)
            case Left():
                self._stop()
            case DrainRequested(reason):
                self._drain(reason, EXIT_OK, self._now if self._exit else self._now + self._settings.drain_s)
            case EngineFailed(reason):
                self._engine_failed(reason)
            case HeardOf(version):
                self._hearsay.take(version)
            case _:
                assert isinstance(event, Woke)

    def _joined(self, event: Joined) -> None:
        if self._phase is not Phase.JOINING:
            return
        self._lanes = self._fresh_lanes()
        self._phase = Phase.JOINED
        self._epoch = event.epoch
        self._heartbeat_s = event.heartbeat_s
        self._idle_reason = "waiting for the first orders"
        self._holding.joined()

    def _beat_answered(self, event: BeatAnswered) -> None:
        self._heartbeat_s = event.heartbeat_s
        self._lanes[Call.BEAT].answered(self._now, next_in_s=event.heartbeat_s)
        self._state, self._state_reason = event.state, event.reason
        self._notices = event.versions
        self._holding.heard_of(event.forthcoming)
        for cancelled in event.cancelled:
            self._drop_lease(cancelled.lease_id, "cancelled", cancelled.reason, "")
        if event.drain is not None and self._exit is None:
            self._drain(f"the coordinator asked: {event.drain}", EXIT_OK, self._now + self._settings.drain_s)

    def _lease_answered(self, event: LeaseAnswered) -> None:
        if event.epoch != self._epoch or self._phase is not Phase.JOINED:
            return
        if event.newer is not None:
            self._notices = tuple(event.newer if known.job_id == event.newer.job_id else known for known in self._notices)
        idle_s = max(event.retry_after_s, 0.0 if event.leases else self._settings.idle_ask_s)
        self._lanes[Call.LEASE].answered(self._now, next_in_s=idle_s)
        self._idle_reason = event.reason or ("waiting for more work" if event.leases else "no work was offered")
        if not event.leases and not self._work.unfinished:
            self._lanes[Call.BEAT].hurry(self._now)  # idle: a newer version may be what is lacking
        job = self._holding.next_job
        for granted in event.leases:
            if self._exit is None and granted.lease.job_id == job:  # what is not taken is re-issued at its deadline or our leave
                self._work.take(granted)

    def _confirm_answered(self, event: ConfirmAnswered) -> None:
        if event.epoch not in (0, self._epoch):
            return  # asked in a session that is over: the coordinator forgot it with that session
        before = self._holding.confirmed
        self._make_again(self._holding.confirm_answered(event, self._now))
        if self._holding.confirmed != before:
            self._lanes[Call.LEASE].hurry(self._now)
            self._holding.drop_unneeded(self._target())

    def _make_again(self, disproved: Version | None) -> None:
        """Nothing that was made with wrong weights is sent."""
        if disproved is not None:
            self._outbox.order(*self._work.stop_running())
            self._work.discard_made_by(disproved)

    def _completion_finished(self, event: CompletionFinished) -> None:
        holding = self._holding
        versions = made_by(event.completion, holding.labels)
        if versions is None:
            self._work.put_back(event.lease_id, event.slot)
            return
        if self._work.finish(event.lease_id, event.slot, Finished(event.completion, versions, self._now)) and (
            holding.loaded is None and not versions <= holding.confirmed
        ):
            for version in versions - holding.confirmed:  # finished while its weights were being refused
                self._work.discard_made_by(version)

    def _submit_answered(self, event: SubmitAnswered) -> None:
        if not self._work.settle(event.lease_id, (*event.settled, *(no.slot for no in event.refused)), self._now):
            return
        for no in event.refused:
            paid = "paid" if no.paid else "not paid"
            self._note(no.code, f"slot {no.slot} of lease {event.lease_id}: {no.reason} ({paid})", no.blame)
        self._lanes[Call.LEASE].hurry(self._now)

    def _call_failed(self, event: CallFailed) -> None:
        if event.epoch not in (0, self._epoch):
            return
        if event.call is Call.LEAVE:
            self._leave_failed(event)
        elif self._phase is Phase.JOINING and event.call is not Call.JOIN:
            return
        elif event.outcome is Outcome.FENCED:
            self._end(f"a newer session with this key is active: {event.reason}", EXIT_FENCED)
        elif event.outcome is Outcome.FATAL or (event.call is Call.JOIN and event.outcome is Outcome.REFUSED):
            self._end(event.reason, EXIT_FAILED)
        elif event.outcome is Outcome.REJOIN and event.call is not Call.JOIN:
            self._rejoin(event.reason)
        else:
            self._call_lost(event)

    def _call_lost(self, event: CallFailed) -> None:
        """A call without a usable answer that leaves the session as it is."""
        self._note(event.code, f"{event.call}: {event.reason}", "network")
        if event.call is Call.SUBMIT and event.outcome is Outcome.REFUSED:
            self._drop_lease(event.lease_id, event.code, event.reason, "coordinator")
        elif event.call is Call.SUBMIT:
            self._work.submission_failed(event.lease_id, self._now, event.retry_after_s)
        elif event.call is Call.CONFIRM:
            self._make_again(self._holding.confirm_failed(event, self._now))
        elif event.call is Call.MANIFEST:
            self._holding.manifest_failed(event, self._now)
            self._idle_reason = f"{event.call}: {event.reason}"
        else:
            self._lanes[event.call].failed(self._now, retry_after_s=event.retry_after_s)
            self._idle_reason = f"{event.call}: {event.reason}"

    def _leave_failed(self, event: CallFailed) -> None:
        if event.outcome is Outcome.TRY_AGAIN:
            self._lanes[Call.LEAVE].failed(self._now, retry_after_s=event.retry_after_s)
        else:
            self._stop()

    def _rejoin(self, reason: str) -> None:
        """The coordinator gave this session up: its leases are with others now."""
        self._note("session_lost", f"joining again: {reason}", "network")
        for lease_id in self._work.ids:
            self._outbox.order(*self._work.drop(lease_id))
        if self._exit is not None:
            self._stop()
            return
        self._phase = Phase.JOINING
        self._idle_reason = reason
        self._lanes[Call.JOIN].failed(self._now)

    def _engine_failed(self, reason: str) -> None:
        self._note("engine_failed", reason, "worker")
        self._work.give_up_unfinished()
        self._holding.engine_failed()
        self._exit = None
        self._drain(f"the engine failed: {reason}", EXIT_ENGINE, self._now + self._settings.drain_s)

    def _drain(self, reason: str, code: int, deadline: float) -> None:
        if self._exit is None:
            self._exit = _Exit(reason, code)
            self._lanes[Call.BEAT].hurry(self._now)
        if self._phase is Phase.LEAVING:
            self._stop_at = min(self._stop_at, deadline)
        else:
            self._drain_at = min(self._drain_at, deadline)

    # --- what is due

    def _advance(self) -> None:
        if self._gave_up():
            return
        self._break_silence()
        if self._phase is Phase.JOINING:
            self._join()
        elif self._phase is Phase.JOINED:
            self._serve()
        elif self._phase is Phase.LEAVING:
            self._leave()

    def _join(self) -> None:
        if self._exit is not None:
            self._stop()
        elif self._lanes[Call.JOIN].is_ready(self._now):
            self._lanes[Call.JOIN].started(self._now)
            self._outbox.order(SendJoin())

    def _serve(self) -> None:
        for lease_id in self._work.overdue(self._now):
            self._drop_lease(lease_id, "overdue", "its wall deadline passed", "worker")
        if self._exit is None:
            self._holding.start_fetch(self._target(), self._now)
            self._holding.start_weighing(self._target())
            self._holding.start_prefetch()
            self._holding.start_swap(self._target(), self._now, abort_running=self._work.aborts_on_update)
        self._generate()
        self._holding.start_confirm(self._epoch, self._now)
        self._outbox.order(*self._work.submissions(self._now, epoch=self._epoch, confirmed=self._holding.confirmed))
        self._ask()
        self._beat()
        if self._exit is not None and (not self._work.ids or self._now >= self._drain_at):
            self._start_leaving()

    def _generate(self) -> None:
        if self._holding.loaded is not None and (requests := self._work.start_waiting()):
            self._outbox.order(StartGeneration(requests))

    def _ask(self) -> None:
        free = self._free_slots()
        version = self._holding.served
        if version is None or self._exit is not None or free < 1:
            return
        if self._lanes[Call.LEASE].is_ready(self._now):
            self._lanes[Call.LEASE].started(self._now)
            self._outbox.order(AskLease(self._epoch, version, free, self._settings.lease_wait_s))

    def _beat(self) -> None:
        lane = self._lanes[Call.BEAT]
        if self._hearsay.wants_beat(self._notices, self._now):
            lane.hurry(self._now)
        if lane.is_ready(self._now):
            lane.started(self._now)
            self._hearsay.beat_sent(self._now)
            held, words = self._holding.advertised(), self._activity()[1]
            self._outbox.order(SendBeat(self._epoch, held, self._work.ids, self._free_slots(), self._exit is not None, words))

    def _start_leaving(self) -> None:
        for lease_id in self._work.ids:
            self._drop_lease(lease_id, "drained", "the drain deadline passed", "worker")
        self._phase = Phase.LEAVING
        self._drain_at = inf
        self._stop_at = self._now + self._settings.leave_s
        self._leave()

    def _leave(self) -> None:
        assert self._exit is not None
        if self._now >= self._stop_at:
            self._stop()
        elif self._lanes[Call.LEAVE].is_ready(self._now):
            self._lanes[Call.LEAVE].started(self._now)
            self._outbox.order(SendLeave(self._epoch, self._exit.reason))

    def _gave_up(self) -> bool:
        """Whether the session ended for want of a coordinator. Nobody is there to take a leave."""
        silent_s = self._now - self._heard_at
        if silent_s < self._settings.give_up_s:
            return False
        self._exit = _Exit(f"the coordinator was not heard for {silent_s:.0f} s (--give-up-after-min)", EXIT_FAILED)
        self._stop()
        return True

    def _break_silence(self) -> None:
        """A call that outlived every deadline counts as failed; a swap that did has hung the engine."""
        silent = [call.value for call, lane in self._lanes.items() if lane.is_silent(self._now)]
        for name in silent:
            self._lanes[Call(name)].failed(self._now)
        for name in (*silent, *self._holding.silent(self._now)):
            self._note("no_report", f"{name}: no answer and no failure within {self._settings.silence_s:.0f} s", "worker")
        if self._holding.hung_swap(self._now):
            self._engine_failed(f"a weight update took more than {self._settings.swap_s:.0f} s")

    # --- small views

    def _fresh_lanes(self) -> dict[Call, Lane]:
        one = self._settings
        own = (Call.JOIN, Call.BEAT, Call.LEASE, Call.LEAVE)
        return {
            call: Lane(silence_s=one.silence_s, first_s=one.retry_first_s, most_s=one.retry_most_s, rng=self._rng) for call in own
        }

    def _target(self) -> Version | None:
        return weights.choose(self._notices, current_job=self._holding.job, busy=bool(self._work.ids))

    def _free_slots(self) -> int:
        """Unanswered completions still occupy their slots: the coordinator counts them, and it bounds what piles up here."""
        return max(self._settings.slots - self._work.unfinished - self._work.backlog, 0)

    def _activity(self) -> tuple[bool, str]:
        holding = self._holding
        waiting_for = self._exit.reason if self._exit else holding.hopeless(self._target()) or self._idle_reason
        if self._exit is None and self._state in ("quarantined", "draining"):
            waiting_for = f"{self._state}: {self._state_reason}"
        return activity(
            generating=self._work.unfinished if holding.loaded is not None else 0,
            fetching=str(holding.fetching or ""),
            swapping=str(holding.swapping or ""),
            confirming=str(holding.confirming or ""),
            waiting_for=waiting_for,
            trouble=holding.trouble,
            swapping_s=self._now - holding.swapping_since,
        )

    def _drop_lease(self, lease_id: str, code: str, reason: str, blame: str) -> None:
        if lease_id in self._work.ids:
            self._note(code, f"lease {lease_id}: {reason}", blame)
            self._outbox.order(*self._work.drop(lease_id))

    def _note(self, code: str, reason: str, blame: str) -> None:
        self._outbox.note(self._now, code, reason, blame)

    def _end(self, reason: str, code: int) -> None:
        self._exit = _Exit(reason, code)
        self._stop()

    def _stop(self) -> None:
        ending = self._exit or _Exit("the coordinator let this worker go", EXIT_OK)
        self._phase = Phase.STOPPED
        self._outbox.order(Stop(ending.reason, ending.code))
