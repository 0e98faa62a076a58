"""The weights of a session: fetched, swapped in, confirmed, kept, given up.

One fetch at a time and one swap at a time; a swap and a confirmation never overlap, so an answer is always about the version
that is loaded. What a session asked ends with it: a manifest is asked again, a confirmation asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from random import Random

from p2p.domain.lineage import should_jump
from worker_node.domain import weights
from worker_node.domain.events import (
    CallFailed,
    ConfirmAnswered,
    FetchFailed,
    FetchFinished,
    Outcome,
    SwapFailed,
    SwapFinished,
    Weighed,
)
from worker_node.domain.instructions import (
    DropVersions,
    FetchManifest,
    FetchPieces,
    Prefetch,
    SendConfirm,
    StopFetch,
    SwapWeights,
    Weigh,
)
from worker_node.domain.lane import Lane
from worker_node.domain.outbox import Outbox
from worker_node.domain.weights import Forthcoming, Shelf, Version

KEPT_NUMBERS = 256  # versions below the loaded one that are remembered: more than any lease spans (S is at most 64)
KEPT_FAILURES = 64


@dataclass(frozen=True, slots=True)
class HoldingLimits:
    """Deadlines beyond every call's and swap's own, the back-off, and when a version is given up."""

    silence_s: float
    swap_s: float
    retry_first_s: float
    retry_most_s: float
    tries_a_version: int


class Holding:
    """Methods that take events return the version whose work must be made again, if the event disproved one."""

    def __init__(self, limits: HoldingLimits, *, outbox: Outbox, rng: Random, stored: frozenset[Version]) -> None:
        self._limits = limits
        self._outbox = outbox
        self._rng = rng
        self._manifests = self._lane(limits.silence_s)
        self._confirms = self._lane(limits.silence_s)
        self._swaps = self._lane(limits.swap_s)
        self._stored = set(stored)
        self._fetched: dict[Version, FetchFinished] = {}
        self._canary: SwapFinished | None = None  # of the loaded version
        self._is_unconfirmed = False  # the loaded version: its canary has to be judged
        self._failures: dict[Version, int] = {}  # swaps and confirmations that went wrong
        self._news: tuple[Forthcoming, ...] = ()
        self._prefetched = ""  # the transfer asked for last
        self._weighed: Version | None = None  # the newest version that a jump was weighed for
        self._skipped = 0  # versions passed over on purpose, not reported yet
        self.trouble = ""  # why the newest fetch failed; empty once one succeeds
        self.loaded: Version | None = None
        self.job: str | None = None  # whose model the engine has, right or wrong
        self.fetching: Version | None = None
        self.swapping: Version | None = None
        self.swapping_since = 0.0  # of no meaning while nothing is swapped
        self.confirmed: frozenset[Version] = frozenset()  # in this session
        self.labels: dict[int, Version] = {}  # version numbers as the engine uses them

    # --- views

    @property
    def confirming(self) -> Version | None:
        """The version whose canary the coordinator has not judged yet."""
        return self.loaded if self._is_unconfirmed else None

    @property
    def served(self) -> Version | None:
        """The version to ask work for: loaded, confirmed, and not about to make way for another job's."""
        version = self.loaded
        if version is None or version not in self.confirmed:
            return None
        return version if self.swapping is None or self.swapping.job_id == version.job_id else None

    @property
    def next_job(self) -> str | None:
        """The job whose leases can be taken now."""
        return self.job if self.swapping is None else self.swapping.job_id

    def advertised(self) -> tuple[Version, ...]:
        """What a beat names: on disk, and confirmed."""
        return tuple(sorted(self.confirmed & self._stored, key=lambda one: (one.job_id, one.number, one.digest)))

    def hopeless(self, version: Version | None) -> str:
        """Why a version is not tried any more; empty while it is."""
        failures = self._failures.get(version, 0) if version is not None else 0
        if failures < self._limits.tries_a_version:
            return ""
        return f"{version} failed {failures} times here (see the notes); waiting for another version"

    def next_deadline(self, now: float) -> float:
        """When something here changes by itself; infinity when nothing does."""
        return min(lane.next_deadline(now) for lane in (self._manifests, self._confirms, self._swaps))

    # --- events

    def joined(self) -> None:
        """A new session: what was asked in the old one is asked again, and nothing is confirmed."""
        if self._manifests.in_flight:
            self.fetching = None
        self._manifests = self._lane(self._limits.silence_s)
        self._confirms = self._lane(self._limits.silence_s)
        self.confirmed = frozenset()
        self._is_unconfirmed = self._canary is not None

    def manifest_arrived(self, version: Version, now: float) -> None:
        """The pieces may be fetched."""
        if version == self.fetching and self._manifests.in_flight:
            self._manifests.answered(now)
            self._outbox.order(FetchPieces(version))

    def heard_of(self, news: tuple[Forthcoming, ...]) -> None:
        """What is being encoded now."""
        self._news = news

    def weighed(self, event: Weighed, now: float) -> None:
        """A running fetch is finished unless the jump to the newest version costs less than what is left."""
        running = self.fetching
        if running is None or event.version != self._weighed or self._manifests.in_flight:
            return
        if not should_jump(left=event.left, jump=event.jump):
            return
        self._outbox.note(
            now, "version_skipped", f"{running}: {event.version} costs {event.jump} bytes, {event.left} were left", ""
        )
        self._skipped += 1
        self.fetching = event.version
        self._outbox.order(StopFetch(running), FetchPieces(event.version))

    def fetch_ended(self, event: FetchFinished | FetchFailed, now: float) -> None:
        """The version is on disk, or nothing of it is used."""
        if isinstance(event, FetchFinished):  # also of one that was given up a moment too late
            self._stored.add(event.version)
            self._fetched[event.version] = event
            self.trouble = ""
        if event.version != self.fetching:
            return
        self.fetching = None
        if isinstance(event, FetchFinished):
            return
        self.trouble = f"{event.version}: {event.reason}"
        self._outbox.note(now, "fetch_failed", self.trouble, event.blame)
        self._manifests.failed(now)

    def swap_ended(self, event: SwapFinished | SwapFailed, now: float) -> Version | None:
        """The engine has the version, or what it had before, or (a load that failed) nothing."""
        if event.version != self.swapping:
            return None
        self.swapping = None
        if isinstance(event, SwapFailed):
            self._outbox.note(now, "swap_failed", f"{event.version}: {event.reason}", "worker")
            self._swaps.failed(now)
            if not event.kept:
                self._unload()
                self.job = None
            self._forget(event.version)
            return None
        self._swaps.answered(now)
        if self.job != event.version.job_id:
            self.labels.clear()
        self.loaded, self.job = event.version, event.version.job_id
        self.labels[event.version.number] = event.version
        self._canary, self._is_unconfirmed = event, True
        if not all(isfinite(logprob) for logprob in event.canary_logprobs):
            return self._disproved(event.version, "its log-probs are not finite on this engine: try another dtype or device", now)
        return None

    def confirm_answered(self, event: ConfirmAnswered, now: float) -> Version | None:
        """The coordinator judged the loaded version's canary."""
        if not self._confirms.in_flight or event.version != self.confirming:
            return None
        if not event.accepted:
            self._confirms.failed(now)
            return self._disproved(event.version, event.reason, now)
        self._confirms.answered(now)
        self._is_unconfirmed = False
        self._skipped = 0
        self._failures.pop(event.version, None)
        self.confirmed |= {event.version}
        self._forget_old(event.version)
        return None

    def manifest_failed(self, event: CallFailed, now: float) -> None:
        """No manifest: the target of then is asked for after the back-off."""
        self.fetching = None
        self._manifests.failed(now, retry_after_s=event.retry_after_s)

    def confirm_failed(self, event: CallFailed, now: float) -> Version | None:
        """No judgement: a definite no counts as one."""
        confirming = self.confirming
        if event.outcome is Outcome.REFUSED and confirming is not None:
            return self.confirm_answered(ConfirmAnswered(confirming, accepted=False, reason=event.reason), now)
        self._confirms.failed(now, retry_after_s=event.retry_after_s)
        return None

    def engine_failed(self) -> None:
        """Nothing is loaded any more, and nothing will be."""
        self._unload()
        self.swapping = None

    def silent(self, now: float) -> list[str]:
        """Calls that outlived every deadline count as failed; which."""
        named = {"manifest": self._manifests, "confirm": self._confirms}
        found = [name for name, lane in named.items() if lane.is_silent(now)]
        for name in found:
            named[name].failed(now)
        if "manifest" in found:
            self.fetching = None
        return found

    def hung_swap(self, now: float) -> bool:
        """Whether a swap took longer than any may."""
        if not self._swaps.is_silent(now):
            return False
        self._swaps.failed(now)
        return True

    # --- what is due

    def start_fetch(self, target: Version | None, now: float) -> None:
        """Ask for the target's manifest when it is lacking."""
        given_up = frozenset(version for version in self._failures if self.hopeless(version))
        version = weights.to_fetch(self._shelf(), target, given_up=given_up)
        if version is not None and self._manifests.is_ready(now):
            self.fetching = version
            self._manifests.started(now)
            self._outbox.order(FetchManifest(version))

    def start_weighing(self, target: Version | None) -> None:
        """Ask once for each newer version what a jump to it costs, while pieces are being fetched."""
        version = weights.to_weigh(self._shelf(), target)
        if version is not None and version != self._weighed and not self._manifests.in_flight:
            self._weighed = version
            self._outbox.order(Weigh(version))

    def start_prefetch(self) -> None:
        """Bring what can be brought of the version that comes next."""
        news = weights.to_prefetch(self._shelf(), self._news, job_id=self.job, asked=self._prefetched)
        if news is not None:
            self._prefetched = news.transfer
            self._outbox.order(Prefetch(news))

    def start_swap(self, target: Version | None, now: float, *, abort_running: bool) -> None:
        """Put the target into the engine. Running completions go on only if the numbers in them can go up and mean one thing each."""
        version = weights.to_swap(self._shelf(), target)
        if version is None or self._is_unconfirmed or not self._swaps.is_ready(now):
            return
        renamed = self.labels.get(version.number, version) != version
        older = self.loaded is not None and version.number < self.loaded.number
        self.swapping, self.swapping_since = version, now
        self._swaps.started(now)
        self._outbox.order(SwapWeights(version, abort_running=abort_running or renamed or older))

    def start_confirm(self, epoch: int, now: float) -> None:
        """Send the loaded version's canary."""
        if self._canary is None or not self._is_unconfirmed or self.swapping is not None or not self._confirms.is_ready(now):
            return
        fetched = self._fetched.get(self._canary.version, FetchFinished(self._canary.version, 0, 0, 0.0))
        self._confirms.started(now)
        self._outbox.order(
            SendConfirm(
                epoch=epoch,
                version=self._canary.version,
                canary_logprobs=self._canary.canary_logprobs,
                fetched_bytes=fetched.fetched_bytes,
                from_peers_bytes=fetched.from_peers_bytes,
                fetch_s=fetched.seconds,
                assemble_s=fetched.assemble_s,
                apply_s=self._canary.seconds,
                skipped=self._skipped,
            )
        )

    def drop_unneeded(self, target: Version | None) -> None:
        """Forget stored versions that are neither loaded nor coming."""
        in_use = () if self.swapping is None else (self.swapping,)
        dropped = weights.to_drop(self._shelf(), target, in_use=in_use)
        if dropped:
            self._stored -= dropped
            for version in dropped:
                self._fetched.pop(version, None)
            self._outbox.order(DropVersions(dropped))

    # --- small steps

    def _lane(self, silence_s: float) -> Lane:
        return Lane(silence_s=silence_s, first_s=self._limits.retry_first_s, most_s=self._limits.retry_most_s, rng=self._rng)

    def _shelf(self) -> Shelf:
        return Shelf(frozenset(self._stored), self.loaded, self.fetching)

    def _unload(self) -> None:
        self.loaded, self._canary, self._is_unconfirmed = None, None, False

    def _disproved(self, version: Version, reason: str, now: float) -> Version:
        """The engine does not hold what the version should be: fetch it anew."""
        self._outbox.note(now, "not_confirmed", f"{version}: {reason}", "worker")
        self._unload()
        self._forget(version)
        return version

    def _forget(self, version: Version) -> None:
        """These bits cannot be used: drop them, and count, so that a version that never works is given up."""
        self._failures[version] = self._failures.pop(version, 0) + 1
        if len(self._failures) > KEPT_FAILURES:
            self._failures.pop(next(iter(self._failures)))
        self._stored.discard(version)
        self._fetched.pop(version, None)
        self._outbox.order(DropVersions(frozenset({version})))

    def _forget_old(self, loaded: Version) -> None:
        """Versions so old that no lease spans from them to this one."""
        floor = loaded.number - KEPT_NUMBERS
        self.confirmed = frozenset(one for one in self.confirmed if one.job_id == loaded.job_id and one.number >= floor)
        self.labels = {number: one for number, one in self.labels.items() if number >= floor}
