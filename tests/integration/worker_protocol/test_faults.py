"""Faults of other systems, tried on a real coordinator and its store; the numbers are those of docs/faults.md."""

from __future__ import annotations

from typing import Any

from coordinator.domain.model import Group, Rollout, RolloutState
from coordinator.wire.messages import Account, Heartbeat

JOB = "job-1"
GROUP = 4
ALLOWED = 12  # groups that version 0 may serve: (S + 1) * B with S = 2 and B = 4


async def test_fault_01_what_is_out_counts_after_a_restart(coordinator: Any, stranger: Any) -> None:
    """Ten groups before the restart leave two after it. A counter that began at 0 again would let twelve more in."""
    worker = await stranger().ready()
    for _ in range(ALLOWED - 2):
        await worker.submit(await worker.lease())
    await coordinator.restart()
    for _ in range(2):
        await worker.submit(await worker.lease())
    refused = await worker.ask()
    assert refused.leases == ()
    assert "12 unsettled groups fill them" in refused.reason
    assert len(await coordinator.rows(Group, job_id=JOB)) == ALLOWED


async def test_fault_13_no_work_before_the_proof_and_work_again_after_a_recovery(coordinator: Any, stranger: Any) -> None:
    """Joined is not ready: the canary of the very version is needed. A worker that was lost and came back works as before."""
    worker = stranger()
    await worker.join()
    assert (await worker.ask()).leases == ()
    assert not (await worker.confirm(0, canary_logprobs=(-1.0,) * 23)).accepted
    assert (await worker.ask()).leases == ()
    assert (await worker.confirm(0)).accepted
    await worker.lease()
    coordinator.clock.added += 40
    await coordinator.sweep()
    assert (await worker.send("heartbeat", Heartbeat(session_epoch=worker.epoch))).problem.code == "worker_gone"
    await worker.ready()
    assert (await worker.submit(await worker.lease())).accepted


async def test_fault_18_prompts_that_were_out_are_issued_again_after_a_restart(coordinator: Any, stranger: Any) -> None:
    """Two groups are out, one slot is done. After the restart, with the leases dead, exactly the rest of these two is leased before
    any new prompt, and no number is skipped.
    """
    lost = await stranger("lost").ready()
    first, second = await lost.lease(), await lost.lease()
    await lost.submit(first, (0,))
    await coordinator.restart()
    other = await stranger("other").ready()
    coordinator.clock.added += 500
    coordinator.deps.presence.touch(other.id, epoch=other.epoch, at=coordinator.clock.now())
    await coordinator.sweep()
    again = [lease for _ in range(3) for lease in (await other.ask(free=GROUP)).leases]
    for lease in again:
        await other.submit(lease)
    slots = [(lease.group_id, slot) for lease in again for slot in lease.slots]
    rest = [*((first.group_id, slot) for slot in (1, 2, 3)), *((second.group_id, slot) for slot in range(GROUP))]
    assert slots[: len(rest)] == rest
    assert [group.number for group in await coordinator.rows(Group, job_id=JOB, order_by="number")] == [0, 1, 2]
    settled = await coordinator.rows(Rollout, job_id=JOB, group_number=[0, 1])
    assert [rollout.state for rollout in settled] == [RolloutState.ACCEPTED] * (2 * GROUP)


async def test_fault_25_an_owner_sees_what_was_accepted_and_why_not(coordinator: Any, stranger: Any) -> None:
    """Counts, and each refusal in words with whose fault it was."""
    worker = await stranger().ready()
    lease = await worker.lease()
    await worker.submit(lease, (0, 1))
    await worker.submit(lease, (2,), fence=lease.fence - 1)
    account = (await worker.call("account", b"{}")).read(Account)
    assert (account.accepted_rollouts, account.accepted_tokens, account.refused_rollouts) == (2, 8, 1)
    assert [(one.code, one.blame) for one in account.refusals] == [("old_fence", "worker")]
    assert len(account.refusals[0].reason) > 10
