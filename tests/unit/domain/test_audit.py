"""The audit: silent on a sound job, and each broken row is found and named."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.domain.audit import Audit, audit
from coordinator.domain.model import (
    BatchState,
    GroupState,
    JobState,
    LeaseState,
    PublicationState,
    RolloutState,
)


@dataclass
class Rows:
    """The rows of one job, by key, ready to be broken."""

    job: Any
    groups: dict[int, Any]
    rollouts: dict[tuple[int, int], Any]
    leases: dict[str, Any]
    batches: dict[int, Any]
    publications: list[Any]
    refusals: list[Any] = field(default_factory=list)

    def audit(self) -> Audit:
        return audit(
            self.job,
            list(self.groups.values()),
            list(self.rollouts.values()),
            list(self.leases.values()),
            list(self.batches.values()),
            self.publications,
            self.refusals,
        )

    def set_group(self, number: int, **changes: Any) -> None:
        self.groups[number] = replace(self.groups[number], **changes)

    def set_rollout(self, number: int, slot: int, **changes: Any) -> None:
        self.rollouts[number, slot] = replace(self.rollouts[number, slot], **changes)

    def set_batch(self, key: int, **changes: Any) -> None:
        self.batches[key] = replace(self.batches[key], **changes)


@pytest.fixture
def rows(make_job, make_group, make_rollout, make_lease, make_batch, make_publication) -> Rows:
    """Two steps of two groups of two; group 4 was rejected, group 5 is void."""
    groups, rollouts, leases = {}, {}, {}
    for number in range(6):
        step = number // 2 if number < 4 else None
        state = GroupState.TRAINED if number < 4 else (GroupState.REJECTED if number == 4 else GroupState.VOID)
        reason = "" if number < 4 else "stale: too old"
        groups[number] = make_group(id=f"g{number}", number=number, state=state, step=step, reason=reason)
        leases[f"l{number}"] = make_lease(id=f"l{number}", group_id=f"g{number}", state=LeaseState.DONE)
        for slot in range(2):
            scored = make_rollout(
                group_id=f"g{number}",
                group_number=number,
                slot=slot,
                state=RolloutState.SCORED,
                lease_id=f"l{number}",
                worker_id="w",
                oldest_version=0,
                newest_version=0,
                digests={"0": "d0"},
                reward=float(slot),
            )
            void = make_rollout(group_id=f"g{number}", group_number=number, slot=slot, state=RolloutState.VOID)
            rollouts[number, slot] = void if number == 5 else scored
    batches = {
        0: make_batch(),
        1: make_batch(step=1, groups=(2, 3), staleness={"1": 2}, sealed_at=20.0),
    }
    job = make_job(state=JobState.COMPLETED, committed_steps=2)
    return Rows(job, groups, rollouts, leases, batches, [make_publication()])


def found(rows: Rows, words: str) -> None:
    report = rows.audit()
    assert not report.ok
    assert any(words in finding for finding in report.findings), report.findings


def test_a_sound_job_has_no_findings(rows, make_refusal) -> None:
    """And its rows are counted by state."""
    rows.refusals = [make_refusal(), make_refusal(id="r2")]
    report = rows.audit()
    assert report == Audit(True, (), report.counts)
    assert report.counts["groups"] == 6
    assert report.counts["groups_trained"] == 4
    assert report.counts["rollouts_scored"] == 10
    assert report.counts["batches_committed"] == 2
    assert report.counts["refused_too_fast"] == 2


def test_an_empty_job_has_no_findings(make_job) -> None:
    """Cancelled before anything was issued."""
    report = audit(make_job(state=JobState.CANCELLED), [], [], [], [], [], [])
    assert report.ok
    assert report.counts == {"groups": 0, "rollouts": 0, "batches": 0, "refusals": 0}


def test_a_running_job_may_have_pending_rows(rows, make_batch) -> None:
    """Work under way is no finding while the job runs."""
    rows.job = replace(rows.job, state=JobState.RUNNING, committed_steps=1)
    rows.set_batch(1, state=BatchState.SEALED)
    for number in (2, 3):
        rows.set_group(number, state=GroupState.SEALED)
    rows.set_group(5, state=GroupState.ISSUED)
    rows.set_rollout(5, 0, state=RolloutState.LEASED, lease_id="l5", worker_id="w")
    rows.set_rollout(5, 1, state=RolloutState.OPEN)
    rows.leases["l5"] = replace(rows.leases["l5"], state=LeaseState.LIVE)
    assert rows.audit().findings == ()


def test_a_cancelled_job_rejects_its_sealed_groups(rows) -> None:
    """The batch stays sealed, its groups are rejected with a reason."""
    rows.job = replace(rows.job, state=JobState.CANCELLED, committed_steps=1)
    rows.set_batch(1, state=BatchState.SEALED)
    for number in (2, 3):
        rows.set_group(number, state=GroupState.REJECTED, reason="job_cancelled: by the author")
    assert rows.audit().findings == ()


@pytest.mark.parametrize("state", [GroupState.ISSUED, GroupState.READY, GroupState.SEALED])
def test_pending_groups_of_an_ended_job(rows, state) -> None:
    """Law 2: nothing is pending when a job ends."""
    rows.set_group(4, state=state)
    found(rows, f"group 4 is still {state}, and the job is completed")


@pytest.mark.parametrize("state", [RolloutState.OPEN, RolloutState.LEASED])
def test_pending_slots_of_an_ended_job(rows, state) -> None:
    """Named by group and slot."""
    rows.set_rollout(5, 1, state=state)
    found(rows, f"group 5 slot 1 is still {state}")


def test_live_leases_of_an_ended_job(rows) -> None:
    """Named by id."""
    rows.leases["l3"] = replace(rows.leases["l3"], state=LeaseState.LIVE)
    found(rows, "lease l3 is still live")


def test_a_missing_group(rows) -> None:
    """Issue numbers have no gaps, and rollouts and batches have groups."""
    del rows.groups[2]
    found(rows, "groups 2 were issued and have no row")
    found(rows, "group 2 slot 0 has a rollout and its group has no row")
    found(rows, "group 2 is in a batch and has no row")


def test_many_missing_groups_are_abbreviated(rows, make_group) -> None:
    """Ten by number, the rest counted."""
    rows.groups[30] = make_group(id="g30", number=30, state=GroupState.VOID, size=0)
    found(rows, "groups 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 14 more were issued")


def test_a_group_twice(rows) -> None:
    """Two rows with one number."""
    rows.groups[99] = replace(rows.groups[0], id="other")
    found(rows, "group 0 exists 2 times")


def test_a_slot_settled_twice(rows) -> None:
    """Law 2: each (group, slot) settles at most once."""
    rows.rollouts[98, 0] = rows.rollouts[1, 1]
    found(rows, "group 1 slot 1 settled 2 times")


def test_a_lost_rollout(rows) -> None:
    """A slot without a row."""
    del rows.rollouts[1, 1]
    found(rows, "group 1 has slots [0], it was issued with 0..1")


def test_settled_without_a_lease(rows) -> None:
    """Each settlement names the lease that made it."""
    rows.set_rollout(0, 1, lease_id=None)
    found(rows, "group 0 slot 1 is scored without a lease")


def test_settled_under_a_lease_of_another_slot(rows) -> None:
    """The lease must hold the slot."""
    rows.leases["l0"] = replace(rows.leases["l0"], slots=(0,))
    found(rows, "group 0 slot 1 is scored under lease l0, which does not hold it")


def test_settled_under_a_lease_of_another_group(rows) -> None:
    """And the group."""
    rows.set_rollout(0, 1, lease_id="l1")
    found(rows, "group 0 slot 1 is scored under lease l1, which does not hold it")


def test_settled_by_another_worker(rows) -> None:
    """The lease's worker, nobody else."""
    rows.set_rollout(0, 1, worker_id="thief")
    found(rows, "by worker thief, lease l0 is worker w's")


