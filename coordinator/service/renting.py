"""Renting: makes the provider's list agree with what the market wants. Level-triggered; one loop a provider.

A turn: look at the list; in one transaction say what the rows make of it, decide (`pricing.rental_plan`) and write what is intended;
then carry out the orders, each written before its call. Waits for (1) `look_s`, (2) another wish (RENTALS). A crash anywhere leaves rows
that the next turn reads: a create that was written is looked for before it is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random, SystemRandom

import structlog

from coordinator.domain.model import Job, JobState, Worker
from coordinator.domain.retry import delay_s
from coordinator.domain.states import TERMINAL
from coordinator.service import invites
from coordinator.service.deps import Deps
from coordinator.service.ports import Tx
from coordinator.service.recording import record_event
from coordinator.service.renting_books import budget_left, post_rentals
from coordinator.service.renting_ports import RENTALS, Look, Provider, RentalDesk, RentingSettings
from coordinator.wire.rest import NewInvite
from coordinator.wire.signing import public_hex
from pricing.feeds.contract import Failed, Handle, RentalOffer, Spec, Trouble
from pricing.feeds.start import environment, start_script
from pricing.provider_clock import ProviderClock
from pricing.rental_plan import Facts, Purse, Wanted, affordable, decide, decide_blind, match
from pricing.rentals import OPEN, Create, Destroy, Rental, RentalState, absorb, answered, called, order, requested, stray

log = structlog.get_logger()
QUIET_FIRST_S, QUIET_MOST_S = 5.0, 120.0
NO_CREATE_S, NO_CREATE_MOST_S = 300.0, 3600.0  # after the account was empty or the key refused
INVITE_S = 3600.0
PAUSED_S = 300.0


def deployment_prefix(public_key: str) -> str:
    """With what each label of this coordinator starts: nobody else's machines have it."""
    return f"echo2-{public_key[:16]}-"


def _needs_nothing(job: Job, now: float) -> bool:
    """Whether machines would wait for the job for nothing: it has ended, or is paused for more than a moment."""
    return job.state in TERMINAL[JobState] or (job.state is JobState.PAUSED and now - job.state_since > PAUSED_S)


@dataclass(slots=True)
class _Mood:
    """How the provider takes our calls; forgotten with the process."""

    quiet_until: float = 0.0
    no_create_until: float = 0.0
    failures: int = 0
    searched_at: float | None = None
    looked_at: float = 0.0  # the provider's clock at the last look
    clock: ProviderClock = field(default_factory=ProviderClock)


def _waits(until: float, now: float, most_s: float) -> bool:
    """Whether `until` lies ahead; farther than it was ever set, our clock has stepped back, and there is nothing to wait for."""
    return 0.0 < until - now <= most_s


