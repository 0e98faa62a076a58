"""Grants leases: open slots of issued groups first, then new groups by the grant rule (DESIGN 4.1, 4.2).

`grant_round` answers many waiting requests in one transaction; everything it decides on is read from rows inside it. The
queue in front of it is `worker_desk.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.domain import leases as lease_rules
from coordinator.domain.grant import Grant, grantable
from coordinator.domain.model import (
    Group,
    GroupState,
    Holding,
    Invite,
    Job,
    JobState,
    Lease,
    LeaseState,
    Meter,
    Publication,
    PublicationState,
    QuoteRow,
    Rollout,
    RolloutState,
    Turn,
    Worker,
    WorkerState,
)
from coordinator.domain.paying import can_lease, leased
from coordinator.domain.seeds import slot_seed
from coordinator.domain.staleness import last_step
from coordinator.domain.states import ROLLOUT, TERMINAL, move
from coordinator.domain.turns import KEPT_S, STICKY_S, awaited_worker, is_played, latest_step, may_take, record, turn_tokens
from coordinator.domain.workers import standing
from coordinator.service import accounting
from coordinator.service.deps import Deps, LiveJob
from coordinator.service.ports import Prompt, Reader, Tx
from coordinator.service.worker_places import may_serve
from coordinator.wire import messages as wire

UNSETTLED = [GroupState.ISSUED, GroupState.READY, GroupState.SEALED]
OPEN_AT_ONCE = 512  # open slots looked at in one round
FINAL_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One worker's request for work."""

    worker_id: str
    session_epoch: int
    request: wire.LeaseRequest
    judged: bool = False  # this request was looked at before and may wait


@dataclass(frozen=True, slots=True)
class Outcome:
    """Work, or why not. A final answer is given at once; otherwise the request may wait for a change."""

    leases: tuple[wire.Lease, ...] = ()
    reason: str = ""
    final: bool = False
    retry_after_s: float = 0.0
    newest: int = -1  # the job's newest published version when this was decided; -1: none


def _final(reason: str) -> Outcome:
    return Outcome(reason=reason, final=True, retry_after_s=FINAL_RETRY_S)


@dataclass(slots=True)
class _Plan:
    """Rows to write at the end of a round, and what is left to give."""

    job: Job
    live: LiveJob
    now: float
    next_number: int
    unsettled: int
    open_slots: dict[str, list[Rollout]]  # group id -> open rollouts, lowest group number first
    groups: dict[str, Group]
    places: dict[str, int]  # group id -> unsettled groups before it
    alone: bool = False  # no other worker could take what this one gave up
    slots: dict[str, int] = field(default_factory=dict)  # worker id -> slots under lease
    meters: dict[str, Meter] = field(default_factory=dict)  # worker id -> what pays its work
    new_leases: list[Lease] = field(default_factory=list)
    touched: dict[tuple[str, int], Rollout] = field(default_factory=dict)

    def grant(self, version: int) -> Grant:
        """The grant rule for a worker at `version`, with what this round gave already."""
        config = self.job.config
        return grantable(
            committed_steps=self.job.committed_steps,
            unsettled=self.unsettled,
            groups_per_step=config.algorithm.groups_per_step,
            bound=config.staleness.max,
            held_version=version,
            planned_steps=config.budget.steps,
        )


@dataclass(frozen=True, slots=True)
class _Standing:
    """The rows of the asking workers."""

    workers: dict[str, Worker]
    slots: dict[str, int]  # worker id -> leased slots that are not settled yet
    kept: dict[str, int]  # worker id -> slots whose next turn may come in a moment: the environment looks at the last one
    holdings: dict[tuple[str, int, str], Holding]
    published: frozenset[tuple[int, str]]
    invited_to: dict[str, tuple[str, ...]]
    quoted: dict[tuple[str, int], QuoteRow]  # worker, session: those that are active for the job


async def grant_round(tx: Tx, deps: Deps, job_id: str, asks: Sequence[Ask]) -> dict[str, Outcome]:
    """Answer requests in order, by worker id; all reads and writes are in this one transaction."""
    outcomes = await _outcomes(tx, deps, job_id, asks)
    newest = await tx.highest(Publication, "version", job_id=job_id, state=PublicationState.PUBLISHED)
    return {worker: replace(outcome, newest=-1 if newest is None else newest) for worker, outcome in outcomes.items()}


