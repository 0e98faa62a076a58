"""The laws of DESIGN 2, checked on the rows after every commit, against what learners and workers really did.

Nothing here asks the code that is tested: rules are written down a second time, in the form of the design's own formulas.
`leased.py` holds what concerns grants and settlements, `seals.py` batches and learners, `retention.py` weights, `timers.py` what must
not last, `money.py` the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature

from coordinator.domain.audit import audit
from coordinator.domain.audit_turns import counted
from coordinator.domain.model import (
    Batch,
    BatchState,
    EdgeRow,
    Group,
    GroupState,
    Holding,
    Job,
    JobState,
    Lease,
    LeaseState,
    Metric,
    Publication,
    Refusal,
    Rollout,
    RolloutState,
    Turn,
    Worker,
)
from coordinator.domain.states import TERMINAL
from coordinator.wire import learner_link as link
from coordinator.wire.messages import SubmitReply
from coordinator.wire.signing import receipt_message
from simulator.faults.coverage import BY_KIND
from simulator.faults.leased import UNSETTLED, Leased
from simulator.faults.money import Money
from simulator.faults.retention import Weights
from simulator.faults.seals import Seals
from simulator.faults.store import Change
from simulator.faults.timers import Timers
from simulator.faults.turns import Turns
from worker_node.domain import instructions as do

if TYPE_CHECKING:
    from simulator.faults.worker import SimWorker
    from simulator.faults.world import World

SETTLED = (
    RolloutState.ACCEPTED,
    RolloutState.SCORED,
    RolloutState.UNSCORED,
    RolloutState.GRADER_FAILED,
    RolloutState.GRADER_TIMEOUT,
)
LATE = ("lease_expired", "lease_closed", "slot_closed", "old_session")  # may happen to an honest worker
RECEIPTS_EVERY = 4


class Laws:
    """Told of every commit and every look; says what is broken to the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables
        self._acked: set[tuple[str, int, str]] = set()  # group, slot, lease
        self._replies = 0
        self._before_restart: dict[type[Any], dict[Any, Any]] = {}
        self.seals = Seals(world)
        self.timers = Timers(world)
        self.money = Money(world)
        self.leased = Leased(world)
        self.weights = Weights(world)
        self.turns = Turns(world)
        self._looks: dict[type[Any], Callable[[Any, Any], None]] = {
            Rollout: self._rollout,
            Group: self._group,
            Lease: self.leased.lease,
            Batch: self.seals.batch,
            Publication: self.weights.publication,
            Holding: self.weights.confirmed,
            Refusal: self._refusal,
            Job: self._job,
            Worker: self._session,
            Metric: self._metric,
            Turn: self.turns.turn,
        }

    # --- told by the world

    def check(self, changes: list[Change]) -> None:
        """After a commit."""
        for kind, before, after in changes:
            if kind in BY_KIND and before is not None:
                self._moved(kind, before, after)
            look = self._looks.get(kind)
            if look is not None and after is not None:
                look(before, after)
        if any(change.kind is EdgeRow and change.after is None for change in changes):
            self.weights.ways()
        self.money.check(changes)
        self.leased.issued([change.after for change in changes if change.kind is Group and change.before is None])

    def look(self) -> None:
        """Every virtual second."""
        self.timers.look()

    def training(self, request: link.Train, step: int) -> None:
        """A learner is about to take a step."""
        self.seals.training(request, step)

    def clock_stepped(self, by_s: float) -> None:
        """The coordinator's clock jumped."""
        self.timers.clock_stepped(by_s)

    def before_recovery(self) -> None:
        """A new process is about to read the rows."""
        self._before_restart = {kind: dict(self._tables[kind]) for kind in (Job, Group, Batch, Publication, Worker, Lease)}

    def recovered(self, now: float) -> None:
        """Law 6: a restart changes nothing but live deadlines, which lie at least the grace ahead."""
        for kind, rows in self._before_restart.items():
            if kind is not Lease and rows != self._tables[kind]:
                self._broke(f"law 6: the restart changed {kind.__name__} rows")
        grace_s = self._world.settings.restart_grace_s
        for key, lease in self._tables[Lease].items():
            old = self._before_restart[Lease][key]
            if lease.state is LeaseState.LIVE and not max(old.deadline, now + grace_s - 1.0) <= lease.deadline <= max(
                old.deadline, now + grace_s
            ):
                self._broke(f"law 6: lease {key} ends at {lease.deadline - now:+.1f} s after the restart, the grace is {grace_s} s")

    def acknowledged(self, worker: SimWorker, sent: do.SubmitCompletions, reply: SubmitReply) -> None:
        """Law 2: what a worker was told is settled, is settled by that lease, and its tokens are stored."""
        lease = self._tables[Lease].get(sent.lease_id)
        slots = sorted({*reply.accepted, *reply.duplicates})
        for slot in slots:
            if lease is None or self._settled(lease.group_id, slot, sent.lease_id) is None:
                row = self._tables[Rollout].get((lease.group_id, slot)) if lease is not None else None
                self._broke(f"law 2: slot {slot} of {sent.lease_id} was acknowledged and its row says {row}")
                return
            self._acked.add((lease.group_id, slot, sent.lease_id))
        self._replies += 1
        if slots and self._replies % RECEIPTS_EVERY == 0:
            self._receipt(worker, sent, slots, reply.receipt)

    def _settled(self, group_id: str, slot: int, lease_id: str) -> Rollout | Turn | None:
        """What a lease settled: the slot's row, or one of its turns that are over."""
        row: Rollout | None = self._tables[Rollout].get((group_id, slot))
        if row is None or (row.state in SETTLED and row.lease_id == lease_id):
            return row
        return next((turn for turn in self.turns.of(group_id, slot, row.turn) if turn.lease_id == lease_id), None)

    # --- rows

    def _moved(self, kind: type[Any], before: Any, after: Any) -> None:
        if after is None:
            self._broke(f"law 2: a {kind.__name__} row was deleted: {before}")
        elif before.state is not after.state and not self._world.coverage.row_moved(kind, before.state, after.state):
            self._broke(f"law 2: {kind.__name__} went from {before.state} to {after.state}, which its table does not know")

    def _job(self, before: Job | None, after: Job) -> None:
        if before is None or before.committed_steps == after.committed_steps:
            return
        if after.committed_steps != before.committed_steps + 1:
            self._broke(f"law 2: committed steps went from {before.committed_steps} to {after.committed_steps}")

    def _session(self, before: Worker | None, after: Worker) -> None:
        if before is None or before.session_epoch == after.session_epoch:
            return
        for lease in self._tables[Lease].values():
            if lease.worker_id == after.id and lease.state is LeaseState.LIVE:
                self._broke(f"law 2: {after.name} joined anew and lease {lease.id} of session {lease.session_epoch} lives on")

    def _group(self, before: Group | None, after: Group) -> None:
        if before is not None and before.state in TERMINAL[GroupState] and before != after:
            self._broke(f"law 2: settled group {after.number} changed: {before} became {after}")
        if before is not None and after.fence < before.fence:
            self._broke(f"law 2: the fence of group {after.number} fell from {before.fence} to {after.fence}")
        if after.state in (GroupState.REJECTED, GroupState.VOID) and not after.reason:
            self._broke(f"law 5: group {after.number} is {after.state} without a reason")
        if after.state is GroupState.READY and (before is None or before.state is not GroupState.READY):
            self.seals.ready(after)

    def _rollout(self, before: Rollout | None, after: Rollout) -> None:
        if before is None:
            return
        if before.accepted_at is not None and after.turn == before.turn + 1:
            turn = self._tables[Turn].get((after.group_id, after.slot, before.turn))
            kept = ("lease_id", "worker_id", "blob", "blob_start", "length", "stop_reason", "generate_s", "accepted_at")
            if before.state is not RolloutState.ACCEPTED or any(getattr(turn, name, "") != getattr(before, name) for name in kept):
                self._broke(f"law 2: {before} went on to its next turn, and what was settled became {turn}")
            aged = ("oldest_version", "newest_version", "digests", "worker_id")
            if any(getattr(before, name) != getattr(after, name) for name in aged):
                self._broke(f"law 1: {before} forgot its versions: {after}")
        elif before.accepted_at is not None:
            fixed = ("lease_id", "worker_id", "blob", "blob_start", "length", "digests", "accepted_at", "oldest_version")
            changed = [name for name in fixed if getattr(before, name) != getattr(after, name)]
            if changed:
                self._broke(f"law 2: group {after.group_number} slot {after.slot} was settled, and {changed} changed")
        elif after.accepted_at is not None:
            self.leased.accepted(before, after)

    def _metric(self, _before: Metric | None, after: Metric) -> None:
        if not isfinite(after.value):
            self._broke(f"law 10: metric {after.name} is {after.value}")

    def _refusal(self, _before: Refusal | None, refusal: Refusal) -> None:
        if not refusal.code or not refusal.reason or not refusal.blame:
            self._broke(f"law 5: a refusal without words: {refusal}")
        worker = self._world.worker(refusal.worker_id)
        if refusal.paid:
            self._paid_refusal(refusal)
        if refusal.blame == "worker" and worker.kind.temper in ("honest", "slow") and refusal.code not in LATE:
            self._broke(f"{worker.name} is {worker.kind.temper} and was blamed: {refusal.code}: {refusal.reason}")
        if refusal.blame == "coordinator" and not refusal.paid and worker.kind.temper in ("honest", "slow"):
            self._broke(f"DESIGN 4.2: {refusal.code} is the coordinator's fault and not paid: {refusal.reason}")

    def _paid_refusal(self, refusal: Refusal) -> None:
        """Law 7: a slot of a lease is paid once, and only if the lease held it."""
        lease = self._tables[Lease].get(refusal.lease_id)
        same = [
            one
            for one in self._tables[Refusal].values()
            if one.paid and (one.lease_id, one.slot) == (refusal.lease_id, refusal.slot)
        ]
        if lease is None or refusal.slot not in lease.slots or len(same) > 1:
            self._broke(f"law 7: slot {refusal.slot} of {refusal.lease_id} is paid as refused {len(same)} times; {lease}")
        if refusal.tokens > self._world.job.config.sampling.max_new_tokens:
            self._broke(f"law 7: slot {refusal.slot} of {refusal.lease_id} is paid for {refusal.tokens} tokens")

    def _receipt(self, worker: SimWorker, sent: do.SubmitCompletions, slots: list[int], receipt: str) -> None:
        message = receipt_message(worker.id, sent.lease_id, sent.fence, slots)
        try:
            self._world.key.public_key().verify(bytes.fromhex(receipt), message)
        except (InvalidSignature, ValueError):
            self._broke(f"the receipt of {sent.lease_id} does not hold for slots {slots}")

    # --- the whole

    def audit(self) -> None:
        """The product's own audit, and what was acknowledged."""
        tables = self._tables
        found = {kind: list(tables[kind].values()) for kind in (Group, Rollout, Lease, Batch, Publication, Turn)}
        refusals = [row for row in tables[Refusal].values() if row.job_id]
        turns = [counted(turn) for turn in found[Turn]]
        report = audit(
            self._world.job, found[Group], found[Rollout], found[Lease], found[Batch], found[Publication], refusals, turns
        )
        if not report.ok:
            self._broke("the audit found: " + "; ".join(report.findings))
        for group_id, slot, lease_id in sorted(self._acked):
            row = self._settled(group_id, slot, lease_id)
            if row is None:
                now = tables[Rollout][group_id, slot]
                self._broke(
                    f"law 2: {group_id} slot {slot} was acknowledged under {lease_id}; its row is {now.state} under {now.lease_id}"
                )
                return
            group = tables[Group][group_id]
            if group.state in (GroupState.ISSUED, GroupState.READY) and row.blob not in self._world.host.blobs:
                self._broke(f"law 2: the tokens of {group_id} slot {slot} are gone before the group settled")

    def is_settled(self) -> bool:
        """Whether the ended job left nothing behind."""
        groups = any(group.state in UNSETTLED for group in self._tables[Group].values())
        leases = any(lease.state is LeaseState.LIVE for lease in self._tables[Lease].values())
        return not groups and not leases and self.money.is_settled()

    def at_the_end(self) -> None:
        """Everything, once the job is over."""
        job = self._world.job
        self.audit()
        self.seals.at_the_end()
        self.money.at_the_end()
        for group_id, slot, _ in sorted(self._acked):
            if self._tables[Group][group_id].state not in (GroupState.TRAINED, GroupState.REJECTED):
                self._broke(
                    f"law 2: {group_id} slot {slot} was acknowledged and its group is {self._tables[Group][group_id].state}"
                )
        committed = sum(batch.state is BatchState.COMMITTED for batch in self._tables[Batch].values())
        if job.state is JobState.COMPLETED and committed != job.config.budget.steps:
            self._broke(f"law 2: the job completed with {committed} of {job.config.budget.steps} steps")

    def reasons(self) -> Counter[str]:
        """Refusals and the ends of groups, by code."""
        codes = Counter(refusal.code for refusal in self._tables[Refusal].values())
        for group in self._tables[Group].values():
            if group.state in (GroupState.REJECTED, GroupState.VOID):
                codes[f"group {group.state}: {group.reason.split(':')[0]}"] += 1
        return codes

    def _broke(self, words: str) -> None:
        self._world.broke(words)
