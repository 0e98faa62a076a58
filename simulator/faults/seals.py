"""Laws 1, 2, 10 and 11 where batches and learners meet: what is sealed, what is trained, what is committed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from safetensors.numpy import load

from coordinator.domain.model import (
    Batch,
    BatchState,
    Group,
    GroupState,
    Metric,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
)
from coordinator.wire import learner_link as link

if TYPE_CHECKING:
    from simulator.faults.world import World

GRADED = (RolloutState.SCORED, RolloutState.UNSCORED, RolloutState.GRADER_FAILED, RolloutState.GRADER_TIMEOUT)
RACE_S = 0.3  # a group that became ready while a batch was being written may miss it
ALIKE = 1e-6


class Seals:
    """What is known of batches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables
        self._ready_at: dict[str, float] = {}  # group -> virtual seconds

    def ready(self, group: Group) -> None:
        """It waits for its step, whole; or, where the job allows it, with what was under way brought in."""
        rows = [row for row in self._tables[Rollout].values() if row.group_id == group.id]
        config = self._world.job.config.algorithm
        least = config.group_size if config.min_group is None else config.min_group
        outcomes = sum(row.state in GRADED for row in rows)
        scored = sum(row.state is RolloutState.SCORED for row in rows)
        under_way = any(
            row.state in (RolloutState.LEASED, RolloutState.ACCEPTED) or (row.state is RolloutState.OPEN and row.turn)
            for row in rows
        )
        if under_way or outcomes < least or scored < max(2, config.min_group or 0):
            self._broke(f"DESIGN 4.5: group {group.number} closed with slots {[row.state.value for row in rows]}")
        self._ready_at[group.id] = self._world.loop.time()

    def batch(self, before: Batch | None, batch: Batch) -> None:
        """A batch was sealed or committed."""
        if before is None:
            self._sealed(batch)
        elif before.groups != batch.groups or before.digest != batch.digest:
            self._broke(f"law 2: the batch of step {batch.step} changed after it was sealed")
        elif batch.state is BatchState.COMMITTED and before.state is BatchState.SEALED:
            self._committed(batch)

    def _sealed(self, batch: Batch) -> None:
        job = self._world.job
        config = job.config
        if batch.step != job.committed_steps or batch.step >= config.budget.steps:
            self._broke(
                f"law 1: batch {batch.step} was sealed, the learner's next step is {job.committed_steps} of {config.budget.steps}"
            )
        if len(batch.groups) != config.algorithm.groups_per_step or list(batch.groups) != sorted(set(batch.groups)):
            self._broke(f"DESIGN 4.6: the batch of step {batch.step} holds groups {batch.groups}")
        spread: Counter[str] = Counter()
        for number in batch.groups:
            group = self._group(number)
            if group.state is not GroupState.SEALED or group.step != batch.step:
                self._broke(f"law 2: group {number} is {group.state} and in the batch of step {batch.step}")
            spread[str(self._age(batch, group))] += 1
        if dict(spread) != {age: count for age, count in batch.staleness.items() if count}:
            self._broke(
                f"law 1: the batch of step {batch.step} records staleness {batch.staleness}, its rollouts give {dict(spread)}"
            )
        dull = [number for number in batch.groups if not self._has_signal(self._group(number))]
        if bool(dull) is not batch.no_signal:
            self._broke(f"law 10: the batch of step {batch.step} says no_signal={batch.no_signal}, groups {dull} have none")
        self._order(batch)

    def _age(self, batch: Batch, group: Group) -> int:
        """Staleness of a group, from its rollouts; each must be within the bound and of bits that still hold."""
        rows = [row for row in self._tables[Rollout].values() if row.group_id == group.id and row.oldest_version is not None]
        lost = {(str(p.version), p.digest) for p in self._tables[Publication].values() if p.state is PublicationState.ROLLED_BACK}
        ages = [batch.step - row.oldest_version for row in rows]
        if not ages or min(ages) < 0 or max(ages) > self._world.job.config.staleness.max:
            self._broke(
                f"law 1: group {group.number} has staleness {ages} in step {batch.step}, S is {self._world.job.config.staleness.max}"
            )
        if any(lost & set(row.digests.items()) for row in rows):
            self._broke(f"law 2: group {group.number} was sealed with tokens of a version that was rolled back")
        return max(ages, default=-1)

    def _order(self, batch: Batch) -> None:
        """Lowest issue number first: no usable group with signal and a lower number was ready and passed over."""
        now, bound = self._world.loop.time(), self._world.job.config.staleness.max
        for group in self._tables[Group].values():
            if group.state is not GroupState.READY or group.number > max(batch.groups):
                continue
            oldest = group.oldest_version if group.oldest_version is not None else -1
            early = now - self._ready_at.get(group.id, now) > RACE_S
            if early and batch.step - oldest <= bound and self._has_signal(group):
                self._broke(f"DESIGN 4.6: group {group.number} was ready first and passed over by groups {batch.groups}")

    def _has_signal(self, group: Group) -> bool:
        rows = [row for row in self._tables[Rollout].values() if row.group_id == group.id]
        scores = [row.reward for row in rows if row.state is RolloutState.SCORED and row.reward is not None]
        return len(scores) > 1 and max(scores) - min(scores) > ALIKE

    def training(self, request: link.Train, step: int) -> None:
        """Law 11 and law 1 again, on the bytes that the learner reads."""
        world = self._world
        row: Batch | None = self._tables[Batch].get((world.job.id, request.step))
        if world.truth.alive != 1 or request.fence != world.job.learner_fence:
            self._broke(
                f"law 11: {world.truth.alive} learners live; one of fence {request.fence} trains, the job's is {world.job.learner_fence}"
            )
        if request.step != step or row is None or row.digest != request.batch_digest:
            self._broke(f"law 1: the learner is at step {step} and was given step {request.step}: {row}")
            return
        earlier = world.truth.trained.get(step, [])
        if any(digest != request.batch_digest for digest, _ in earlier):
            self._broke(f"law 2: step {step} was trained on another batch before")
        path = Path(request.batch_path)
        if not path.is_file():
            self._broke(f"law 2: the batch file of step {step} is gone before a newer checkpoint is durable")
            return
        data = path.read_bytes()
        if blake3(data).hexdigest() != request.batch_digest:
            self._broke(f"law 2: the batch file of step {step} is not what was sealed")
        arrays = load(data)
        versions, lengths = arrays["versions"], arrays["lengths"]
        bound = world.job.config.staleness.max if row.bound is None else row.bound
        if step - int(versions.min()) > bound or int(versions.max()) > step:
            self._broke(f"law 1: step {step} trains on versions {int(versions.min())}..{int(versions.max())}, S is {bound}")
        if len(lengths) != row.rollouts or int(lengths.sum()) != len(versions):
            self._broke(f"law 10: the batch of step {step} counts {row.rollouts} rollouts, its file holds {len(lengths)}")
        if not earlier:
            world.laws.turns.trained(step, row.groups, arrays.get("sampled"), arrays["token_ids"])

    def _committed(self, batch: Batch) -> None:
        world = self._world
        if batch.digest not in [digest for digest, _ in world.truth.trained.get(batch.step, [])]:
            self._broke(f"law 2: step {batch.step} was committed and no learner took it")
        if world.job.committed_steps != batch.step + 1:
            self._broke(f"law 2: step {batch.step} was committed, the job counts {world.job.committed_steps}")
        for number in batch.groups:
            if self._group(number).state is not GroupState.TRAINED:
                self._broke(f"law 2: step {batch.step} was committed and group {number} is {self._group(number).state}")

    def at_the_end(self) -> None:
        """Each committed step was trained at least once, always on the same bytes; its raw reward is the mean over what came to it."""
        for (job_id, step), batch in self._tables[Batch].items():
            if batch.state is not BatchState.COMMITTED:
                continue
            numbers = [g.number for g in self._tables[Group].values() if g.step == step]
            rows = [r for r in self._tables[Rollout].values() if r.group_number in numbers and r.state is RolloutState.SCORED]
            rewards = [row.reward for row in rows if row.reward is not None]
            told = self._tables[Metric].get((job_id, "reward/all/mean", step))
            if rewards and (told is None or abs(told.value - sum(rewards) / len(rewards)) > 1e-9):
                self._broke(f"law 10: step {step} tells a reward of {told}, its rollouts give {sum(rewards) / len(rewards)}")

    def _group(self, number: int) -> Group:
        group: Group = self._tables[Group][f"{self._world.job.id}/g{number}"]
        return group

    def _broke(self, words: str) -> None:
        self._world.broke(words)