async def _outcomes(tx: Tx, deps: Deps, job_id: str, asks: Sequence[Ask]) -> dict[str, Outcome]:
    job = await tx.get(Job, job_id)
    if job is None:
        return {ask.worker_id: _final(f"job {job_id} does not exist") for ask in asks}
    live = deps.live.get(job_id)
    if job.state is not JobState.RUNNING or live is None:
        return {ask.worker_id: _not_running(job) for ask in asks}
    plan = await _look(tx, job, live, now=deps.clock.now())
    if not plan.open_slots and all(ask.judged for ask in asks):
        rule = plan.grant(max(ask.request.version for ask in asks))
        if not rule.groups:
            return {ask.worker_id: Outcome(reason=rule.reason) for ask in asks}
    who = await _standing(tx, job, asks, now=plan.now)
    plan.alone = await _is_alone(tx, job, who, asks) if plan.open_slots else False
    plan.slots = who.slots
    plan.meters = await accounting.meters_of(tx, deps, job, who.workers, who.quoted)
    given = {ask.worker_id: _answer(deps, plan, who, ask) for ask in asks}
    await _write(tx, plan)
    records = await _records(tx, plan)
    return {
        worker_id: replace(outcome, leases=tuple(_on_wire(plan, lease, records) for lease in leases)) if leases else outcome
        for worker_id, (outcome, leases) in given.items()
    }


def _not_running(job: Job) -> Outcome:
    words = f"job {job.name} is {job.state.value}" + (f": {job.reason}" if job.reason else "")
    if job.state in TERMINAL[JobState]:
        return _final(words)
    return Outcome(
        reason=words if job.state is not JobState.RUNNING else f"job {job.name} is starting", retry_after_s=FINAL_RETRY_S
    )


async def _look(reader: Reader, job: Job, live: LiveJob, *, now: float) -> _Plan:
    """Counts and open slots, all from rows."""
    open_rollouts = await reader.select(
        Rollout, job_id=job.id, state=RolloutState.OPEN, order_by="group_number", limit=OPEN_AT_ONCE
    )
    by_group: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in open_rollouts:
        by_group[rollout.group_id].append(rollout)
    issued = await reader.select(Group, id=list(by_group), state=GroupState.ISSUED) if by_group else []
    places = {}
    for group in issued:
        places[group.id] = await reader.count(Group, job_id=job.id, state=UNSETTLED, number__lt=group.number)
    highest = await reader.highest(Group, "number", job_id=job.id)
    return _Plan(
        job=job,
        live=live,
        now=now,
        next_number=0 if highest is None else highest + 1,
        unsettled=await reader.count(Group, job_id=job.id, state=UNSETTLED),
        open_slots={id_: rollouts for id_, rollouts in by_group.items() if id_ in places},
        groups={group.id: group for group in issued},
        places=places,
    )


async def workers_awaited(reader: Reader, job_id: str, *, now: float) -> frozenset[str]:
    """Workers for which open turns wait now, as their caches hold what came before."""
    job = await reader.get(Job, job_id)
    if job is None or not is_played(job.config):
        return frozenset()
    waiting = await reader.select(
        Rollout,
        job_id=job_id,
        state=RolloutState.OPEN,
        continued_at__gt=now - STICKY_S,
        order_by="group_number",
        limit=OPEN_AT_ONCE,
    )
    return frozenset(filter(None, map(awaited_worker, waiting)))


async def _standing(reader: Reader, job: Job, asks: Sequence[Ask], *, now: float) -> _Standing:
    ids = [ask.worker_id for ask in asks]
    workers = {worker.id: worker for worker in await reader.select(Worker, id=ids)}
    slots = {worker: await reader.count(Rollout, worker_id=worker, state=RolloutState.LEASED) for worker in ids}
    looked_at: dict[str, object] = {"job_id": job.id, "state": RolloutState.ACCEPTED, "accepted_at__gt": now - KEPT_S}
    kept = {worker: await reader.count(Rollout, worker_id=worker, **looked_at) for worker in ids} if is_played(job.config) else {}
    versions = sorted({ask.request.version for ask in asks})
    holdings = await reader.select(Holding, worker_id=ids, job_id=job.id, version=versions)
    published = set()
    for version, digest in {(ask.request.version, ask.request.digest) for ask in asks}:
        state = PublicationState.PUBLISHED
        if await reader.count(Publication, job_id=job.id, version=version, digest=digest, state=state):
            published.add((version, digest))
    invites = await reader.select(Invite, id=sorted({worker.invite_id for worker in workers.values()}))
    quotes = await reader.select(QuoteRow, job_id=job.id, worker_id=ids, ended_at=None)
    return _Standing(
        workers=workers,
        slots=slots,
        kept=kept,
        holdings={(holding.worker_id, holding.version, holding.digest): holding for holding in holdings},
        published=frozenset(published),
        invited_to={invite.id: invite.jobs for invite in invites},
        quoted={(quote.worker_id, quote.session_epoch): quote for quote in quotes},
    )


