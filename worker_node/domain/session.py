"""The worker as a machine: events and the time in, instructions out. No I/O, no clock, seeded randomness only.

Level-triggered: an event changes the state, then `_advance` looks at the state and starts what is due. Rules:

* one fetch at a time, beside generation; a running fetch is finished before another starts;
* only versions whose canary the coordinator accepted are advertised, and work is asked for with such a one loaded;
* a completion leaves only when the coordinator answered for it or its lease ended; it waits while a version in it is unconfirmed;
* draining finishes the leases in hand until a deadline, then leaves; a session fenced by a newer one stops at once;
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
    Joined,
    LeaseAnswered,
    Left,
    ManifestArrived,
    Outcome,
    SubmitAnswered,
    SwapFailed,
    SwapFinished,
    Woke,
)
from worker_node.domain.instructions import (
    AskLease,
    DropVersions,
    FetchManifest,
    FetchPieces,
    Instruction,
    SendBeat,
    SendConfirm,
    SendJoin,
    SendLeave,
    StartGeneration,
    Stop,
    SwapWeights,
)
from worker_node.domain.lane import Lane
from worker_node.domain.report import KEPT_NOTES, Note, Report, activity
from worker_node.domain.weights import Shelf, Version
from worker_node.domain.work import Finished, Work, made_by

EXIT_OK, EXIT_FAILED, EXIT_ENGINE, EXIT_FENCED = 0, 1, 3, 4


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
        self._lanes = {call: self._lane(settings.silence_s) for call in Call if call is not Call.SUBMIT}
        self._swaps = self._lane(settings.swap_s)
        self._work = Work(
            coalesce_s=settings.coalesce_s,
            overdue_s=settings.overdue_s,
            retry_first_s=settings.retry_first_s,
            retry_most_s=settings.retry_most_s,
            rng=rng,
        )
        self._notices: tuple[Version, ...] = ()
        self._stored = set(stored)
        self._loaded: Version | None = None
        self._job: str | None = None  # whose model the engine has, right or wrong
        self._fetching: Version | None = None
        self._swapping: Version | None = None
        self._confirming: SendConfirm | None = None
        self._confirmed: frozenset[Version] = frozenset()
        self._fetched: dict[Version, FetchFinished] = {}
        self._canary: SwapFinished | None = None  # of the loaded version
        self._labels: dict[int, Version] = {}  # version numbers as the engine uses them
        self._failures: dict[Version, int] = {}  # swaps and confirms that went wrong
        self._exit: _Exit | None = None  # set: draining
        self._drain_at = inf
        self._stop_at = inf
        self._state, self._state_reason, self._idle_reason = "", "", "not joined yet"
        self._notes: list[Note] = []
        self._now = -inf
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at `now` (any clock that never goes back); what to do, in order. Nothing once stopped."""
        if self._phase is Phase.STOPPED:
            return []
        self._now = now
        self._take(event)
        self._advance()
        instructions, self._out = self._out, []
        return instructions

    def next_deadline(self) -> float | None:
        """When to hand in `Woke` if nothing else happens; None once stopped."""
        if self._phase is Phase.STOPPED:
            return None
        lanes = min(lane.next_deadline(self._now) for lane in (*self._lanes.values(), self._swaps))
        return min(lanes, self._work.next_deadline(self._confirmed), self._drain_at, self._stop_at)

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
            loaded=str(self._loaded or ""),
            newest=str(newest or ""),
            live_leases=len(self._work.ids),
            generating=self._work.unfinished,
            unsent=self._work.backlog,
            notes=tuple(self._notes),
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
            case ManifestArrived():
                self._manifest_arrived(event)
            case FetchFinished() | FetchFailed():
                self._fetch_ended(event)
            case SwapFinished() | SwapFailed():
                self._swap_ended(event)
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
            case _:
                assert isinstance(event, Woke)

    def _joined(self, event: Joined) -> None:
        if self._phase is not Phase.JOINING:
            return
        self._lanes = {call: self._lane(self._settings.silence_s) for call in self._lanes}
        self._phase = Phase.JOINED
        self._epoch = event.epoch
        self._heartbeat_s = event.heartbeat_s
        self._idle_reason = "waiting for the first orders"
        self._confirmed = frozenset()
        self._confirming = self._confirmation(self._canary) if self._canary else None

    def _beat_answered(self, event: BeatAnswered) -> None:
        self._heartbeat_s = event.heartbeat_s
        self._lanes[Call.BEAT].answered(self._now, next_in_s=event.heartbeat_s)
        self._state, self._state_reason = event.state, event.reason
        self._notices = event.versions
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
        job = self._job if self._swapping is None else self._swapping.job_id
        for granted in event.leases:
            if self._exit is None and granted.lease.job_id == job:  # what is not taken is re-issued at its deadline or our leave
                self._work.take(granted)

    def _manifest_arrived(self, event: ManifestArrived) -> None:
        if event.version == self._fetching and self._lanes[Call.MANIFEST].in_flight:
            self._lanes[Call.MANIFEST].answered(self._now)
            self._out.append(FetchPieces(event.version))

    def _fetch_ended(self, event: FetchFinished | FetchFailed) -> None:
        if event.version != self._fetching:
            return
        self._fetching = None
        if isinstance(event, FetchFinished):
            self._stored.add(event.version)
            self._fetched[event.version] = event
            return
        self._note("fetch_failed", f"{event.version}: {event.reason}", "network")
        self._lanes[Call.MANIFEST].failed(self._now)

    def _swap_ended(self, event: SwapFinished | SwapFailed) -> None:
        if event.version != self._swapping:
            return
        self._swapping = None
        if isinstance(event, SwapFailed):
            self._note("swap_failed", f"{event.version}: {event.reason}", "worker")
            self._swaps.failed(self._now)
            self._forget(event.version)
            return
        self._swaps.answered(self._now)
        if self._job != event.version.job_id:
            self._labels.clear()
        self._loaded, self._job = event.version, event.version.job_id
        self._labels[event.version.number] = event.version
        self._canary = event
        self._confirming = self._confirmation(event)

    def _confirm_answered(self, event: ConfirmAnswered) -> None:
        if self._confirming is None or event.version != self._confirming.version:
            return
        self._confirming = None
        if not event.accepted:
            self._lanes[Call.CONFIRM].failed(self._now)
            self._refused_weights(event.version, event.reason)
            return
        self._lanes[Call.CONFIRM].answered(self._now)
        self._failures.pop(event.version, None)
        self._confirmed |= {event.version}
        self._lanes[Call.LEASE].hurry(self._now)
        self._drop_versions()

    def _refused_weights(self, version: Version, reason: str) -> None:
        """The engine does not hold what the version should be: nothing it made with it is sent; fetch it anew."""
        self._note("not_confirmed", f"{version}: {reason}", "worker")
        self._loaded, self._canary = None, None
        self._out += self._work.stop_running()
        self._work.discard_made_by(version)
        self._forget(version)

    def _completion_finished(self, event: CompletionFinished) -> None:
        versions = made_by(event.completion, self._labels)
        if versions is None:
            self._work.put_back(event.lease_id, event.slot)
            return
        if self._work.finish(event.lease_id, event.slot, Finished(event.completion, versions, self._now)) and (
            self._loaded is None and not versions <= self._confirmed
        ):
            for version in versions - self._confirmed:  # finished while its weights were being refused
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
        elif event.outcome is Outcome.FENCED:
            self._end(f"a newer session with this key is active: {event.reason}", EXIT_FENCED)
        elif event.outcome is Outcome.FATAL or (event.call is Call.JOIN and event.outcome is Outcome.REFUSED):
            self._end(event.reason, EXIT_FAILED)
        elif event.outcome is Outcome.REJOIN:
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
        elif event.call is Call.CONFIRM and event.outcome is Outcome.REFUSED and self._confirming is not None:
            self._confirm_answered(ConfirmAnswered(self._confirming.version, accepted=False, reason=event.reason))
        else:
            self._lanes[event.call].failed(self._now, retry_after_s=event.retry_after_s)
            self._idle_reason = f"{event.call}: {event.reason}"
            if event.call is Call.MANIFEST:
                self._fetching = None

    def _leave_failed(self, event: CallFailed) -> None:
        if event.outcome is Outcome.TRY_AGAIN:
            self._lanes[Call.LEAVE].failed(self._now, retry_after_s=event.retry_after_s)
        else:
            self._stop()

    def _rejoin(self, reason: str) -> None:
        """The coordinator gave this session up: its leases are with others now."""
        self._note("session_lost", f"joining again: {reason}", "network")
        for lease_id in self._work.ids:
            self._out += self._work.drop(lease_id)
        if self._exit is not None:
            self._stop()
            return
        self._phase = Phase.JOINING
        self._idle_reason = reason
        self._lanes[Call.JOIN].failed(self._now)

    def _engine_failed(self, reason: str) -> None:
        self._note("engine_failed", reason, "worker")
        self._work.give_up_unfinished()
        self._loaded, self._swapping, self._canary = None, None, None
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
            self._out.append(SendJoin())

    def _serve(self) -> None:
        for lease_id in self._work.overdue(self._now):
            self._drop_lease(lease_id, "overdue", "its wall deadline passed", "worker")
        if self._exit is None:
            self._start_fetch()
            self._start_swap()
        self._generate()
        self._confirm()
        self._out += self._work.submissions(self._now, epoch=self._epoch, confirmed=self._confirmed)
        self._ask()
        self._beat()
        if self._exit is not None and (not self._work.ids or self._now >= self._drain_at):
            self._start_leaving()

    def _start_fetch(self) -> None:
        version = weights.to_fetch(self._shelf(), self._target(), given_up=self._given_up())
        if version is not None and self._lanes[Call.MANIFEST].is_ready(self._now):
            self._fetching = version
            self._lanes[Call.MANIFEST].started(self._now)
            self._out.append(FetchManifest(version))

    def _start_swap(self) -> None:
        version = weights.to_swap(self._shelf(), self._target())
        if version is None or self._confirming is not None or not self._swaps.is_ready(self._now):
            return
        renamed = self._labels.get(version.number, version) != version
        self._swapping = version
        self._swaps.started(self._now)
        self._out.append(SwapWeights(version, abort_running=renamed or self._work.aborts_on_update))

    def _generate(self) -> None:
        if self._loaded is not None and (requests := self._work.start_waiting()):
            self._out.append(StartGeneration(requests))

    def _confirm(self) -> None:
        if self._confirming is not None and self._lanes[Call.CONFIRM].is_ready(self._now):
            self._lanes[Call.CONFIRM].started(self._now)
            self._out.append(self._confirming)

    def _ask(self) -> None:
        free = self._free_slots()
        version = self._loaded
        if version is None or version not in self._confirmed or self._exit is not None or free < 1:
            return
        if self._swapping is not None and self._swapping.job_id != version.job_id:
            return
        if self._lanes[Call.LEASE].is_ready(self._now):
            self._lanes[Call.LEASE].started(self._now)
            self._out.append(AskLease(self._epoch, version, free, self._settings.lease_wait_s))

    def _beat(self) -> None:
        if self._lanes[Call.BEAT].is_ready(self._now):
            self._lanes[Call.BEAT].started(self._now)
            held = sorted(self._confirmed & self._stored, key=lambda version: (version.job_id, version.number, version.digest))
            words = self._activity()[1]
            self._out.append(SendBeat(self._epoch, tuple(held), self._work.ids, self._free_slots(), self._exit is not None, words))

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
            self._out.append(SendLeave(self._epoch, self._exit.reason))

    def _break_silence(self) -> None:
        """A call that outlived every deadline counts as failed; a swap that did has hung the engine."""
        for call, lane in self._lanes.items():
            if lane.is_silent(self._now):
                lane.failed(self._now)
                self._note("no_report", f"{call}: no answer and no failure within {self._settings.silence_s:.0f} s", "worker")
                if call is Call.MANIFEST:
                    self._fetching = None
        if self._swaps.is_silent(self._now):
            self._swaps.failed(self._now)
            self._engine_failed(f"a weight update took more than {self._settings.swap_s:.0f} s")

    # --- small views

    def _lane(self, silence_s: float) -> Lane:
        settings = self._settings
        return Lane(silence_s=silence_s, first_s=settings.retry_first_s, most_s=settings.retry_most_s, rng=self._rng)

    def _shelf(self) -> Shelf:
        return Shelf(frozenset(self._stored), self._loaded, self._fetching)

    def _target(self) -> Version | None:
        return weights.choose(self._notices, current_job=self._job, busy=bool(self._work.ids))

    def _given_up(self) -> frozenset[Version]:
        return frozenset(v for v, failures in self._failures.items() if failures >= self._settings.tries_a_version)

    def _free_slots(self) -> int:
        """Unanswered completions still occupy their slots: the coordinator counts them, and it bounds what piles up here."""
        return max(self._settings.slots - self._work.unfinished - self._work.backlog, 0)

    def _confirmation(self, swap: SwapFinished) -> SendConfirm:
        fetched = self._fetched.get(swap.version, FetchFinished(swap.version, 0, 0, 0.0))
        return SendConfirm(
            epoch=self._epoch,
            version=swap.version,
            canary_logprobs=swap.canary_logprobs,
            fetched_bytes=fetched.fetched_bytes,
            from_peers_bytes=fetched.from_peers_bytes,
            fetch_s=fetched.seconds,
            apply_s=swap.seconds,
        )

    def _activity(self) -> tuple[bool, str]:
        waiting_for = self._exit.reason if self._exit else self._idle_reason
        if self._exit is None and self._state in ("quarantined", "draining"):
            waiting_for = f"{self._state}: {self._state_reason}"
        return activity(
            generating=self._work.unfinished if self._loaded is not None else 0,
            fetching=str(self._fetching or ""),
            swapping=str(self._swapping or ""),
            confirming=str(self._confirming.version) if self._confirming else "",
            waiting_for=waiting_for,
        )

    def _forget(self, version: Version) -> None:
        """These bits cannot be used: drop them, and count, so that a version that never works is given up."""
        self._failures[version] = self._failures.get(version, 0) + 1
        self._stored.discard(version)
        self._fetched.pop(version, None)
        self._out.append(DropVersions(frozenset({version})))

    def _drop_versions(self) -> None:
        dropped = weights.to_drop(self._shelf(), self._target())
        if dropped:
            self._stored -= dropped
            for version in dropped:
                self._fetched.pop(version, None)
            self._out.append(DropVersions(dropped))

    def _drop_lease(self, lease_id: str, code: str, reason: str, blame: str) -> None:
        if lease_id in self._work.ids:
            self._note(code, f"lease {lease_id}: {reason}", blame)
            self._out += self._work.drop(lease_id)

    def _note(self, code: str, reason: str, blame: str) -> None:
        self._notes = [*self._notes[1 - KEPT_NOTES :], Note(self._now, code, reason, blame)]

    def _end(self, reason: str, code: int) -> None:
        self._exit = _Exit(reason, code)
        self._stop()

    def _stop(self) -> None:
        ending = self._exit or _Exit("the coordinator let this worker go", EXIT_OK)
        self._phase = Phase.STOPPED
        self._out.append(Stop(ending.reason, ending.code))
