"""The coordinator's commands on rows in dictionaries: load, decide with the product's own domain code, save.

It stands in for service and store: every decision is a call into `coordinator.domain`, every state changes through its table.
Indexes (which leases are live, which groups unsettled) only spare a scan of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from coordinator.domain import admission, groups, leases, workers
from coordinator.domain import seal as sealing
from coordinator.domain.admission import Submitted, Verdict
from coordinator.domain.grant import Grant, grantable
from coordinator.domain.model import (
    Batch,
    Group,
    GroupState,
    Job,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Refusal,
    Rollout,
    RolloutState,
    Worker,
    WorkerState,
)
from coordinator.domain.staleness import last_step
from coordinator.domain.states import BATCH, GROUP, JOB, LEASE, PUBLICATION, ROLLOUT, WORKER, move
from simulator import rows

_ENDED = {
    LeaseState.ABANDONED: "abandoned",
    LeaseState.EXPIRED: "expired",
    LeaseState.DEAD: "died",
}


class Coordinator:
    """Rows of one job, and the commands that change them."""

    def __init__(self, job: Job, *, grace_s: float, lost_after_s: float) -> None:
        self.job = job
        self.groups: dict[int, Group] = {}
        self.rollouts: dict[int, list[Rollout]] = {}  # by group number, then slot
        self.leases: dict[str, Lease] = {}
        self.batches: list[Batch] = []
        self.publications: list[Publication] = []
        self.refusals: list[Refusal] = []
        self.workers: dict[str, Worker] = {}
        self.held: dict[str, dict[int, str]] = {}  # worker -> version -> digest it confirmed
        self.unsettled: set[int] = set()
        self._live: dict[str, None] = {}
        self._grace_s = grace_s
        self._lost_after_s = lost_after_s

    # What the rows say

    @property
    def bound(self) -> int:
        """S."""
        return self.job.config.staleness.max

    @property
    def newest(self) -> Publication | None:
        """The newest version that workers may fetch."""
        usable = [p for p in self.publications if p.state is PublicationState.PUBLISHED]
        return max(usable, key=lambda p: p.version, default=None)

    @property
    def rolled_back(self) -> frozenset[str]:
        """Digests that a replay replaced."""
        return frozenset(p.digest for p in self.publications if p.state is PublicationState.ROLLED_BACK)

    def newest_held(self, worker_id: str) -> int | None:
        """The newest version that the worker confirmed."""
        return max(self.held[worker_id], default=None)

    def grant_for(self, version: int) -> Grant:
        """The grant rule on the rows as they are."""
        return grantable(
            committed_steps=self.job.committed_steps,
            unsettled=len(self.unsettled),
            groups_per_step=self.job.config.algorithm.groups_per_step,
            bound=self.bound,
            held_version=version,
            planned_steps=self.job.config.budget.steps,
        )

    def may_lease(self, worker_id: str) -> bool:
        """Whether the worker is in good standing and holds a version that the next step can use."""
        version = self.newest_held(worker_id)
        usable = version is not None and self.job.committed_steps <= last_step(version, self.bound)
        return workers.standing(self.workers[worker_id], holds_newest_usable=usable)[0]

    # Workers

    def join(self, worker: Worker, now: float) -> None:
        """A worker joins or comes back with a new session; leases of its old session are given up."""
        known = self.workers.get(worker.id)
        if known is None:
            self.workers[worker.id] = worker
            self.held[worker.id] = {}
            return
        state = move(WORKER, known.state, "rejoined")
        epoch = known.session_epoch + 1
        self.workers[worker.id] = replace(known, state=state, session_epoch=epoch, last_seen_at=now, state_since=now)
        self.held[worker.id] = {}
        for lease in self._live_leases():
            if lease.worker_id == worker.id:
                self._end_lease(lease, LeaseState.ABANDONED, "worker_gone: it joined anew", now)
        self.sweep(now)

    def confirm(self, worker_id: str, version: int, digest: str, now: float) -> None:
        """The worker's canary for a version agreed."""
        worker = self.workers[worker_id]
        state = move(WORKER, worker.state, "version_confirmed")
        self.workers[worker_id] = replace(worker, state=state, last_seen_at=now)
        if digest not in self.rolled_back:
            self.held[worker_id][version] = digest

    def beat(self, worker_id: str, now: float) -> frozenset[str]:
        """A heartbeat; the answer names the leases that are live."""
        worker = self.workers[worker_id]
        self.workers[worker_id] = replace(worker, last_seen_at=now)
        return frozenset(self._live)

    # Work

    def lease(self, worker_id: str, free_slots: int, now: float) -> list[Lease]:
        """Work for a worker: missing slots of old groups first, then whole new groups by the grant rule."""
        if free_slots <= 0 or self.job.state is not JobState.RUNNING or not self.may_lease(worker_id):
            return []
        granted = list(self._lease_missing(worker_id, free_slots, now))
        left = free_slots - sum(len(lease.slots) for lease in granted)
        size = self.job.config.algorithm.group_size
        if granted and left < size:  # one group beyond the free slots only for those who got nothing else
            return granted
        version = self.newest_held(worker_id)
        assert version is not None
        for _ in range(leases.groups_for(left, group_size=size, grantable=self.grant_for(version).groups)):
            granted.append(self._grant(self._issue(now), tuple(range(size)), worker_id, now))
        return granted

    def _lease_missing(self, worker_id: str, free_slots: int, now: float) -> Iterator[Lease]:
        alone = sum(worker.state is WorkerState.ACTIVE for worker in self.workers.values()) == 1
        for number in sorted(self.unsettled):
            if self.groups[number].state is not GroupState.ISSUED or free_slots <= 0:
                continue
            members = self.rollouts[number]
            slots = [slot for slot in groups.open_slots(members) if alone or members[slot].worker_id != worker_id][:free_slots]
            if slots:
                free_slots -= len(slots)
                yield self._grant(self.groups[number], tuple(slots), worker_id, now)

    def _issue(self, now: float) -> Group:
        group, slots = rows.new_group(self.job, len(self.groups), now)
        self.groups[group.number], self.rollouts[group.number] = group, slots
        self.unsettled.add(group.number)
        return group

    def _grant(self, group: Group, slots: tuple[int, ...], worker_id: str, now: float) -> Lease:
        held = max(self.held[worker_id].items())
        name = f"l{len(self.leases)}"
        lease = rows.new_lease(self.job, self.workers[worker_id], group, name=name, slots=slots, held=held, now=now)
        self.leases[lease.id] = lease
        self._live[lease.id] = None
        self.groups[group.number] = replace(group, fence=lease.fence)
        members = self.rollouts[group.number]
        for slot in slots:
            state = move(ROLLOUT, members[slot].state, "leased")
            attempts = members[slot].attempts + 1
            members[slot] = replace(members[slot], state=state, lease_id=lease.id, worker_id=worker_id, attempts=attempts)
        return lease

    def submit(self, lease: Lease, session_epoch: int, done: Submitted, *, claimed: Mapping[int, str], now: float) -> Verdict:
        """One finished completion arrives; settled at most once."""
        stored, number = self.leases[lease.id], int(lease.group_id[1:])
        row = self.rollouts[number][done.slot]
        if row.lease_id == lease.id and row.accepted_at is not None:
            return Verdict(done.slot, True, "duplicate")
        refused = admission.check_lease(
            stored,
            lease_id=lease.id,
            worker_id=lease.worker_id,
            session_epoch=session_epoch,
            fence=lease.fence,
            committed_steps=self.job.committed_steps,
            now=now,
        )
        if refused is None:
            limits = rows.completion_limits(
                self.job,
                stored,
                confirmed=self.held[lease.worker_id],
                claimed=claimed,
                rolled_back=self.rolled_back,
            )
            verdict = admission.check_completion(done, limits)
        else:
            verdict = Verdict(done.slot, False, refused.code, refused.reason, refused.blame, refused.paid)
        if verdict.accepted:
            self._settle(stored, number, done, now)
        else:
            name = f"r{len(self.refusals)}"
            self.refusals.append(rows.new_refusal(stored, verdict, name=name, tokens=len(done.token_ids), now=now))
            self._reopen(stored, number, done.slot, now)
        return verdict

    def _reopen(self, lease: Lease, number: int, slot: int, now: float) -> None:
        """A refused slot waits for another lease at once."""
        row = self.rollouts[number][slot]
        if lease.state is LeaseState.LIVE and row.lease_id == lease.id and row.state is RolloutState.LEASED:
            self.rollouts[number][slot] = replace(row, state=move(ROLLOUT, row.state, "released"), lease_id=None)
            self._close_if_done(lease, number, now)

    def _settle(self, lease: Lease, number: int, done: Submitted, now: float) -> None:
        members, held = self.rollouts[number], self.held[lease.worker_id]
        oldest, newest = int(done.versions[0]), int(done.versions[-1])
        used = {str(version): held[version] for version in sorted(set(done.versions.tolist()))}
        members[done.slot] = replace(
            members[done.slot],
            state=move(ROLLOUT, members[done.slot].state, "accepted"),
            length=len(done.token_ids),
            oldest_version=oldest,
            newest_version=newest,
            digests=used,
            stop_reason=done.stop_reason,
            accepted_at=now,
        )
        group = self.groups[number]
        known = oldest if group.oldest_version is None else min(group.oldest_version, oldest)
        self.groups[number] = replace(group, oldest_version=known)
        self._close_if_done(lease, number, now)

    def _close_if_done(self, lease: Lease, number: int, now: float) -> None:
        members = self.rollouts[number]
        if all(members[slot].lease_id != lease.id or members[slot].accepted_at is not None for slot in lease.slots):
            self._close_lease(lease, move(LEASE, lease.state, "all_settled"), "", now)

    def grade(self, number: int, slot: int, reward: float, now: float) -> None:
        """The grader's answer for an accepted rollout."""
        row = self.rollouts[number][slot]
        state = move(ROLLOUT, row.state, "scored")
        self.rollouts[number][slot] = replace(row, state=state, reward=reward, graded_at=now)
        self._close_group(number, now)

    def _close_group(self, number: int, now: float) -> None:
        group = self.groups[number]
        if group.state is not GroupState.ISSUED:
            return
        closing = groups.close(group, self.rollouts[number], min_group=self.job.config.algorithm.min_group)
        if closing is None:
            return
        if closing.state is GroupState.REJECTED:
            self._settle_group(number, "rejected", closing.reason, now)
            return
        self.groups[number] = replace(group, state=move(GROUP, group.state, "closed"), reason=closing.reason)

    # Steps

    def seal(self, now: float) -> Batch | None:
        """The batch of the next step, if enough groups are ready."""
        step, algorithm = self.job.committed_steps, self.job.config.algorithm
        ready = [self.groups[number] for number in self.unsettled if self.groups[number].state is GroupState.READY]
        replaced = sum(g.state is GroupState.REJECTED and g.step == step for g in self.groups.values())
        limit = algorithm.groups_per_step if algorithm.max_replacements is None else algorithm.max_replacements
        chosen = sealing.choose(
            [self._ready(group) for group in ready],
            step=step,
            bound=self.bound,
            groups_per_step=algorithm.groups_per_step,
            max_replacements=limit,
            replaced=replaced,
        )
        for number, reason in chosen.rejected:
            counted = step if reason.startswith("no_signal") else None
            self.groups[number] = replace(self.groups[number], step=counted)
            self._settle_group(number, "rejected", reason, now)
        if chosen.groups is None:
            return None
        return self._write_batch(chosen, chosen.groups, now)

    def _ready(self, group: Group) -> sealing.ReadyGroup:
        assert group.oldest_version is not None
        rewards = tuple(row.reward for row in self.rollouts[group.number])
        return sealing.ReadyGroup(group.number, group.oldest_version, rewards)

    def _write_batch(self, chosen: sealing.Seal, numbers: Sequence[int], now: float) -> Batch:
        batch = rows.new_batch(self.job, chosen, numbers, now)
        self.batches.append(batch)
        for number in numbers:
            state = move(GROUP, self.groups[number].state, "sealed")
            self.groups[number] = replace(self.groups[number], state=state, step=batch.step)
        return batch

    def commit(self, now: float) -> None:
        """The learner took the step of the newest batch."""
        batch = self.batches[-1]
        state = move(BATCH, batch.state, "step_committed")
        self.batches[-1] = replace(batch, state=state, committed_at=now)
        for number in batch.groups:
            self._settle_group(number, "step_committed", "", now)
        self.job = replace(self.job, committed_steps=self.job.committed_steps + 1)
        self.sweep(now)

    def publish(self, version: int, digest: str, now: float) -> None:
        """A version becomes public."""
        row = Publication(self.job.id, version, digest, PublicationState.PUBLISHED, "", "", "", (), now)
        self.publications.append(row)

    def roll_back(self, digest: str, anew: str, now: float) -> None:
        """A replay gave the newest version other weights: whatever the lost ones made and is not sealed is rejected."""
        place = next(i for i, p in enumerate(self.publications) if p.digest == digest)
        lost = self.publications[place]
        self.publications[place] = replace(lost, state=move(PUBLICATION, lost.state, "rolled_back"))
        self.publish(lost.version, anew, now)
        for held in self.held.values():
            if held.get(lost.version) == digest:
                del held[lost.version]
        self.sweep(now)
        for number in sorted(self.unsettled):
            stained = any(digest in row.digests.values() for row in self.rollouts[number])
            if stained and self.groups[number].state is not GroupState.SEALED:
                reason = f"policy_rolled_back: version {lost.version} was published anew with other weights"
                self._settle_group(number, "rejected", reason, now)

    def finish(self, now: float) -> None:
        """The planned steps are done: settle whatever is left."""
        for event in ("steps_done", "finished"):
            self.job = replace(self.job, state=move(JOB, self.job.state, event))
        for number in sorted(self.unsettled):
            self._end_group(number, "job_completed: no step needs it", now)

    # Time

    def sweep(self, now: float) -> None:
        """End what is over: silent workers, leases, groups that no step can take any more."""
        for worker in self.workers.values():
            if worker.state is WorkerState.GONE or not workers.is_lost(
                worker.last_seen_at, now=now, lost_after_s=self._lost_after_s
            ):
                continue
            gone = move(WORKER, worker.state, "lost")
            self.workers[worker.id] = replace(worker, state=gone, state_since=now)
        touched = [self._swept(lease, now) for lease in self._live_leases()]
        for number in sorted({number for number in touched if number is not None}):
            self._close_group(number, now)
        newest = self.newest
        for number in sorted(self.unsettled):
            if self.groups[number].state is not GroupState.ISSUED:
                continue
            reason = groups.died(
                self.groups[number],
                self.rollouts[number],
                step=self.job.committed_steps,
                bound=self.bound,
                newest_version=None if newest is None else newest.version,
            )
            if reason is not None:
                self._end_group(number, reason, now)

    def restarted(self, now: float) -> None:
        """The coordinator is back: nobody could beat or submit meanwhile, so live deadlines move."""
        for lease in self._live_leases():
            deadline = leases.moved_deadline(lease, now=now, grace_s=self._grace_s)
            self.leases[lease.id] = replace(lease, deadline=deadline)
        for worker in self.workers.values():
            if worker.state is not WorkerState.GONE:
                self.workers[worker.id] = replace(worker, last_seen_at=now)

    def _live_leases(self) -> list[Lease]:
        return [self.leases[lease_id] for lease_id in self._live]

    def _swept(self, lease: Lease, now: float) -> int | None:
        alive = self.workers[lease.worker_id].state not in (WorkerState.GONE, WorkerState.QUARANTINED)
        ended = leases.ending(
            lease,
            now=now,
            committed_steps=self.job.committed_steps,
            worker_alive=alive,
            rolled_back=self.rolled_back,
        )
        if ended is None:
            return None
        return self._end_lease(lease, *ended, now)

    def _end_lease(self, lease: Lease, state: LeaseState, reason: str, now: float) -> int:
        self._close_lease(lease, move(LEASE, lease.state, _ENDED[state]), reason, now)
        number = int(lease.group_id[1:])
        members = self.rollouts[number]
        for slot in lease.slots:
            if members[slot].lease_id == lease.id and members[slot].state is RolloutState.LEASED:
                members[slot] = replace(members[slot], state=move(ROLLOUT, members[slot].state, "released"), lease_id=None)
        return number

    def _close_lease(self, lease: Lease, state: LeaseState, reason: str, now: float) -> None:
        self.leases[lease.id] = replace(lease, state=state, reason=reason, closed_at=now)
        del self._live[lease.id]

    def _end_group(self, number: int, reason: str, now: float) -> None:
        kept = any(row.accepted_at is not None for row in self.rollouts[number])
        can_void = self.groups[number].state is GroupState.ISSUED and not kept
        self._settle_group(number, "voided" if can_void else "rejected", reason, now)

    def _settle_group(self, number: int, event: str, reason: str, now: float) -> None:
        group = self.groups[number]
        state = move(GROUP, group.state, event)
        self.groups[number] = replace(group, state=state, reason=reason or group.reason, settled_at=now)
        self.unsettled.discard(number)
        for lease in self._live_leases():
            if lease.group_id == group.id:
                self._end_lease(lease, LeaseState.DEAD, reason, now)
        members = self.rollouts[number]
        for slot, row in enumerate(members):
            if row.state in (RolloutState.OPEN, RolloutState.LEASED):
                members[slot] = replace(row, state=move(ROLLOUT, row.state, "group_ended"))
