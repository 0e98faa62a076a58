"""What the service needs from the outside world, as protocols. Adapters implement them; `app.py` wires them.

Store transactions are serial: one writer process (law 11), one transaction at a time, and several queued writes may share
one commit (group commit). A write that raises is undone alone; its neighbours in the same commit are not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = TypeVar("Row")


class Clock(Protocol):
    """Unix seconds; the only source of time for decisions."""

    def now(self) -> float: ...


class Reader(Protocol):
    """Read rows of the dataclasses in `coordinator.domain.model`.

    Filters are keyword arguments named after fields: `field=value` (None means IS NULL), `field=[a, b]` (any of),
    `field__le=`, `field__lt=`, `field__ge=`, `field__gt=`. `order_by` is a field name, "-field" for descending.
    """

    async def get(self, kind: type[Row], /, *key: object) -> Row | None:
        """The row with that primary key, or None."""
        ...

    async def select(
        self, kind: type[Row], /, *, order_by: str | None = None, limit: int | None = None, **filters: object
    ) -> list[Row]: ...

    async def count(self, kind: type[Any], /, **filters: object) -> int: ...

    async def total(self, kind: type[Any], field: str, /, **filters: object) -> int:
        """Sum of an integer field over matching rows; 0 when none match."""
        ...

    async def highest(self, kind: type[Any], field: str, /, **filters: object) -> int | None:
        """Largest value of an integer field over matching rows; None when none match."""
        ...


class Tx(Reader, Protocol):
    """A transaction: reads see its own writes."""

    async def put(self, *rows: object) -> None:
        """Insert or replace by primary key; rows of one kind in one call are written in bulk."""
        ...

    async def insert(self, row: object) -> bool:
        """Insert; False (and nothing changed) when the primary key or a unique column exists."""
        ...

    async def delete(self, kind: type[Any], /, **filters: object) -> int:
        """Delete matching rows, at least one filter required; the number deleted."""
        ...


class Store(Protocol):
    """Durable rows."""

    async def write(self, action: Callable[[Tx], Awaitable[T]]) -> T:
        """Run `action` in a transaction; returns once it is durable. Never call `write` from inside an action."""
        ...

    async def read(self, action: Callable[[Reader], Awaitable[T]]) -> T:
        """Run `action` on a consistent snapshot."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    files: int = 0
    bytes: int = 0


class Blobs(Protocol):
    """Content-addressed bytes."""

    async def put(self, data: bytes) -> str:
        """Store durably (synced) and return the BLAKE3 digest in hex. Putting the same bytes twice is one blob."""
        ...

    async def get(self, digest: str) -> bytes:
        """The bytes, verified against the digest. Raises KeyError when absent, ValueError when corrupt."""
        ...

    def path(self, digest: str) -> Path:
        """Where the blob lies, for readers on the same host."""
        ...

    async def free_bytes(self) -> int: ...

    async def sweep(self, keep: Set[str], *, before: float) -> Swept:
        """Remove blobs that are not in `keep` and were last put before `before` (Unix seconds). Read `keep` after choosing it."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: token ids, and the text shown to people."""

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Graded:
    """The outcome of one completion. `outcome` is scored | unscored | failed | timeout; reward is set only if scored."""

    outcome: str
    reward: float | None
    text: str  # the decoded completion
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn as the record has it: what was sampled, why it stopped, and what the environment placed after it."""

    token_ids: tuple[int, ...]
    stop_reason: str  # stop | length
    placed: tuple[int, ...] = ()  # of the newest turn: none yet


@dataclass(frozen=True, slots=True)
class Continued:
    """The environment answers the newest turn: these tokens follow it, and the model is to go on."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """What the data plane says about a job's environment. Sizes are None for endless procedural splits."""

    train_prompts: int | None
    eval_prompts: int | None
    vocab_size: int
    stop_token_ids: tuple[int, ...]


class EnvironmentBroken(Exception):
    """The environment cannot start or keep running; the words say what the job's author must change."""


class DataPlane(Protocol):
    """Prompts and scores of one job, computed in jailed processes. Raises EnvironmentBroken when it cannot start."""

    async def start(self) -> EnvironmentInfo: ...

    async def prompts(self, split: str, indices: Sequence[int]) -> list[Prompt]: ...

    async def grade(self, split: str, index: int, completions: Sequence[Sequence[int]]) -> list[Graded]:
        """Grade completions (token ids) of one prompt, in order."""
        ...

    async def play(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Graded | Continued:
        """What the environment makes of a slot's record: its answer to the newest turn, or the outcome of the whole."""
        ...

    def reward_metrics(self) -> Mapping[str, float]:
        """The newest value of each figure that the reward function logged."""
        ...

    def alarm(self) -> str | None:
        """Words when the share of failed and timed-out gradings passed its limit, else None."""
        ...

    async def close(self) -> None: ...
