"""The planted faults: each a small change to one rule or one write of the product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from coordinator.domain import (
    accounting,
    admission,
    canary,
    grant,
    groups,
    leases,
    paying,
    publication,
    seal,
    staleness,
    turns,
    workers,
)
from coordinator.domain.model import GroupState, PublicationState, RolloutState
from coordinator.service import (
    batches,
    driving,
    enrolment,
    leasing,
    publishing,
    sealing,
    submitting,
    worker_faults,
    worker_judging,
    worker_leases,
)
from coordinator.wire import signing
from p2p.domain import lineage
from pricing import ledger
from simulator.faults.patching import Patch
from worker_node.domain.holding import Holding
from worker_node.domain.work import LeaseInHand

Plant = Callable[[Patch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, and the law that it breaks."""

    name: str
    what: str
    law: str
    plant: Plant


def _always(original: Callable[..., Any], answer: Any) -> Plant:
    return lambda patch: patch.function(original, lambda *_, **__: answer)


async def _nothing(*_: Any, **__: Any) -> None:
    """In the place of a write."""


# Laws 1 and 4: the grant rule, staleness, the seal


def _drop_the_fence(patch: Patch) -> None:
    real = admission.check_lease
    patch.function(real, lambda lease, **named: real(lease, **{**named, "fence": lease.fence if lease else 0}))


def _any_worker(patch: Patch) -> None:
    real = admission.check_lease
    patch.function(real, lambda lease, **named: real(lease, **{**named, "worker_id": lease.worker_id if lease else ""}))


def _bound_plus_one(patch: Patch) -> None:
    real = grant.grantable
    patch.function(real, lambda **named: real(**{**named, "bound": named["bound"] + 1}))


def _plan_plus_one(patch: Patch) -> None:
    real = grant.grantable
    patch.function(real, lambda **named: real(**{**named, "planned_steps": named["planned_steps"] + 1}))


def _count_issued_only(patch: Patch) -> None:
    patch.attribute(leasing, "UNSETTLED", [GroupState.ISSUED])


def _last_step_plus_one(patch: Patch) -> None:
    patch.function(staleness.last_step, lambda version, bound: version + bound + 1)


def _seal_the_stale(patch: Patch) -> None:
    patch.function(seal._split_by_staleness, lambda ready, _step, _bound: (sorted(ready, key=lambda one: one.number), []))


def _seal_by_arrival(patch: Patch) -> None:
    real = seal._split_by_staleness

    def split(ready: Sequence[seal.ReadyGroup], step: int, bound: int) -> Any:
        usable, stale = real(ready, step, bound)
        return usable[::-1], stale

    patch.function(real, split)


def _newest_token(patch: Patch) -> None:
    def ready(group: Any, rollouts: Sequence[Any]) -> seal.ReadyGroup:
        newest = max(row.newest_version for row in rollouts if row.newest_version is not None)
        scores = tuple(row.reward for row in sorted(rollouts, key=lambda one: one.slot) if row.state is RolloutState.SCORED)
        return seal.ReadyGroup(group.number, newest, scores)

    patch.function(sealing._ready, ready)


def _close_early(patch: Patch) -> None:
    real = groups.close

    def close(group: Any, rollouts: Sequence[Any], *, min_group: int | None) -> Any:
        scored = sum(row.state is RolloutState.SCORED for row in rollouts)
        return groups.Closing(GroupState.READY, "two are enough") if scored >= 2 else real(group, rollouts, min_group=min_group)

    patch.function(real, close)


def _reissue_any(patch: Patch) -> None:
    real = leasing._look

    async def look(*args: Any, **named: Any) -> Any:
        plan = await real(*args, **named)
        plan.places = dict.fromkeys(plan.places, 0)
        return plan

    patch.function(real, look)


# Law 2: settlement


def _settle_twice(patch: Patch) -> None:
    patch.function(worker_judging._split, lambda sent, _rows: ((), list(range(len(sent.completions)))))
    patch.function(worker_judging._held, lambda _sent, places, _lease, _rows: (list(places), ()))


