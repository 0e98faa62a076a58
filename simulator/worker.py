"""A simulated worker's engine: slots, a queue of leased work, and which version produced each token."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from coordinator.domain.admission import Submitted
from coordinator.domain.model import Lease
from coordinator.domain.seeds import slot_seed
from simulator.rows import STOP_TOKEN
from simulator.scenario import MAX_TOKENS, MEAN_TOKENS, WorkerModel


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion being generated; `life` is the worker's life that began it."""

    lease: Lease
    slot: int
    life: int
    started_at: float
    tokens: int


@dataclass(slots=True)
class SimulatedWorker:
    """The worker's memory. A crash loses all of it but its name."""

    id: str
    model: WorkerModel
    up: bool = True
    life: int = 1  # the session epoch
    version: int | None = None
    digest: str = ""
    fetching: bool = False
    swaps: list[tuple[float, int, str]] = field(default_factory=list)  # (time, version, digest) in order
    queue: deque[tuple[Lease, int]] = field(default_factory=deque)
    running: dict[tuple[str, int], Generation] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Up, and nothing to generate."""
        return self.up and not self.running and not self.queue

    @property
    def free_slots(self) -> int:
        """Slots that no leased work waits for."""
        return max(self.model.slots - len(self.running) - len(self.queue), 0)

    def take(self, lease: Lease) -> None:
        """Queue the slots of a lease."""
        self.queue.extend((lease, slot) for slot in lease.slots)

    def start(self, job_seed: int, tail: float, now: float) -> list[Generation]:
        """Begin queued work in free slots."""
        begun: list[Generation] = []
        while self.queue and len(self.running) < self.model.slots:
            lease, slot = self.queue.popleft()
            tokens = completion_length(job_seed, int(lease.group_id[1:]), slot, tail)
            generation = Generation(lease, slot, self.life, now, tokens)
            self.running[lease.id, slot] = generation
            begun.append(generation)
        return begun

    def swap(self, version: int, digest: str, now: float) -> None:
        """Serve another version from now on; running completions continue."""
        self.version, self.digest = version, digest
        self.swaps.append((now, version, digest))

    def keep_only(self, live: frozenset[str]) -> list[Generation]:
        """Stop work on leases that are not live any more; what was under way."""
        self.queue = deque((lease, slot) for lease, slot in self.queue if lease.id in live)
        stopped = [generation for key, generation in self.running.items() if key[0] not in live]
        self.running = {key: generation for key, generation in self.running.items() if key[0] in live}
        return stopped

    def crash(self) -> list[Generation]:
        """Lose everything; what was under way."""
        lost = list(self.running.values())
        self.up, self.version, self.fetching, self.digest = False, None, False, ""
        self.swaps, self.queue, self.running = [], deque(), {}
        return lost

    def finish(self, generation: Generation) -> tuple[Submitted, dict[int, str]]:
        """The completion as it is sent, and the digest of each version in it.

        Each token carries the version that was served when it was made. Of two digests under one number the first is named:
        a replay replaced it, so the completion is refused for what it is.
        """
        made_at = generation.started_at + (np.arange(generation.tokens) + 0.5) / self.model.tokens_per_s
        place = np.searchsorted([at for at, _, _ in self.swaps], made_at, side="right") - 1
        served = np.array([version for _, version, _ in self.swaps], dtype=np.int32)
        claimed: dict[int, str] = {}
        for _, version, digest in self.swaps[int(place[0]) : int(place[-1]) + 1]:
            claimed.setdefault(version, digest)
        token_ids = np.full(generation.tokens, STOP_TOKEN + 1, dtype=np.int32)
        stops = generation.tokens < MAX_TOKENS
        if stops:
            token_ids[-1] = STOP_TOKEN
        done = Submitted(
            slot=generation.slot,
            token_ids=token_ids,
            logprobs=np.full(generation.tokens, -0.5, dtype=np.float32),
            versions=served[place],
            stop_reason="stop" if stops else "length",
            generate_s=generation.tokens / self.model.tokens_per_s,
        )
        return done, claimed


def completion_length(job_seed: int, group: int, slot: int, tail: float) -> int:
    """Tokens of a slot's completion, log-normal with the mean MEAN_TOKENS; the same for every attempt (same seed)."""
    draw = Random(slot_seed(job_seed, group, slot)).gauss(0.0, 1.0)  # noqa: S311 (seeded on purpose)
    return min(max(round(MEAN_TOKENS * math.exp(tail * draw - tail**2 / 2)), 1), MAX_TOKENS)