@pytest.mark.parametrize("changes", [{"digests": {}}, {"oldest_version": None}])
def test_settled_without_a_version(rows, changes) -> None:
    """Missing staleness is an error, never a pass."""
    rows.set_rollout(4, 0, **changes)
    found(rows, "group 4 slot 0 is scored without a policy version")


def test_a_score_without_a_reward_and_the_reverse(rows) -> None:
    """A grader fault is never a score."""
    rows.set_rollout(4, 0, reward=None)
    rows.set_rollout(4, 1, state=RolloutState.GRADER_FAILED)
    found(rows, "group 4 slot 0 is scored and its reward is None")
    found(rows, "group 4 slot 1 is grader_failed and its reward is 1.0")


def test_rejected_without_a_reason(rows) -> None:
    """Every refusal has a reason in words."""
    rows.set_group(4, reason="")
    found(rows, "group 4 is rejected without a reason")


def test_void_with_accepted_rollouts(rows) -> None:
    """Accepted work is in a trained or a rejected group."""
    rows.set_group(4, state=GroupState.VOID)
    found(rows, "group 4 is void and holds accepted rollouts")


def test_void_with_accepted_turns(rows) -> None:
    """A slot between two turns has no outcome, and what was paid for would be lost all the same."""
    rows.set_rollout(5, 0, oldest_version=0, newest_version=0, turn=1)
    found(rows, "group 5 is void and holds accepted rollouts")


def test_trained_without_a_score(rows) -> None:
    """Nothing can have been learnt."""
    for slot in range(2):
        rows.set_rollout(0, slot, state=RolloutState.UNSCORED, reward=None)
    found(rows, "group 0 is trained and none of its rollouts is scored")


