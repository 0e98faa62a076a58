"""Laws 1 to 4 where work is granted and settled: the grant rule, leases, and every accepted completion down to its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coordinator.domain.model import (
    Group,
    GroupState,
    Holding,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
    Turn,
    Worker,
    WorkerState,
)
from coordinator.service.batches import tokens_of
from coordinator.wire.frames import decode_frame
from coordinator.wire.messages import SubmitHead
from simulator.faults.parts import STOP_TOKEN, VOCAB

if TYPE_CHECKING:
    from simulator.faults.world import World

UNSETTLED = (GroupState.ISSUED, GroupState.READY, GroupState.SEALED)


class Leased:
    """Looks at new leases, new groups and new settlements."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables

    def lease(self, before: Lease | None, lease: Lease) -> None:
        """A new lease is within every rule; one that is done counts the tokens that it brought."""
        if before is not None:
            self._done(lease)
            return
        job, worker = self._world.job, self._tables[Worker][lease.worker_id]
        now, settings = self._world.host.clock.now(), self._world.settings
        group: Group = self._tables[Group][lease.group_id]
        public = self._tables[Publication].get((job.id, lease.version, lease.digest))
        slots = [self._tables[Rollout][lease.group_id, slot] for slot in lease.slots]
        ages = [lease.version, *(row.oldest_version for row in slots if row.oldest_version is not None)]
        leased = sum(r.state is RolloutState.LEASED and r.worker_id == worker.id for r in self._tables[Rollout].values())
        wrong = {
            f"job is {job.state}": job.state is not JobState.RUNNING,
            f"worker is {worker.state}": worker.state is not WorkerState.ACTIVE,
            f"session is {worker.session_epoch}": lease.session_epoch != worker.session_epoch,
            "version is not published": public is None or public.state is not PublicationState.PUBLISHED,
            "version is not confirmed": (worker.id, job.id, lease.version, lease.digest) not in self._tables[Holding],
            f"last step is {lease.last_step}": lease.last_step != min(lease.version, *ages) + job.config.staleness.max,
            f"step is {job.committed_steps}": job.committed_steps > lease.version + job.config.staleness.max,
            f"fence of the group is {group.fence}": lease.fence > group.fence or not lease.id.endswith(f"/f{lease.fence}"),
            f"slots are {[row.state for row in slots]}": any(
                r.state is not RolloutState.LEASED or r.lease_id != lease.id for r in slots
            ),
            f"{leased} slots are leased to a worker of {worker.max_slots}": leased > worker.max_slots + group.size - 1,
            f"deadline is {lease.deadline - now:.1f} s away": not settings.lease_min_s
            <= lease.deadline - now + 1e-3
            <= settings.lease_max_s + 1,
            f"group {group.number} is {group.state}": group.state is not GroupState.ISSUED,
            f"its group comes in step {self._latest(group)} at the latest": self._latest(group) > lease.last_step,
        }
        for words, broken in wrong.items():
            if broken:
                self._broke(f"laws 1 to 3: lease {lease.id} on version {lease.version} was granted to {worker.name}; {words}")

    def _done(self, lease: Lease) -> None:
        settled = [row.length for row in self._tables[Rollout].values() if row.lease_id == lease.id and row.accepted_at is not None]
        settled += [turn.length for turn in self._tables[Turn].values() if turn.lease_id == lease.id]
        if lease.state is LeaseState.DONE and lease.tokens != sum(settled):
            self._broke(f"law 7: lease {lease.id} is done and counts {lease.tokens} tokens, its slots have {settled}")

    def _latest(self, group: Group) -> int:
        """The step that a group is trained in if all unsettled ones before it are trained first."""
        job = self._world.job
        before = sum(g.state in UNSETTLED and g.number < group.number for g in self._tables[Group].values())
        return int(job.committed_steps + before // job.config.algorithm.groups_per_step)

    def issued(self, new: list[Group]) -> None:
        """The grant rule of DESIGN 4.1 in its own form: t + floor((n + g - 1) / B) <= x + S."""
        if not new:
            return
        config, step = self._world.job.config, self._world.job.committed_steps
        batch = config.algorithm.groups_per_step
        ids = {group.id for group in new}
        unsettled = sum(g.state in UNSETTLED and g.id not in ids for g in self._tables[Group].values())
        for place, group in enumerate(sorted(new, key=lambda one: one.number)):
            lease = self._tables[Lease].get(f"{group.id}/f1")
            latest = step + (unsettled + place) // batch
            if lease is None or latest > lease.version + config.staleness.max or latest >= config.budget.steps:
                words = f"step {step}, {unsettled + place} unsettled groups before it, {batch} a step, S {config.staleness.max}"
                version = "no version" if lease is None else f"version {lease.version}"
                self._broke(
                    f"law 1, grant rule: group {group.number} was issued for {version} ({words}, {config.budget.steps} steps planned)"
                )

    def accepted(self, before: Rollout, row: Rollout) -> None:
        """Laws 1, 2 and 3 for one settlement, from the lease, the worker's holdings and the stored bytes."""
        world = self._world
        lease: Lease | None = self._tables[Lease].get(row.lease_id)
        place = f"group {row.group_number} slot {row.slot}"
        if lease is None or before.state is not RolloutState.LEASED or before.lease_id != lease.id:
            self._broke(f"law 2: {place} was accepted and was {before.state} under {before.lease_id}")
            return
        now, job, worker = world.host.clock.now(), world.job, self._tables[Worker][lease.worker_id]
        if lease.state not in (LeaseState.LIVE, LeaseState.DONE) or now > lease.deadline:
            self._broke(f"law 2: {place} was accepted {now - lease.deadline:+.2f} s after the deadline of {lease.state} {lease.id}")
        if worker.session_epoch != lease.session_epoch:
            self._broke(f"law 2: {place} was accepted from session {lease.session_epoch}, the newest is {worker.session_epoch}")
        if row.oldest_version is None or row.newest_version is None:
            self._broke(f"law 1: {place} was accepted without a version")
            return
        if job.committed_steps > lease.last_step or job.committed_steps - row.oldest_version > job.config.staleness.max:
            self._broke(
                f"law 1: {place} with version {row.oldest_version} was accepted at step {job.committed_steps}, S {job.config.staleness.max}"
            )
        made = self._bytes(before, row, lease, place)
        if made and (min(made) < lease.version or max(made) > lease.last_step):
            self._broke(f"law 1: {place} carries {min(made)}..{max(made)}, its lease {lease.version}..{lease.last_step}")
        self._digests(row, lease, made, place)

    def _bytes(self, before: Rollout, row: Rollout, lease: Lease, place: str) -> set[int]:
        """What lies in the blob is what the row says, and what the grant asked for; the versions in it."""
        stored = self._world.host.blobs.get(row.blob or "")
        if stored is None:
            self._broke(f"law 2: {place} was accepted and its tokens are not stored")
            return set()
        raw, arrays = decode_frame(stored[0])
        head = SubmitHead.model_validate_json(raw)
        if (head.lease_id, head.fence, head.session_epoch) != (lease.id, lease.fence, lease.session_epoch):
            self._broke(
                f"law 2: {place} came under {head.lease_id}, fence {head.fence}, session {head.session_epoch}; it was granted as {lease}"
            )
        ids, logprobs, versions = (np.asarray(array, np.float64) for array in tokens_of(arrays, row))
        stop = int(ids[-1]) == STOP_TOKEN
        right = (
            row.length == len(ids) > 0
            and int(ids.min()) >= 0
            and int(ids.max()) < VOCAB
            and bool((logprobs <= 0).all())
            and float(logprobs.min()) >= -104.0
            and bool((versions[1:] >= versions[:-1]).all())
            and _span(before, int(versions[0]), int(versions[-1])) == (row.oldest_version, row.newest_version)
            and row.length <= (lease.max_new_tokens or self._world.job.config.sampling.max_new_tokens)
            and (row.stop_reason == "stop") == stop
            and row.generate_s * self._world.settings.fastest_tokens_per_s >= row.length
        )
        if not right:
            self._broke(
                f"law 4: {place} was accepted with tokens {ids.tolist()}, log-probs {logprobs.tolist()}, versions {versions.tolist()}"
            )
        return {int(version) for version in versions}

    def _digests(self, row: Rollout, lease: Lease, made: set[int], place: str) -> None:
        """Law 3: every version in it was confirmed by this worker, is not rolled back, and is what the engine really held."""
        worker = self._world.worker(lease.worker_id)
        if not made <= {int(number) for number in row.digests}:
            self._broke(f"law 3: {place} was made by versions {sorted(made)} and names {sorted(row.digests)}")
        for number, digest in ((number, digest) for number, digest in row.digests.items() if int(number) in made):
            holding = self._tables[Holding].get((lease.worker_id, lease.job_id, int(number), digest))
            public = self._tables[Publication].get((lease.job_id, int(number), digest))
            if holding is None or public is None:
                self._broke(f"law 3: {place} was made by version {number} ({digest[:8]}), which {worker.name} never proved to hold")
            elif public.state is PublicationState.ROLLED_BACK:
                self._broke(f"law 2: {place} was accepted with version {number} ({digest[:8]}), which was rolled back")
            elif worker.kind.temper != "fabricator" and worker.served.get(int(number), digest) != digest:
                self._broke(
                    f"law 3: {place} names version {number} ({digest[:8]}); the engine held {worker.served[int(number)][:8]}"
                )

    def _broke(self, words: str) -> None:
        self._world.broke(words)


def _span(before: Rollout, oldest: int, newest: int) -> tuple[int, int]:
    """The versions of a slot with those of its earlier turns."""
    if before.oldest_version is None or before.newest_version is None:
        return oldest, newest
    return min(oldest, before.oldest_version), max(newest, before.newest_version)
