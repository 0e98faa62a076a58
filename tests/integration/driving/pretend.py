"""Stand-ins at the driver's ports that behave: a learner whose weights are a hash chain, a publisher, a plane, and rollouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from blake3 import blake3

from coordinator.domain.grant import grantable
from coordinator.domain.model import (
    Group,
    GroupState,
    Job,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
)
from coordinator.service.deps import Deps
from coordinator.service.job_ports import BaseSnapshot, LearnerLost, SignedHop, SignedManifest
from coordinator.service.ports import EnvironmentInfo, Graded, Prompt, Tx
from coordinator.service.prompting import next_number
from coordinator.wire import learner_link as link
from coordinator.wire.frames import encode_frame
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Edge, FileEntry, Manifest, Piece, Tensor

VOCAB = 20
Hooks = dict[str, Callable[[], Awaitable[None]]]
"""What happens while the learner works on a request: "KIND:STEP" -> action, run once."""


class PretendLearner:
    """Weights are BLAKE3(previous weights, batch digest); `salt` makes a replay give other bits."""

    def __init__(self, fence: int, salt: str, lose_at: set[str], trained: list[int], hooks: Hooks) -> None:
        self._fence = fence
        self._salt = salt
        self._hooks = hooks
        self._lose_at = lose_at
        self._trained = trained
        self.step = 0
        self.weights = "start"
        self.figures = {"loss": 0.0}
        self.log: list[link.Log] = []
        self.logged: int | None = 0

    async def ask(self, request: link.Request, *, deadline_s: float) -> link.Answer:
        await asyncio.sleep(0)
        hook = self._hooks.pop(f"{request.kind}:{self.step}", None)
        if hook is not None:
            await hook()
        match request:
            case link.Start():
                return self._start(request)
            case link.Train():
                return self._train(request)
            case link.Snapshot():
                folder = Path(request.directory)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "weights").write_text(self.weights)
                return link.Snapshotted(
                    fence=self._fence, version=self.step, directory=str(folder), canary_logprobs=(-1.0,), seconds=0.0
                )
            case link.Checkpoint():
                folder = Path(request.directory)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "state.json").write_text(json.dumps([self.step, self.weights]))
                return link.Checkpointed(fence=self._fence, step=self.step, directory=str(folder))
            case link.Log():
                self.log.append(request)
                return link.Logged(fence=self._fence, step=request.step)
            case link.Evaluate():
                return link.Evaluated(fence=self._fence, version=self.step, completions=tuple((1,) for _ in request.prompts))
        raise AssertionError(request)

    def _start(self, request: link.Start) -> link.Ready:
        if request.checkpoint_dir is not None:
            self.step, self.weights = json.loads((Path(request.checkpoint_dir) / "state.json").read_text())
        return link.Ready(
            fence=self._fence, step=self.step, parameters=1, vocab_size=VOCAB, stop_token_ids=(1,), logged=self.logged
        )

    def _train(self, request: link.Train) -> link.Trained:
        assert request.step == self.step, "a batch that is not the learner's next"
        assert blake3(Path(request.batch_path).read_bytes()).hexdigest() == request.batch_digest
        if f"train:{request.step}" in self._lose_at:
            self._lose_at.discard(f"train:{request.step}")
            raise LearnerLost(f"killed in step {request.step}")
        self._trained.append(request.step)
        self.weights = blake3(f"{self.weights} {request.batch_digest} {self._salt}".encode()).hexdigest()
        self.step += 1
        return link.Trained(fence=self._fence, step=request.step, seconds=0.01, metrics=self.figures)

    async def close(self) -> None:
        """Nothing runs."""


class PretendLearners:
    """Starts learners; `salts` gives each start its salt (the last one repeats)."""

    def __init__(self, *, salts: Sequence[str] = ("",), lose_at: set[str] | None = None, hooks: Hooks | None = None) -> None:
        self._hooks = dict(hooks or {})
        self._salts = list(salts)
        self._lose_at = lose_at or set()
        self.trained: list[list[int]] = []
        self.learners: list[PretendLearner] = []
        self.figures = {"loss": 0.0}
        self.logged: list[int | None] = [0]

    async def start(self, job_id: str, fence: int) -> PretendLearner:
        if "start" in self._lose_at:
            raise LearnerLost("it does not start")
        salt = self._salts.pop(0) if len(self._salts) > 1 else self._salts[0]
        self.trained.append([])
        learner = PretendLearner(fence, salt, self._lose_at, self.trained[-1], self._hooks)
        learner.figures = self.figures
        learner.logged = self.logged.pop(0) if len(self.logged) > 1 else self.logged[0]
        self.learners.append(learner)
        return learner


SHARED = blake3(b"{}").hexdigest()
"""The piece of the small file that all pretended versions have."""


class PretendPublisher:
    """The digest is that of the weights; a keyframe is one piece of that name, a delta one of 10 bytes named after both ends."""

    def __init__(self, *, delta_bytes: int = 10) -> None:
        self.delta_bytes = delta_bytes

    async def publish(
        self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int], base: BaseSnapshot | None = None
    ) -> SignedManifest:
        digest = blake3((directory / "weights").read_bytes()).hexdigest()
        edge = self._keyframe(digest) if base is None else self._delta(digest, base)
        files = (FileEntry("config.json", (Piece(SHARED, 2),)),)
        manifest = Manifest(job_id, version, digest, (Tensor("w", "U8", (1000,), 1000),), {}, files, tuple(canary_ids), (edge,))
        hops = tuple(SignedHop(hop.to_json(), "00") for hop in hops_of(manifest))
        return SignedManifest(manifest.to_json(), "00", digest, 0.0, 0.0, hops, 1000)

    async def add_edges(
        self, directory: Path, *, manifest: str, bases: Sequence[BaseSnapshot], keyframe: bool
    ) -> tuple[SignedHop, ...]:
        known = Manifest.from_json(manifest)
        edges = [self._delta(known.digest, base) for base in bases] + ([self._keyframe(known.digest)] if keyframe else [])
        hops = [Hop(known.job_id, known.version, known.digest, known.layout, edge) for edge in edges]
        return tuple(SignedHop(hop.to_json(), "00") for hop in hops)

    async def remove_pieces(self, texts: Sequence[str], *, kept: Sequence[str]) -> int:
        return 0

    async def keep_pieces(self, kept: Sequence[str]) -> int:
        return 0

    def _keyframe(self, digest: str) -> Edge:
        return Edge("planes", None, None, (Piece(digest, 900),))

    def _delta(self, digest: str, base: BaseSnapshot) -> Edge:
        piece = Piece(blake3(f"{base.digest} {digest}".encode()).hexdigest(), self.delta_bytes)
        return Edge("delta", base.version, base.digest, (piece,))


class PretendPlane:
    """Prompts of one token; rewards that vary by slot, or do not, or do so in every other group."""

    def __init__(self, *, signal: bool = True, every_other: bool = False) -> None:
        self.signal = signal
        self.every_other = every_other
        self.broken = False

    async def start(self) -> EnvironmentInfo:
        return EnvironmentInfo(None, None, VOCAB, (1,))

    async def prompts(self, split: str, indices: Sequence[int]) -> list[Prompt]:
        return [Prompt(index, (2, 3), "??") for index in indices]

    async def grade(self, split: str, index: int, completions: Sequence[Sequence[int]]) -> list[Graded]:
        if self.broken:
            return [Graded("failed", None, str(ids), "NameError: name 'x' is not defined") for ids in completions]
        signal = index % 2 == 1 if self.every_other else self.signal
        return [Graded("scored", float(ids[0] % 2) if signal else 1.0, str(ids)) for ids in completions]

    async def close(self) -> None:
        """Nothing runs."""

    def reward_metrics(self) -> dict[str, float]:
        return {"pretended": 0.5}

    def alarm(self) -> str | None:
        return None

    def plane(self, job: Job) -> PretendPlane:
        """It is its own starter."""
        return self


async def pretend_workers(deps: Deps, job_id: str) -> None:
    """Fill groups as fast as the grant rule allows, always with the newest published version."""
    with deps.wake.watch(job_id) as watch:
        while True:
            if not await deps.store.write(lambda tx: _one_group(tx, deps, job_id)):
                await watch.wait(0.05)
            deps.wake.notify(job_id)


async def _one_group(tx: Tx, deps: Deps, job_id: str) -> bool:
    job = await tx.get(Job, job_id)
    public = await tx.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED, order_by="-version", limit=1)
    if job is None or job.state is not JobState.RUNNING or not public:
        return False
    unsettled = await tx.count(Group, job_id=job_id, state=[GroupState.ISSUED, GroupState.READY, GroupState.SEALED])
    algorithm = job.config.algorithm
    rule = grantable(
        committed_steps=job.committed_steps,
        unsettled=unsettled,
        groups_per_step=algorithm.groups_per_step,
        bound=job.config.staleness.max,
        held_version=public[0].version,
        planned_steps=job.config.budget.steps,
    )
    if rule.groups == 0:
        return False
    number = await next_number(tx, job_id)
    group = Group(f"{job_id}/g{number}", job_id, number, number, (2, 3), algorithm.group_size, GroupState.ISSUED, deps.clock.now())
    await tx.put(replace(group, oldest_version=public[0].version, fence=1))
    await tx.put(_lease(group, public[0], last_step=public[0].version + job.config.staleness.max))
    blob = await deps.blobs.put(frame(public[0].version, algorithm.group_size))
    await tx.put(*(_rollout(group, slot, blob, public[0]) for slot in range(algorithm.group_size)))
    return True


def _lease(group: Group, public: Publication, *, last_step: int) -> Lease:
    return Lease(
        id=f"{group.id}/f1",
        job_id=group.job_id,
        group_id=group.id,
        worker_id="w-pretend",
        session_epoch=1,
        slots=tuple(range(group.size)),
        version=public.version,
        digest=public.digest,
        last_step=last_step,
        deadline=group.issued_at + 60,
        fence=1,
        state=LeaseState.DONE,
        issued_at=group.issued_at,
        closed_at=group.issued_at,
    )


def frame(version: int, slots: int) -> bytes:
    arrays = {
        "token_ids": np.asarray([4 + slot % 2 for slot in range(slots)], np.int32),
        "logprobs": np.full(slots, -0.5, np.float32),
        "versions": np.full(slots, version, np.int32),
    }
    return encode_frame(b"{}", arrays)


def _rollout(group: Group, slot: int, blob: str, public: Publication) -> Rollout:
    return Rollout(
        group_id=group.id,
        slot=slot,
        job_id=group.job_id,
        group_number=group.number,
        state=RolloutState.ACCEPTED,
        lease_id=f"{group.id}/f1",
        worker_id="w-pretend",
        blob=blob,
        blob_start=slot,
        length=1,
        oldest_version=public.version,
        newest_version=public.version,
        digests={str(public.version): public.digest},
        stop_reason="length",
    )
