"""What stands at the job driver's ports: a learner whose weights are a hash chain, a publisher with pieces, graders.

The weights after a step are BLAKE3 of the weights before it, the batch's bytes and a salt. A salt that changes with a crash
gives replays other bits. Real directories and batch files are written and read, under the run's own folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.domain.model import Job
from coordinator.domain.seeds import derive
from coordinator.service.job_ports import BaseSnapshot, LearnerLost, PublishFailed, PublishInterrupted, SignedHop, SignedManifest
from coordinator.service.ports import Continued, EnvironmentBroken, EnvironmentInfo, Graded, PlayedTurn, Prompt
from coordinator.wire import learner_link as link
from coordinator.wire.canary import scripted_canary
from p2p.domain.hops import Hop, hops_of, pieces_named
from p2p.domain.manifest import Edge, FileEntry, Manifest, Piece, Tensor
from p2p.domain.signing import sign_hop, sign_manifest
from simulator.faults.schedule import Schedule

VOCAB = 16
STOP_TOKEN = 1
FIRST_WEIGHTS = blake3(b"start").hexdigest()
RAW_BYTES = 1000
NEW_TOKENS = 24  # of a rollout
TURN_TOKENS = 12  # of one turn of several
OVER = 0.25  # chance that an environment ends after a turn


@dataclass(slots=True)
class Truth:
    """What the learners really did, whatever the rows say. Outlives every process."""

    salt: int = 0
    weights: dict[int, list[str]] = field(default_factory=dict)  # version -> digests that a learner held, oldest first
    trained: dict[int, list[tuple[str, str]]] = field(default_factory=dict)  # step -> (batch digest, weights before), each time
    pieces: set[str] = field(default_factory=set)  # on the publisher's disk
    alive: int = 0  # learner processes
    learners_refuse: bool = False  # none starts any more
    encoder_refuses: bool = False  # no snapshot can be encoded any more


def digest_of(weights: str) -> str:
    """The identity of a snapshot of these weights."""
    return blake3(weights.encode()).hexdigest()


class SimLearner:
    """One learner process."""

    def __init__(self, fence: int, plan: Schedule, truth: Truth, watch: Callable[[link.Train, int], None]) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fence = fence
        self.step = 0
        self._plan = plan
        self._truth = truth
        self._watch = watch
        self._weights = FIRST_WEIGHTS
        self._ended = False
        truth.alive += 1

    async def ask(self, request: link.Request, *, deadline_s: float) -> link.Answer:
        """Answers after the time it takes, unless the process is killed meanwhile."""
        if request.fence != self.fence:
            raise LearnerLost(f"fence {request.fence} was sent to the learner of fence {self.fence}")
        seconds = {"train": self._plan.train_s, "start": 0.5, "snapshot": 0.1, "checkpoint": 0.1}.get(request.kind, 0.05)
        done, _ = await asyncio.wait([self.lost], timeout=min(seconds, deadline_s))
        if done or self.lost.done():
            raise LearnerLost(f"killed while asked to {request.kind} at step {self.step}")
        return self._answer(request)

    def kill(self) -> None:
        """As kill -9."""
        if not self.lost.done():
            self.lost.set_result(None)

    async def close(self) -> None:
        """It is gone."""
        self.end()

    def end(self) -> None:
        """Its link closed."""
        if not self._ended:
            self._ended = True
            self._truth.alive -= 1

    def _answer(self, request: link.Request) -> link.Answer:
        match request:
            case link.Start():
                return self._start(request)
            case link.Train():
                return self._train(request)
            case link.Snapshot():
                return self._snapshot(request)
            case link.Checkpoint():
                folder = Path(request.directory)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "state.json").write_text(json.dumps([self.step, self._weights]))
                return link.Checkpointed(fence=self.fence, step=self.step, directory=str(folder))
            case link.Evaluate():
                return link.Evaluated(
                    fence=self.fence, version=self.step, completions=tuple((STOP_TOKEN,) for _ in request.prompts)
                )
            case link.Log():
                return link.Logged(fence=self.fence, step=request.step)
        raise LearnerLost(f"request {request.kind!r} is not known")

    def _start(self, request: link.Start) -> link.Ready:
        if request.checkpoint_dir is not None:
            self.step, self._weights = json.loads((Path(request.checkpoint_dir) / "state.json").read_text())
        self._note()
        return link.Ready(fence=self.fence, step=self.step, parameters=RAW_BYTES, vocab_size=VOCAB, stop_token_ids=(STOP_TOKEN,))

    def _train(self, request: link.Train) -> link.Trained:
        self._watch(request, self.step)
        self._truth.trained.setdefault(request.step, []).append((request.batch_digest, self._weights))
        self._weights = blake3(f"{self._weights} {request.batch_digest} {self._truth.salt}".encode()).hexdigest()
        self.step += 1
        self._note()
        return link.Trained(fence=self.fence, step=request.step, seconds=self._plan.train_s, metrics={"loss": 0.5})

    def _snapshot(self, request: link.Snapshot) -> link.Snapshotted:
        folder = Path(request.directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(self._weights)
        canary = scripted_canary(digest_of(self._weights), len(request.canary_ids) - 1)
        return link.Snapshotted(fence=self.fence, version=self.step, directory=str(folder), canary_logprobs=canary, seconds=0.1)

    def _note(self) -> None:
        known = self._truth.weights.setdefault(self.step, [])
        digest = digest_of(self._weights)
        if digest not in known:
            known.append(digest)


class SimLearners:
    """Starts learners for one life of the coordinator; they die with it."""

    def __init__(self, plan: Schedule, truth: Truth, watch: Callable[[link.Train, int], None]) -> None:
        self._plan = plan
        self._truth = truth
        self._watch = watch
        self.running: SimLearner | None = None

    async def start(self, job_id: str, fence: int) -> SimLearner:  # noqa: ARG002 (there is one job)
        """A process that waits for Start."""
        await asyncio.sleep(0.2)
        if self._truth.learners_refuse:
            raise LearnerLost("it does not start")
        self.running = SimLearner(fence, self._plan, self._truth, self._watch)
        return self.running

    def host_died(self) -> None:
        """The link closes: the learner ends too."""
        if self.running is not None:
            self.running.kill()
            self.running.end()

    def kill(self) -> bool:
        """The learner dies, if one runs."""
        if self.running is None or self.running.lost.done():
            return False
        self.running.kill()
        return True


class SimPublisher:
    """Encodes one piece an edge: a keyframe is named after the digest, a delta after both ends."""

    def __init__(self, plan: Schedule, truth: Truth, key: Ed25519PrivateKey, is_broken: Callable[[], bool]) -> None:
        self._plan = plan
        self._truth = truth
        self._key = key
        self._is_broken = is_broken

    async def publish(
        self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int], base: BaseSnapshot | None = None
    ) -> SignedManifest:
        """One delta against the base, a keyframe without one."""
        await self._encode()
        digest = digest_of((directory / "weights").read_text())
        edge = self._keyframe(digest) if base is None else self._delta(digest, base)
        files = (FileEntry("config.json", (Piece(blake3(b"{}").hexdigest(), 2),)),)
        tensors = (Tensor("w", "U8", (RAW_BYTES,), RAW_BYTES),)
        manifest = Manifest(job_id, version, digest, tensors, {}, files, tuple(canary_ids), (edge,))
        text = manifest.to_json()
        self._truth.pieces |= {piece.digest for piece in manifest.all_pieces()}
        hops = tuple(self._signed(hop) for hop in hops_of(manifest))
        return SignedManifest(text, sign_manifest(self._key, text), digest, self._plan.encode_s, 0.0, hops, RAW_BYTES)

    async def add_edges(
        self,
        directory: Path,  # noqa: ARG002 (the digests say all)
        *,
        manifest: str,
        bases: Sequence[BaseSnapshot],
        keyframe: bool,
    ) -> tuple[SignedHop, ...]:
        """More edges to a version."""
        await self._encode()
        known = Manifest.from_json(manifest)
        edges = [self._delta(known.digest, base) for base in bases] + ([self._keyframe(known.digest)] if keyframe else [])
        self._truth.pieces |= {piece.digest for edge in edges for piece in edge.pieces}
        return tuple(self._signed(Hop(known.job_id, known.version, known.digest, known.layout, edge)) for edge in edges)

    async def remove_pieces(self, texts: Sequence[str], *, kept: Sequence[str]) -> int:
        """Delete what only `texts` name."""
        doomed = _pieces(texts) - _pieces(kept)
        removed = len(doomed & self._truth.pieces)
        self._truth.pieces -= doomed
        return removed

    async def keep_pieces(self, kept: Sequence[str]) -> int:
        """Delete what `kept` does not name."""
        doomed = self._truth.pieces - _pieces(kept)
        self._truth.pieces -= doomed
        return len(doomed)

    async def _encode(self) -> None:
        await asyncio.sleep(self._plan.encode_s)
        if self._truth.encoder_refuses:
            raise PublishFailed("the snapshot cannot be encoded")
        if self._is_broken():
            raise PublishInterrupted("the encoder was killed")

    def _signed(self, hop: Hop) -> SignedHop:
        text = hop.to_json()
        return SignedHop(text, sign_hop(self._key, text))

    def _keyframe(self, digest: str) -> Edge:
        return Edge("planes", None, None, (Piece(digest, 900),))

    def _delta(self, digest: str, base: BaseSnapshot) -> Edge:
        return Edge("delta", base.version, base.digest, (Piece(blake3(f"{base.digest} {digest}".encode()).hexdigest(), 10),))


def _pieces(texts: Sequence[str]) -> set[str]:
    return {piece.digest for text in texts for piece in pieces_named(text)}


class SimPlane:
    """Prompts of two tokens; rewards from the tokens, alike within some groups, and now and then none."""

    def __init__(self, plan: Schedule) -> None:
        self._plan = plan

    def plane(self, job: Job) -> SimPlane:  # noqa: ARG002
        """It is its own starter."""
        return self

    async def start(self) -> EnvironmentInfo:
        """Endless prompts."""
        await asyncio.sleep(0.05)
        if self._plan.broken_plane:
            raise EnvironmentBroken("the reward function cannot be imported")
        return EnvironmentInfo(None, None, VOCAB, (STOP_TOKEN,))

    async def prompts(self, split: str, indices: Sequence[int]) -> list[Prompt]:  # noqa: ARG002
        """Two tokens each."""
        return [Prompt(index, (2, 3), "??") for index in indices]

    async def grade(self, split: str, index: int, completions: Sequence[Sequence[int]]) -> list[Graded]:
        """After the time that grading takes."""
        if split == "train":
            await asyncio.sleep(self._plan.grade_s)
        return [self.graded(index, tuple(ids)) for ids in completions]

    async def play(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Graded | Continued:
        """After the time that grading takes."""
        await asyncio.sleep(self._plan.grade_s)
        return self.played(split, index, prompt_ids, turns)

    def played(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Graded | Continued:
        """A function of the record: one or two tokens of the environment's, while turns and tokens are left and it is not over."""
        ids = tuple(token for turn in turns for token in (*turn.token_ids, *turn.placed))
        rng = Random(derive(self._plan.seed, split, index, len(prompt_ids), *ids))  # noqa: S311 (seeded on purpose)
        placed = tuple(rng.randrange(4, VOCAB) for _ in range(rng.choice((1, 2))))
        is_over = len(turns) >= self._plan.turns or len(ids) + len(placed) >= NEW_TOKENS or rng.random() < OVER
        return self.graded(index, ids) if is_over else Continued(placed)

    def graded(self, index: int, ids: Sequence[int]) -> Graded:
        """A function of the schedule's seed, the prompt and the tokens."""
        rng = Random(derive(self._plan.seed, "reward", index))  # noqa: S311 (seeded on purpose)
        alike = rng.random() < self._plan.zero_variance
        draw = Random(derive(self._plan.seed, "outcome", index, *ids)).random()  # noqa: S311
        if draw < self._plan.ungraded:
            return Graded(("unscored", "failed", "timeout")[int(3 * draw / self._plan.ungraded)], None, str(ids), "made up")
        return Graded("scored", 1.0 if alike else float(sum(ids) % 3), str(ids))

    def reward_metrics(self) -> dict[str, float]:
        """One figure."""
        return {"simulated": 0.5}

    def alarm(self) -> str | None:
        """Never."""
        return None

    async def close(self) -> None:
        """Nothing runs."""