async def _is_alone(reader: Reader, job: Job, who: _Standing, asks: Sequence[Ask]) -> bool:
    """Whether at most one worker is active for the job that holds a version of it that can still serve."""
    oldest = max(job.committed_steps - job.config.staleness.max, 0)
    holders = {holding.worker_id for holding in await reader.select(Holding, job_id=job.id, version__ge=oldest)}
    others = holders - {ask.worker_id for ask in asks}
    if others:
        others &= {quote.worker_id for quote in await reader.select(QuoteRow, job_id=job.id, ended_at=None)}
    if others:
        others = {worker.id for worker in await reader.select(Worker, id=sorted(others), state=WorkerState.ACTIVE)}
    return len(others) + len({worker for worker, _ in who.quoted}) <= 1


def _answer(deps: Deps, plan: _Plan, who: _Standing, ask: Ask) -> tuple[Outcome, list[Lease]]:
    """One request: refused in words, left waiting, or given these leases."""
    worker = who.workers.get(ask.worker_id)
    if worker is None or worker.session_epoch != ask.session_epoch:
        return _final("a newer session with this key is active"), []
    wrong = _refusal(plan.job, who, worker, ask.request)
    if wrong:
        return _final(wrong), []
    if (worker.id, worker.session_epoch) not in who.quoted:
        return Outcome(reason=deps.market.why_not(plan.job.id, worker.id)), []  # waits: activation wakes it
    unpaid = _unpaid(plan, worker, 1)
    if unpaid:
        return Outcome(reason=unpaid), []
    held = plan.slots.get(worker.id, 0)
    free = min(ask.request.free_slots, worker.max_slots - held)
    if free <= 0:
        return _final(f"you hold leases on {held} slots and announced max_slots {worker.max_slots}: finish some first"), []
    free = min(free, plan.meters[worker.id].leasable or free)
    granted = []
    if is_played(plan.job.config):  # turns come first, and find a free slot where their cache is
        granted = _reissue(deps, plan, worker, ask, free, lambda rollout: awaited_worker(rollout) == worker.id)
        free -= sum(len(lease.slots) for lease in granted) + who.kept.get(worker.id, 0)
        if free <= 0:
            return Outcome(reason="" if granted else "the environment looks at your newest turns: the next ones are yours"), granted
    others = _reissue(deps, plan, worker, ask, free, lambda rollout: may_take(rollout, worker.id, now=plan.now, alone=plan.alone))
    free -= sum(len(lease.slots) for lease in others)
    granted += others
    reason = ""
    size = plan.job.config.algorithm.group_size
    unpaid = "" if free >= size else _unpaid(plan, worker, size)
    if free >= size or not (granted or unpaid):  # one group beyond the free slots only for the idle
        more, reason = _issue(deps, plan, worker, ask, free)
        granted += more
    if not granted:
        return Outcome(reason=reason or unpaid or "every slot is leased: waiting for the next groups"), []
    return Outcome(), granted


def _unpaid(plan: _Plan, worker: Worker, slots: int) -> str:
    """Why so many slots cannot be leased to the worker for want of reserved money; empty when they can."""
    meter = plan.meters.get(worker.id)
    if meter is None:
        return "the job's money does not suffice for more work of yours now"
    return can_lease(meter, slots=slots, now=plan.now)


def _refusal(job: Job, who: _Standing, worker: Worker, request: wire.LeaseRequest) -> str:
    """Why this worker gets nothing however long it waits; empty when it may get work."""
    if worker.state not in (WorkerState.STANDBY, WorkerState.ACTIVE):
        return standing(worker, holds_newest_usable=False)[1]
    allowed, words = may_serve(job, worker, who.invited_to.get(worker.invite_id, ()))
    if not allowed:
        return words
    if (request.version, request.digest) not in who.published:
        return f"version {request.version} with digest {request.digest[:12]} is not published: fetch the version that your next heartbeat names"
    if (worker.id, request.version, request.digest) not in who.holdings:
        return f"you have not confirmed version {request.version}: send its canary to confirm first"
    usable = job.committed_steps <= last_step(request.version, job.config.staleness.max)
    works, words = standing(worker, holds_newest_usable=usable)
    return "" if works else words


