"""Workers that are late, replay, take others' leases, or make things up. Their sessions are the product's; what they send is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from coordinator.domain.model import Publication, PublicationState
from coordinator.wire import messages as wire
from simulator.faults.worker import SimWorker
from worker_node.domain import instructions as do
from worker_node.domain.generation import Completion
from worker_node.domain.weights import Version
from worker_node.errors import CallError
from worker_node.wiring import frame_of

Lie = Callable[[Random, do.SubmitCompletions], do.SubmitCompletions]


class HostileWorker(SimWorker):
    """Does what its temper says in place of, or beside, an honest submission."""

    async def _submit(self, submission: do.SubmitCompletions) -> None:
        temper = self.kind.temper
        if temper == "late" and self.rng.random() < 0.6:
            await asyncio.sleep(self._lateness(submission.lease_id))
        if temper == "fabricator" and self.rng.random() < 0.7:
            await self._send(self.rng.choice(LIES)(self.rng, submission))
        await super()._submit(submission)
        if temper == "replayer":
            await asyncio.sleep(self.rng.uniform(0.0, 6.0))
            await self._send(replace(self.rng.choice(self.world.mail), epoch=self._epoch))

    def saw(self, submission: do.SubmitCompletions) -> None:
        """Thieves send others' work as their own."""
        if self.kind.temper == "thief" and self.rng.random() < 0.3:
            self._spawn(self._send(replace(submission, epoch=self._epoch)))

    def _lateness(self, lease_id: str) -> float:
        """Until shortly after the lease's deadline, or some time."""
        deadline = self.deadlines.get(lease_id, 0.0) - self.world.host.clock.now()
        return max(deadline, 0.0) + self.rng.choice((self.rng.uniform(-0.2, 0.1), 3.0, 30.0))

    async def _manifest(self, version: Version) -> None:
        """Wants work with a version that it only heard of."""
        if self.kind.temper == "fabricator" and self.rng.random() < 0.7:
            await self._beg(do.AskLease(self._epoch, version, self.kind.slots, 0.0))
        await super()._manifest(version)

    async def _lease(self, ask: do.AskLease) -> None:
        """Asks for more than it may have, now and then."""
        if self.kind.temper == "fabricator" and self.rng.random() < 0.3:
            await self._beg(self.rng.choice((replace(ask, free_slots=4096), replace(ask, version=self._false(ask.version)))))
        await super()._lease(ask)

    def _false(self, version: Version) -> Version:
        """The newest public version, which it may not hold, or one that does not exist."""
        public = [
            p for p in self.world.rows.all(Publication) if p.state is PublicationState.PUBLISHED and p.version != version.number
        ]
        if public:
            return Version(version.job_id, public[-1].version, public[-1].digest)
        return Version(version.job_id, version.number, "cd" * 32)

    async def _beg(self, ask: do.AskLease) -> None:
        """What is granted is wasted: it ends at its deadline, or when a beat does not name it."""
        version = ask.version
        request = wire.LeaseRequest(
            session_epoch=ask.epoch,
            job_id=version.job_id,
            version=version.number,
            digest=version.digest,
            free_slots=ask.free_slots,
            wait_s=0.0,
        )
        try:
            await self.line.call(ask.epoch, lambda front, sender: front.lease(sender, request, lambda: True))
        except CallError as error:
            self.world.tell(f"{self.name} begged in vain: {error.code}")

    async def _send(self, submission: do.SubmitCompletions) -> None:
        """Beside the session, which never hears of it."""
        if not submission.epoch:
            return  # it joined nothing yet
        frame = frame_of(submission)
        try:
            reply = await self.line.call(submission.epoch, lambda front, sender: front.submit(sender, frame))
        except CallError as error:
            self.world.tell(f"{self.name} ({self.kind.temper}) was refused: {error.code}")
            return
        for no in reply.refused:
            self.world.tell(f"{self.name} ({self.kind.temper}) was refused: {no.code}")


def _always(change: Callable[[do.SubmitCompletions], do.SubmitCompletions]) -> Lie:
    return lambda _rng, sent: change(sent)


def _each(change: Callable[[Completion], Completion]) -> Lie:
    return _always(lambda sent: replace(sent, completions=tuple((slot, change(done)) for slot, done in sent.completions)))


def _copy(done: Completion, **new: object) -> Completion:
    fields = {name: getattr(done, name) for name in ("token_ids", "logprobs", "versions", "stop_reason", "generate_s")}
    return Completion(**{**fields, **new})


def _all_logprobs(value: float) -> Lie:
    return _each(lambda done: _copy(done, logprobs=np.full(done.length, value, np.float32)))


def _versions(step: int) -> Lie:
    return _each(lambda done: _copy(done, versions=np.maximum(done.versions + step, 0).astype(np.int32)))


def _other_slot(rng: Random, sent: do.SubmitCompletions) -> do.SubmitCompletions:
    return replace(sent, completions=tuple((slot + rng.choice((1, 2, 40)), done) for slot, done in sent.completions))


LIES: tuple[Lie, ...] = (
    _all_logprobs(0.5),
    _all_logprobs(float("nan")),
    _all_logprobs(-1e30),
    _versions(-1),
    _versions(1),
    _versions(40),
    _each(lambda done: _copy(done, token_ids=np.full(done.length, 10**6, np.int32))),
    _each(lambda done: _copy(done, token_ids=np.full(done.length, -1, np.int32))),
    _each(lambda done: _copy(done, generate_s=0.0)),
    _each(lambda done: _copy(done, stop_reason="length" if done.stop_reason == "stop" else "stop")),
    _other_slot,
    lambda rng, sent: replace(sent, fence=sent.fence + rng.choice((-1, 1, 7))),
    lambda rng, sent: replace(sent, epoch=max(sent.epoch + rng.choice((-1, 1)), 1)),
    _always(lambda sent: replace(sent, digests=tuple((version, "ab" * 32) for version, _ in sent.digests))),
    _always(lambda sent: replace(sent, lease_id=sent.lease_id + "0")),
    _always(lambda sent: replace(sent, completions=sent.completions + sent.completions[:1])),
)