def test_leased_in_a_closed_group(rows) -> None:
    """A group that closed has nothing under way."""
    rows.set_rollout(4, 0, state=RolloutState.LEASED)
    found(rows, "group 4 is rejected and a slot of it is still leased")


def test_batches_with_a_gap(rows) -> None:
    """Steps count 0, 1, 2."""
    rows.set_batch(1, step=2)
    found(rows, "batches have steps 0, 2; they must count 0..1")


def test_a_group_trained_twice(rows) -> None:
    """Law 2: nothing trains twice."""
    rows.set_batch(1, groups=(1, 2, 3))
    found(rows, "group 1 is in 2 batches")


def test_a_trained_group_without_a_batch(rows) -> None:
    """Trained means: in a batch of a committed step."""
    rows.set_batch(1, groups=(2,), staleness={"1": 1})
    found(rows, "group 3 is trained and in no batch")


def test_a_group_and_its_batch_disagree(rows) -> None:
    """A committed batch holds trained groups of its own step."""
    rows.set_group(2, state=GroupState.REJECTED, reason="x")
    rows.set_group(3, step=0)
    found(rows, "group 2 is rejected with step 1, the batch of step 1 that holds it is committed")
    found(rows, "group 3 is trained with step 0, the batch of step 1")


def test_committed_steps_are_counted_from_the_rows(rows) -> None:
    """Law 6."""
    rows.job = replace(rows.job, committed_steps=3)
    found(rows, "2 batches are committed, the job counts 3 committed steps")


def test_a_job_completed_too_early(rows, make_config) -> None:
    """Completed means that the planned steps were taken."""
    rows.job = replace(rows.job, config=make_config(steps=5))
    found(rows, "the job completed after 2 steps, 5 were planned")


def test_a_batch_beyond_the_bound(rows, make_config) -> None:
    """Staleness is recomputed from the rollouts, against the bound of that batch."""
    rows.job = replace(rows.job, config=make_config(bound=0))
    found(rows, "group 2 is in the batch of step 1 with staleness 1, the bound is 0")
    rows.set_batch(1, bound=1)
    assert rows.audit().ok


def test_a_batch_from_the_future(rows) -> None:
    """Negative staleness is an error."""
    rows.set_rollout(0, 0, oldest_version=1)
    rows.set_rollout(0, 1, oldest_version=1)
    found(rows, "group 0 in the batch of step 0: version 1 cannot be trained in step 0")


def test_a_batch_without_tokens(rows) -> None:
    """A group without any accepted token has no staleness."""
    for slot in range(2):
        rows.set_rollout(0, slot, oldest_version=None)
    found(rows, "group 0 in the batch of step 0 has no accepted tokens")


def test_a_batch_that_records_other_staleness(rows) -> None:
    """The recorded histogram must be the recomputed one; empty bins do not matter."""
    rows.set_batch(1, staleness={"0": 0, "1": 2})
    assert rows.audit().ok
    rows.set_batch(1, staleness={"0": 2})
    found(rows, "the batch of step 1 records staleness {'0': 2}, its rollouts give {'1': 2}")


def rolled_back(rows: Rows, make_publication, *, anew_at: float | None) -> None:
    rows.publications = [make_publication(state=PublicationState.ROLLED_BACK)]
    if anew_at is not None:
        rows.publications.append(make_publication(digest="d0b", published_at=anew_at))


def test_a_lost_digest_trained_after_it_was_replaced(rows, make_publication) -> None:
    """The batch of step 1 was sealed at 20, the version published anew at 15."""
    rolled_back(rows, make_publication, anew_at=15.0)
    found(rows, "group 2 slot 0 in the batch of step 1 carries version 0 (d0), which was rolled back before the seal")
    assert not any("step 0" in finding for finding in rows.audit().findings)


@pytest.mark.parametrize("anew_at", [25.0, None])
def test_a_lost_digest_sealed_before_it_was_replaced(rows, make_publication, anew_at) -> None:
    """Both batches are replays of what was sealed in time."""
    rolled_back(rows, make_publication, anew_at=anew_at)
    assert rows.audit().ok


def test_a_digest_that_was_never_published(rows) -> None:
    """Rollouts come from published weights only."""
    rows.set_rollout(1, 0, digests={"0": "other"})
    found(rows, "group 1 slot 0 in the batch of step 0 carries version 0 (other), which was never published")


def test_refusals_without_words(rows, make_refusal) -> None:
    """Every refusal has a code and a reason."""
    rows.refusals = [make_refusal(id="r1", reason=""), make_refusal(id="r2", code="")]
    found(rows, "refusal r1 of worker w has no code or no reason")
    found(rows, "refusal r2 of worker w has no code or no reason")


def test_rows_of_another_job(rows) -> None:
    """The caller mixed jobs up."""
    rows.set_group(0, job_id="other")
    found(rows, "group row of job other among the rows of job j")