def _reissue(deps: Deps, plan: _Plan, worker: Worker, ask: Ask, free: int, is_for: Callable[[Rollout], bool]) -> list[Lease]:
    """Leases on open slots of issued groups that are for this worker, and that its version can still serve, lowest group first."""
    granted: list[Lease] = []
    config = plan.job.config
    for group_id, rollouts in list(plan.open_slots.items()):
        group = plan.groups[group_id]
        latest = plan.job.committed_steps + plan.places[group_id] // config.algorithm.groups_per_step
        if free <= 0 or latest > last_step(ask.request.version, config.staleness.max) or _is_dead(plan.job, group):
            continue
        mine = [
            rollout
            for rollout in rollouts
            if is_for(rollout) and latest <= latest_step(ask.request.version, config.staleness.max, oldest=rollout.oldest_version)
        ][:free]
        if not mine:
            continue
        granted += [_lease(deps, plan, worker, ask, group, some) for some in _alike(mine)]
        free -= len(mine)
        taken = {rollout.slot for rollout in mine}
        left = [rollout for rollout in rollouts if rollout.slot not in taken]
        if left:
            plan.open_slots[group_id] = left
        else:
            del plan.open_slots[group_id]
    return granted


def _alike(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts by what a lease can hold: those at their first turn share the prompt, each later turn has a prompt of its own."""
    first = [rollout for rollout in rollouts if rollout.turn == 0]
    return ([first] if first else []) + [[rollout] for rollout in rollouts if rollout.turn > 0]


def _is_dead(job: Job, group: Group) -> bool:
    return group.oldest_version is not None and job.committed_steps > last_step(group.oldest_version, job.config.staleness.max)


def _issue(deps: Deps, plan: _Plan, worker: Worker, ask: Ask, free: int) -> tuple[list[Lease], str]:
    """Leases on new groups, as many as the grant rule and the worker's free slots allow; why not more."""
    rule = plan.grant(ask.request.version)
    size = plan.job.config.algorithm.group_size
    wanted = lease_rules.groups_for(free, group_size=size, grantable=rule.groups)
    granted: list[Lease] = []
    for _ in range(wanted):
        prompt = plan.live.prompts.get(plan.next_number)
        if prompt is None:
            return granted, f"the prompt of group {plan.next_number} is being rendered"
        group, rollouts = _new_group(plan, prompt)
        # Beyond its free slots later turns would wait behind first ones, and lose their cache to another worker.
        room = free if is_played(plan.job.config) else size
        mine = rollouts[: min(_finishable(deps, plan, worker, size), room)]
        granted.append(_lease(deps, plan, worker, ask, group, mine))
        if len(mine) < size:
            plan.open_slots[group.id] = rollouts[len(mine) :]
            break
    return granted, rule.reason


def _finishable(deps: Deps, plan: _Plan, worker: Worker, size: int) -> int:
    """Slots of one group that the worker can finish within the longest lease; a slow worker gets a part of the group."""
    heard = deps.presence.get(worker.id)
    rate = (heard.tokens_per_s if heard is not None else None) or worker.tokens_per_s
    if not rate:
        return size
    tokens = turn_tokens(plan.job.config, 0) or plan.job.config.sampling.max_new_tokens
    needed_s = lease_rules.MARGIN * tokens / max(rate, deps.settings.slowest_tokens_per_s)
    return max(1, min(size, int(deps.settings.lease_max_s / needed_s) - plan.slots.get(worker.id, 0)))


def _new_group(plan: _Plan, prompt: Prompt) -> tuple[Group, list[Rollout]]:
    """Issue the next group: its row and one open rollout a slot."""
    job, number = plan.job, plan.next_number
    size = job.config.algorithm.group_size
    group = Group(
        id=f"{job.id}/g{number}",
        job_id=job.id,
        number=number,
        prompt_index=prompt.index,
        prompt_ids=prompt.token_ids,
        size=size,
        state=GroupState.ISSUED,
        issued_at=plan.now,
        prompt_text=prompt.text,
    )
    rollouts = [Rollout(group.id, slot, job.id, number, RolloutState.OPEN) for slot in range(size)]
    plan.groups[group.id] = group
    plan.places[group.id] = plan.unsettled
    plan.touched.update(((group.id, rollout.slot), rollout) for rollout in rollouts)
    plan.next_number += 1
    plan.unsettled += 1
    return group, rollouts


def _lease(deps: Deps, plan: _Plan, worker: Worker, ask: Ask, group: Group, rollouts: Sequence[Rollout]) -> Lease:
    """A lease on these open slots, which have the same prompt; its fence is one above the group's last."""
    held = plan.slots.get(worker.id, 0) + len(rollouts)
    plan.slots[worker.id] = held
    heard = deps.presence.get(worker.id)
    settings, config = deps.settings, plan.job.config
    limits = lease_rules.LeaseLimits(settings.lease_min_s, settings.lease_max_s, settings.slowest_tokens_per_s)
    most = turn_tokens(config, rollouts[0].preceding)
    oldest = rollouts[0].oldest_version
    deadline = lease_rules.wall_deadline(
        plan.now,
        slots=max(held, worker.max_slots),  # its rate is that of all slots: one alone is no quicker
        max_new_tokens=most or config.sampling.max_new_tokens,
        tokens_per_s=(heard.tokens_per_s if heard is not None else None) or worker.tokens_per_s,
        limits=limits,
    )
    group = replace(plan.groups[group.id], fence=plan.groups[group.id].fence + 1)
    plan.groups[group.id] = group
    lease = Lease(
        id=f"{group.id}/f{group.fence}",
        job_id=plan.job.id,
        group_id=group.id,
        worker_id=worker.id,
        session_epoch=worker.session_epoch,
        slots=tuple(rollout.slot for rollout in rollouts),
        version=ask.request.version,
        digest=ask.request.digest,
        last_step=latest_step(ask.request.version, config.staleness.max, oldest=oldest),
        deadline=deadline,
        fence=group.fence,
        state=LeaseState.LIVE,
        issued_at=plan.now,
        quote_id=plan.meters[worker.id].quote_id,
        max_new_tokens=most,
    )
    plan.new_leases.append(lease)
    plan.meters[worker.id] = leased(plan.meters[worker.id], len(rollouts))
    for rollout in rollouts:
        state = move(ROLLOUT, rollout.state, "leased")
        plan.touched[group.id, rollout.slot] = replace(rollout, state=state, lease_id=lease.id, worker_id=worker.id)
    return lease


def _on_wire(plan: _Plan, lease: Lease, records: Mapping[tuple[str, int], tuple[int, tuple[int, ...]]]) -> wire.Lease:
    group, config = plan.groups[lease.group_id], plan.job.config
    turn, before = records.get((lease.group_id, lease.slots[0]), (0, ()))
    return wire.Lease(
        lease_id=lease.id,
        job_id=lease.job_id,
        group_id=lease.group_id,
        fence=lease.fence,
        prompt_ids=(*group.prompt_ids, *before),
        slots=lease.slots,
        seeds=tuple(slot_seed(config.seed, group.number, slot, turn) for slot in lease.slots),
        sampling=wire.SamplingParameters(
            max_new_tokens=lease.max_new_tokens or config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            stop_token_ids=plan.job.stop_token_ids,
        ),
        version=lease.version,
        digest=lease.digest,
        last_step=lease.last_step,
        deadline=lease.deadline,
        on_update=config.staleness.on_update,
    )


async def _records(reader: Reader, plan: _Plan) -> dict[tuple[str, int], tuple[int, tuple[int, ...]]]:
    """For each slot that was leased for a later turn: which turn, and what stands between the prompt and it."""
    slots = {key: rollout for key, rollout in plan.touched.items() if rollout.turn > 0}
    if not slots:
        return {}
    turns: dict[tuple[str, int], list[Turn]] = defaultdict(list)
    group_ids, numbers = (sorted(set(part)) for part in zip(*slots, strict=True))
    for turn in await reader.select(Turn, group_id=group_ids, slot=numbers):  # rows are long: only these slots'
        turns[turn.group_id, turn.slot].append(turn)
    return {key: (rollout.turn, record(sorted(turns[key], key=lambda one: one.turn))) for key, rollout in slots.items()}


async def _write(tx: Tx, plan: _Plan) -> None:
    if not plan.new_leases:
        return
    leased = {lease.group_id for lease in plan.new_leases}
    await tx.put(*(plan.groups[group_id] for group_id in leased))
    await tx.put(*plan.touched.values())
    await tx.put(*plan.new_leases)
    paid_by = {lease.worker_id for lease in plan.new_leases}
    await tx.put(*(meter for worker_id, meter in plan.meters.items() if worker_id in paid_by and meter.leasable is not None))