def _acknowledge_unsettled(patch: Patch) -> None:
    real = submitting.settle_plain

    async def settle(tx: Any, deps: Any, batch: Any) -> Any:
        return await real(_Deaf(tx), deps, batch)

    patch.function(real, settle)


class _Deaf:
    """A transaction that reads and does not write."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    def __getattr__(self, name: str) -> Any:
        return _nothing if name == "put" else getattr(self._tx, name)


def _rows_before_blob(patch: Patch) -> None:
    async def stored(_self: Any, sent: Any) -> Any:
        return replace(sent, blob="ef" * 32)

    patch.attribute(submitting.SubmitDesk, "_stored", stored)


def _after_the_deadline(patch: Patch) -> None:
    real = admission._check_life
    patch.function(real, lambda lease, steps, now: real(lease, steps, min(now, lease.deadline)))


def _wrong_receipt(patch: Patch) -> None:
    real = signing.receipt_message
    patch.function(real, lambda worker, lease, fence, slots: real(worker, lease, fence, [*slots, 63]))


def _lost_slot(patch: Patch) -> None:
    patch.function(worker_leases.reopen_slots, _nothing)


def _sessions_overlap(patch: Patch) -> None:
    async def none(*_: Any, **__: Any) -> frozenset[str]:
        return frozenset()

    patch.attribute(enrolment, "abandon", none)


def _forget_the_rollback(patch: Patch) -> None:
    async def roll_back(tx: Any, lost: Any, *, now: float) -> None:  # noqa: ARG001
        await tx.put(replace(lost, state=PublicationState.ROLLED_BACK))

    patch.function(publishing.roll_back, roll_back)


def _forget_batches(patch: Patch) -> None:
    real = sealing.commit_step

    async def commit(deps: Any, job_id: str, step: int, **named: Any) -> bool:
        done: bool = await real(deps, job_id, step, **named)
        sealing.batch_path(deps, job_id, step).unlink(missing_ok=True)
        return done

    async def remade(*_: Any) -> None:
        """Nobody looks whether it is there, and makes it again."""

    patch.function(real, commit)
    patch.function(sealing.remade, remade)


def _zero_weight_as_signal(patch: Patch) -> None:
    patch.function(groups.is_zero_variance, lambda _rewards: False)


# Law 3: weights


def _no_canary(patch: Patch) -> None:
    patch.function(canary.judge, lambda *_, **__: (True, "the canary agrees"))


def _grant_unconfirmed(patch: Patch) -> None:
    class All(dict[Any, Any]):
        def __contains__(self, _key: object) -> bool:
            return True

    real = leasing._standing

    async def standing(*args: Any, **named: Any) -> Any:
        who = await real(*args, **named)
        return replace(who, holdings=All(who.holdings))

    patch.function(real, standing)


def _serve_unconfirmed(patch: Patch) -> None:
    patch.attribute(Holding, "served", property(lambda self: self.loaded))


def _send_unconfirmed(patch: Patch) -> None:
    patch.attribute(LeaseInHand, "ready", lambda self, _confirmed: sorted(self.finished))


def _old_manifest(patch: Patch) -> None:
    real = publishing._save
    texts: list[tuple[str, str]] = []

    async def save(tx: Any, job: Any, shot: Any, signed: Any, *more: Any, now: float) -> Any:
        texts.append((signed.text, signed.signature))
        old, signature = texts[max(len(texts) - 2, 0)]
        return await real(tx, job, shot, replace(signed, text=old, signature=signature), *more, now=now)

    patch.function(real, save)


def _retire_what_is_held(patch: Patch) -> None:
    real = publication.retired
    patch.function(real, lambda versions, *, held_or_leased, newest: real(versions, held_or_leased=(), newest=newest))  # noqa: ARG005


def _drop_bases(patch: Patch) -> None:
    patch.attribute(lineage, "retained", lambda order, ways, **_: frozenset(way.id for way in ways if way.digest == order[-1]))


# Law 5: timers


def _forget_wall(patch: Patch) -> None:
    real = leases.ending

    def ending(lease: Any, **named: Any) -> Any:
        return real(lease, **{**named, "now": min(named["now"], lease.deadline)})

    patch.function(real, ending)


def _forget_versions(patch: Patch) -> None:
    real = leases.ending
    patch.function(real, lambda lease, **named: real(lease, **{**named, "committed_steps": 0}))


def _forget_to_publish(patch: Patch) -> None:
    patch.attribute(driving, "publication_rules", SimpleNamespace(is_due=lambda *, published, **_: published is None))


def _blame_the_worker(patch: Patch) -> None:
    def dead(lease: Any, _steps: int) -> admission.Refused:
        return admission.Refused("lease_dead_by_version", f"lease {lease.id} is dead", "worker", False)

    patch.function(admission._dead, dead)


# Law 6 and law 7


def _no_grace(patch: Patch) -> None:
    patch.function(leases.moved_deadline, lambda lease, **_: lease.deadline)


def _spend_unreserved(patch: Patch) -> None:
    patch.attribute(accounting._Books, "reserve", lambda _self, _found, _wanted: "")
    patch.function(paying.can_lease, lambda *_, **__: "")
    patch.function(paying.leasable, lambda *_, **__: None)


def _pay_again(patch: Patch) -> None:
    real = ledger.settle
    patch.attribute(
        ledger,
        "settle",
        lambda balances, claim, *, owed, paid, reason: real(balances, claim, owed=owed, paid=min(paid, 0), reason=reason),
    )


def _one_sided(patch: Patch) -> None:
    real = ledger.reserve

    def reserve(*args: Any, **named: Any) -> Any:
        entry = real(*args, **named)
        return replace(entry, moves=entry.moves[1:]) if isinstance(entry, ledger.Entry) else entry

    patch.attribute(ledger, "reserve", reserve)
    patch.attribute(ledger, "posted", _unchecked)


def _unchecked(balances: Mapping[str, ledger.Balance], entry: ledger.Entry) -> dict[str, ledger.Balance]:
    known = {move.account: balances.get(move.account, ledger.Balance()) for move in entry.moves}
    return {
        move.account: ledger.Balance(known[move.account].number + 1, known[move.account].uusd + move.uusd) for move in entry.moves
    }


def _fund_twice(patch: Patch) -> None:
    real = ledger.fund
    patch.attribute(ledger, "fund", lambda balances, job, *, total, reason: real(balances, job, total=2 * total, reason=reason))


def _pay_refused_twice(patch: Patch) -> None:
    real = worker_faults.record
    count = iter(range(10**9))

    async def record(tx: Any, worker_id: str, lease: Any, lease_id: str, refused: Any, *, now: float) -> None:
        await real(tx, worker_id, lease, lease_id, refused, now=now)
        paid = [work for work in refused if work.paid]
        if paid:
            await real(tx, worker_id, lease, f"{lease_id}/again{next(count)}", paid, now=now)

    patch.function(real, record)


# Slots that an environment continues


def _record_cut(patch: Patch) -> None:
    patch.function(turns.record, lambda some: tuple(token for turn in some for token in turn.token_ids[: turn.length]))


def _placed_as_sampled(patch: Patch) -> None:
    real = batches._turn

    def turn(arrays: Any, row: Any) -> Any:
        made = real(arrays, row)
        return replace(made, sampled=made.sampled | True)

    patch.function(real, turn)


def _newest_turn_only(patch: Patch) -> None:
    real = submitting._accepted
    patch.function(real, lambda row, *args, **named: real(replace(row, oldest_version=None), *args, **named))


def _forget_turns(patch: Patch) -> None:
    real = submitting.read_rows

    async def read_rows(*args: Any) -> Any:
        return [replace(rows, turns=()) for rows in await real(*args)]

    patch.function(real, read_rows)


MUTANTS: tuple[Mutant, ...] = (
    Mutant("fence dropped", "a submission's fence is not compared", "2", _drop_the_fence),
    Mutant("lease of another", "a submission's worker is not compared", "2", _any_worker),
    Mutant("bound + 1", "the grant rule allows one step more", "1", _bound_plus_one),
    Mutant("plan + 1", "the grant rule issues for one step more than is planned", "1", _plan_plus_one),
    Mutant("count issued", "the grant rule counts issued groups, not unsettled ones", "1", _count_issued_only),
    Mutant("last step + 1", "x + S + 1 in the place of x + S", "1", _last_step_plus_one),
    Mutant("seal the stale", "the seal does not look at staleness", "1", _seal_the_stale),
    Mutant("seal by arrival", "the newest ready groups are sealed first", "1", _seal_by_arrival),
    Mutant("newest token", "staleness of the newest token, not of the oldest", "1", _newest_token),
    Mutant("close early", "a group closes with two scores", "2", _close_early),
    Mutant("reissue any", "missing slots are leased on versions that come too late", "1", _reissue_any),
    Mutant("settle twice", "a slot that is settled is settled again", "2", _settle_twice),
    Mutant("early acknowledgement", "a submission is acknowledged and its rows are not written", "2", _acknowledge_unsettled),
    Mutant("rows before blob", "rows are written and the tokens are not stored", "2", _rows_before_blob),
    Mutant("after the deadline", "work is accepted after its lease's wall deadline", "2", _after_the_deadline),
    Mutant("wrong receipt", "a receipt names a slot that was not settled", "2", _wrong_receipt),
    Mutant("lost slot", "slots of ended leases are not opened again", "5", _lost_slot),
    Mutant("sessions overlap", "leases of the old session live on after a join", "2", _sessions_overlap),
    Mutant("rollback ignored", "what a lost digest made goes on", "2", _forget_the_rollback),
    Mutant("batches forgotten", "a batch file goes with its step, not with a checkpoint", "2", _forget_batches),
    Mutant("dull as signal", "groups without variance count as signal", "10", _zero_weight_as_signal),
    Mutant("no canary", "whatever a worker confirms is accepted", "3", _no_canary),
    Mutant("unconfirmed granted", "leases on versions that the worker did not confirm", "3", _grant_unconfirmed),
    Mutant("unconfirmed served", "the worker asks for work with what is loaded", "3", _serve_unconfirmed),
    Mutant("unconfirmed sent", "the worker sends tokens of versions that are not confirmed", "3", _send_unconfirmed),
    Mutant("old manifest", "a version is published with the manifest before it", "3", _old_manifest),
    Mutant("held retired", "versions that workers hold are retired", "retention", _retire_what_is_held),
    Mutant("bases dropped", "edges that workers fetch are dropped", "retention", _drop_bases),
    Mutant("wall forgotten", "leases do not end at their wall deadline", "5", _forget_wall),
    Mutant("versions forgotten", "leases do not end with the last step of their version", "5", _forget_versions),
    Mutant("loss forgotten", "silent workers are never lost", "5", _always(workers.is_lost, False)),
    Mutant("quarantine forgotten", "a quarantine never ends", "5", _always(workers.is_served, False)),
    Mutant("death forgotten", "groups that no step can train stay issued", "5", _always(groups.died, None)),
    Mutant("publication forgotten", "only the first version is published", "5", _forget_to_publish),
    Mutant("honest blamed", "work that died by version is the worker's fault and not paid", "5", _blame_the_worker),
    Mutant("no grace", "deadlines do not move after a restart", "6", _no_grace),
    Mutant("unreserved", "work is leased without money reserved for it", "7", _spend_unreserved),
    Mutant("paid again", "what was posted is posted again", "7", _pay_again),
    Mutant("one side", "a reservation does not leave the job's funds", "7", _one_sided),
    Mutant("funded twice", "a job is given twice its budget", "7", _fund_twice),
    Mutant("refusal paid twice", "a refused slot is paid each time it is sent", "7", _pay_refused_twice),
    Mutant("record cut", "a turn goes on without what the environment placed", "2", _record_cut),
    Mutant("placed as sampled", "tokens that the environment placed are trained on", "1", _placed_as_sampled),
    Mutant("newest turn only", "the age of a slot is that of its newest turn", "1", _newest_turn_only),
    Mutant("turns forgotten", "turns that are over count nothing when their lease is closed", "7", _forget_turns),
)
BY_NAME: Mapping[str, Mutant] = {mutant.name: mutant for mutant in MUTANTS}