class Renter:
    """The loop of one provider."""

    def __init__(
        self,
        deps: Deps,
        provider: Provider,
        settings: RentingSettings,
        desk: RentalDesk,
        *,
        rng: Random | None = None,
    ) -> None:
        """`rng` draws request keys and jitter; left out: the system's."""
        self._deps = deps
        self._provider = provider
        self._settings = settings
        self._desk = desk
        self._rng = SystemRandom() if rng is None else rng
        self._mood = _Mood()
        self._found: tuple[RentalOffer, ...] = ()
        self._prefix = deployment_prefix(public_hex(deps.key))

    async def run(self) -> None:
        """Turn for ever. A turn that fails is logged and repeated: the rows still say what is intended."""
        with self._deps.wake.watch(RENTALS) as watch:
            while True:
                try:
                    await self.turn()
                    await self.search()
                except ConnectionError:
                    raise  # the store has ended
                except Exception:
                    log.exception("renting_failed", provider=self._provider.name)
                await watch.wait(self._settings.look_s)

    async def search(self) -> None:
        """Refresh the offers that the market reads."""
        now, mood = self._deps.clock.now(), self._mood
        if _waits(mood.quiet_until, now, QUIET_MOST_S):
            return
        if mood.searched_at is not None and 0.0 <= now - mood.searched_at < self._settings.search_s:
            return
        mood.searched_at = now
        found = await self._provider.search(self._settings.need, now=now)
        if isinstance(found, Failed):
            self._take_failure("search", found)
            return
        for words in found.skipped[:5]:
            log.warning("offer_skipped", provider=self._provider.name, because=words)
        self._found = self._desk.offers[self._provider.name] = found.offers

    async def turn(self) -> None:
        """One look, one decision, its orders: those that are not carried out in time are decided again by the next turn."""
        began = self._deps.clock.now()
        until = began + self._settings.turn_s
        look = await self._look(until=began + self._settings.turn_s / 2)
        self._deps.reach("renting.looked")
        orders = await self._deps.store.write(lambda tx: self._decide(tx, look))
        self._deps.reach("renting.decided")
        for one in orders:
            if self._deps.clock.now() >= until:
                break
            if isinstance(one, Destroy):
                await self._destroy(one)
            elif look is not None and not look.partial and self._may_create():
                await self._create(one)

    def _may_create(self) -> bool:
        return not _waits(self._mood.no_create_until, self._deps.clock.now(), NO_CREATE_MOST_S)

    async def _look(self, *, until: float) -> Look | None:
        """The list, and each known machine that it does not show asked for by itself. None: it could not be seen."""
        if _waits(self._mood.quiet_until, self._deps.clock.now(), QUIET_MOST_S):
            return None
        look = await self._provider.look(self._prefix)
        if isinstance(look, Failed):
            self._take_failure("list", look)
            return None
        self._mood.failures = 0
        self._mood.looked_at = self._mood.clock.said(look.at, ours=self._deps.clock.now())
        look = await self._ask_for_missing(look, until=until)
        if look.partial:
            log.warning("list_is_partial", provider=self._provider.name, because=look.partial)
        return look

    async def _ask_for_missing(self, look: Look, *, until: float) -> Look:
        rows = await self._deps.store.read(lambda r: r.select(Rental, provider=self._provider.name, state=list(OPEN)))
        shown = {handle.id for handle in look.handles}
        for row in rows:
            if row.instance_id is None or row.instance_id in shown:
                continue
            if self._deps.clock.now() >= until:
                return replace(look, partial="there was no time to ask for each machine that the list does not show")
            found = await self._provider.get(row.instance_id)
            if isinstance(found, Handle):
                look = replace(look, handles=(*look.handles, replace(found, label=row.label)))
            elif found.trouble is not Trouble.GONE:
                self._take_failure("get", found)
                return replace(look, partial=f"machine {row.instance_id} could not be asked for: {found.words}")
        return look

    # --- one transaction

    async def _decide(self, tx: Tx, look: Look | None) -> list[Create | Destroy]:
        now, limits = self._deps.clock.now(), self._settings.limits
        before = await self._rows(tx, look)
        rows = dict(before)
        if look is not None:
            rows |= await self._absorb(tx, rows, look, now)
        facts = await self._facts(tx, before, rows, now)
        self._desk.offers[self._provider.name] = affordable(self._found, facts, limits)  # else others are never asked
        decided = decide_blind(facts, limits) if look is None else decide(facts, limits)
        rows |= {row.id: row for row in decided.rows}
        if look is not None and not look.partial:
            rows |= {row.id: row for row in self._requests(decided.opened, now)}
        for note in decided.notes:
            log.info("not_rented", provider=self._provider.name, because=note)
        rows |= await post_rentals(tx, rows.values(), limits, at=facts.at, now=now)
        await self._save(tx, before, rows, now)
        orders = [one for row in rows.values() if (one := order(row, at=facts.at, limits=limits)) is not None]
        return sorted(orders, key=lambda one: isinstance(one, Create))  # what costs money is ended first

    async def _rows(self, tx: Tx, look: Look | None) -> dict[str, Rental]:
        """The open rows, and the gone ones whose labels the look shows."""
        rows = await tx.select(Rental, provider=self._provider.name, state=list(OPEN))
        self._mood.clock.resume(max((row.paid_until or 0.0 for row in rows), default=0.0), ours=self._deps.clock.now())
        labels = [] if look is None else sorted({handle.label for handle in look.handles})
        gone = await tx.select(Rental, provider=self._provider.name, state=RentalState.GONE, label=labels) if labels else []
        return {row.id: row for row in (*rows, *gone)}

    async def _absorb(self, tx: Tx, rows: Mapping[str, Rental], look: Look, now: float) -> dict[str, Rental]:
        """What the look says of each row, and rows for machines that none explains."""
        matched = match(rows.values(), look.handles)
        at = self._mood.looked_at
        seen = {}
        for row in rows.values():
            handle = matched.by_row.get(row.id)
            if handle is not None or not look.partial:
                seen[row.id] = absorb(row, handle, at=at, now=now, limits=self._settings.limits)
        strays = [stray(handle, provider=self._provider.name, at=at, now=now) for handle in matched.strays]
        for row in strays:
            log.warning("orphan_found", provider=row.provider, instance=row.instance_id, label=row.label)
        return await self._hear_workers(tx, seen | {row.id: row for row in strays})

    async def _hear_workers(self, tx: Tx, rows: dict[str, Rental]) -> dict[str, Rental]:
        """When the workers of the machines were last heard."""
        by_invite = {row.invite_id: row for row in rows.values() if row.is_open and row.invite_id}
        for worker in await tx.select(Worker, invite_id=sorted(by_invite)) if by_invite else []:
            heard = self._deps.presence.get(worker.id)
            seen_at = worker.last_seen_at if heard is None else max(heard.at, worker.last_seen_at)
            row = by_invite[worker.invite_id]
            rows[row.id] = replace(row, worker_seen_at=seen_at)
        return rows

    async def _facts(self, tx: Tx, before: Mapping[str, Rental], rows: Mapping[str, Rental], now: float) -> Facts:
        """`before`: these rows as the store has them; what this turn closed is closed, whatever the store still says."""
        name = self._provider.name
        opened = [row for row in rows.values() if row.is_open]
        closed = [row for row in rows.values() if not row.is_open]
        stored = await tx.total(Rental, "cost_uusd", provider=name, state=RentalState.GONE)
        spent = stored + sum(row.cost_uusd for row in closed) - sum(row.cost_uusd for row in before.values() if not row.is_open)
        since = now - self._settings.limits.cool_s
        recent = await tx.select(Rental, provider=name, state=RentalState.GONE, ending_since__ge=since)
        wishes = self._desk.wishes(name)
        job_ids = sorted({row.job_id for row in opened if row.job_id} | set(wishes))
        jobs = {job.id: job for job in await tx.select(Job, id=job_ids)}
        left = {job_id: await budget_left(tx, job, opened) for job_id, job in jobs.items()}
        unwanted = {job_id for job_id in job_ids if job_id not in jobs or _needs_nothing(jobs[job_id], now)}
        return Facts(
            rentals=opened,
            provider_purse=Purse(name, self._settings.budget_uusd, spent),
            at=self._mood.clock.now(ours=now),
            now=now,
            recent=[*(row for row in recent if row.id not in rows), *closed],
            wishes={**wishes, **{job_id: Wanted(job_id, 0) for job_id in unwanted}},
            purses={job_id: Purse(job_id, limit) for job_id, limit in left.items() if limit is not None},
            up_since=self._deps.started_at,
        )

    def _requests(self, opened: Sequence[tuple[str, RentalOffer]], now: float) -> list[Rental]:
        keys = [f"{self._rng.getrandbits(64):016x}" for _ in opened]
        return [
            requested(offer, key=key, job_id=job_id, label=f"{self._prefix}{key}", now=now)
            for key, (job_id, offer) in zip(keys, opened, strict=True)
        ]

    async def _save(self, tx: Tx, before: Mapping[str, Rental], rows: Mapping[str, Rental], now: float) -> None:
        changed = [row for row in rows.values() if before.get(row.id) != row]
        if changed:
            await tx.put(*changed)
        for row in changed:
            known = before.get(row.id)
            if known is None or (known.state, known.ending) != (row.state, row.ending):
                said = {
                    "id": row.id,
                    "provider": row.provider,
                    "state": row.state.value,
                    "ending": row.ending,
                    "reason": row.reason,
                }
                log.info("rental", **said)
                if row.job_id:
                    await record_event(tx, row.job_id, "rental", {**said, "cost_uusd": row.cost_uusd}, now=now)
            if not row.is_open and row.invite_id:
                await invites.revoke(tx, row.invite_id, now=now)

    # --- orders

    async def _create(self, one: Create) -> None:
        intended = await self._deps.store.write(lambda tx: self._intend(tx, one.rental.id))
        if intended is None:
            return
        row, invite = intended
        self._deps.reach("renting.create_saved")
        answer = await self._provider.create(RentalOffer(**row.offer), self._spec(invite), row.label)
        self._deps.reach("renting.create_called")
        if isinstance(answer, Failed):
            self._take_failure("create", answer)
            if answer.trouble in (Trouble.NO_BALANCE, Trouble.REFUSED, Trouble.RETRY_AFTER):
                wait_s = min(answer.retry_after_s or NO_CREATE_S, NO_CREATE_MOST_S)
                self._mood.no_create_until = self._deps.clock.now() + wait_s

        async def save(tx: Tx) -> None:
            now_row = await tx.get(Rental, row.id)
            if now_row is not None:
                await tx.put(answered(now_row, answer, now=self._deps.clock.now()))

        await self._deps.store.write(save)
        self._deps.reach("renting.create_answered")

    async def _intend(self, tx: Tx, rental_id: str) -> tuple[Rental, str] | None:
        """Write that a create is sent, with a fresh invite: the code of the one before is known to nobody any more."""
        now, row = self._deps.clock.now(), await tx.get(Rental, rental_id)
        if row is None or not row.is_wanted:
            return None
        if row.invite_id:
            await invites.revoke(tx, row.invite_id, now=now)
        limits = self._settings.limits
        new = NewInvite(
            owner=f"rented-{self._provider.name}",
            max_uses=1,
            expires_in_s=INVITE_S + limits.appear_s + limits.start_s + limits.join_s,
            price_ceiling_uusd_per_hour=0,
            jobs=(row.job_id,),
        )
        made = await invites.create(tx, new, public_key=public_hex(self._deps.key), now=now)
        row = called(row, at=self._mood.clock.now(ours=now), looked_at=self._mood.looked_at, invite_id=made.id)
        await tx.put(row)
        return row, made.code

    def _spec(self, invite: str) -> Spec:
        settings = self._settings
        script = start_script(
            give_up_min=settings.give_up_min, worker_options=settings.worker_options, farewell=self._provider.farewell
        )
        return Spec(settings.image, script, environment(url=settings.url, invite=invite), settings.disk_gb)

    async def _destroy(self, one: Destroy) -> None:
        failed = await self._provider.destroy(one.instance_id)
        self._deps.reach("renting.destroy_called")
        if failed is not None:
            self._take_failure("destroy", failed)

        async def save(tx: Tx) -> None:
            row = await tx.get(Rental, one.rental.id)
            if row is not None:
                await tx.put(replace(row, destroys=row.destroys + 1))

        await self._deps.store.write(save)
        self._deps.reach("renting.destroy_saved")

    def _take_failure(self, call: str, failed: Failed) -> None:
        """Back off from the whole provider when it asks for that or does not answer."""
        now, mood = self._deps.clock.now(), self._mood
        log.warning("provider_failed", provider=self._provider.name, call=call, trouble=failed.trouble.value, words=failed.words)
        if failed.trouble is Trouble.RETRY_AFTER or (call == "list" and failed.trouble is not Trouble.REFUSED):
            wait_s = failed.retry_after_s
            if wait_s is None:
                wait_s = QUIET_FIRST_S + delay_s(mood.failures, first_s=QUIET_FIRST_S, most_s=QUIET_MOST_S, rng=self._rng)
            mood.failures += 1
            mood.quiet_until = max(mood.quiet_until, now + min(wait_s, QUIET_MOST_S))
