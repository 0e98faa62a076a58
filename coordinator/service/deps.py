"""What every command of the service is given. Built once by `app.py`; nothing in here decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.service.control_use import ControlUse
from coordinator.service.loop_lag import LoopLag
from coordinator.service.market_board import MarketBoard
from coordinator.service.ports import Blobs, Clock, DataPlane, Prompt, Store
from coordinator.service.renting_ports import RentalDesk
from coordinator.service.transfers import Transfers
from coordinator.service.worker_presence import Presence

VERSIONS = "versions"  # woken when a version was published
NEWS = "news"  # woken when there is something to say on the control plane
QUOTES = "quotes"  # woken when quotes were opened or ended, or a budget was changed


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Limits and periods of the service; `config.py` reads them, tests set them."""

    data_dir: Path
    roots: tuple[Path, ...] = ()  # where names in a job may resolve to, besides uploads
    heartbeat_s: float = 10.0
    lost_after_s: float = 35.0  # silence after which a worker is gone and its leases are re-issued
    restart_grace_s: float = 60.0  # live deadlines move to at least now + this after a coordinator restart
    lease_min_s: float = 30.0
    lease_max_s: float = 3600.0
    slowest_tokens_per_s: float = 0.2  # a lease's wall deadline assumes no slower than this
    fastest_tokens_per_s: float = 5e5  # a completion quicker than this is impossible
    strikes_to_quarantine: int = 5
    peer_networks: tuple[str, ...] = ()
    upload_limit_bytes: int = 1 << 30
    minimum_free_bytes: int = 256 << 20
    max_running_jobs: int = 1
    allow_scripted: bool = False  # scripted engines prove nothing; tests and load runs only
    quarantine_s: float = 3600.0  # after which a quarantined worker may try again; its strikes stay
    paused_learner_s: float = 900.0  # after which a paused job gives back its learner and its place
    tidy_s: float = 3600.0  # between two looks at what is on disk and needed no more


class Wakeups:
    """Tells waiting coroutines that rows of a job changed. Level-triggered: a waiter re-reads the rows after waking."""

    def __init__(self) -> None:
        self._waiters: dict[str, set[asyncio.Event]] = {}

    def notify(self, topic: str) -> None:
        """Wake everyone waiting on `topic` (a job id, "jobs", "workers", VERSIONS, NEWS or QUOTES)."""
        for event in self._waiters.get(topic, ()):
            event.set()

    def watch(self, topic: str) -> Watch:
        """Register before reading the rows, so that a change between reading and waiting is not missed."""
        return Watch(self._waiters, topic)


class Watch:
    """One registration; use as a context manager."""

    def __init__(self, waiters: dict[str, set[asyncio.Event]], topic: str) -> None:
        self._waiters = waiters
        self._topic = topic
        self._event = asyncio.Event()

    def __enter__(self) -> Watch:
        self._waiters.setdefault(self._topic, set()).add(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        group = self._waiters[self._topic]
        group.discard(self._event)
        if not group:
            del self._waiters[self._topic]

    def take(self) -> bool:
        """Whether notified since the last wait or take."""
        was_set = self._event.is_set()
        self._event.clear()
        return was_set

    async def wait(self, timeout_s: float) -> bool:
        """True when notified since the last wait, False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class PromptBuffer:
    """Rendered prompts by group number, ready before a grant needs them (rendering happens in another process)."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}

    def get(self, number: int) -> Prompt | None:
        """The prompt of group `number`; None when it is not ready (it will be: `prompting.keep_prompts` fills ahead)."""
        return self._prompts.get(number)

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Those of `numbers` that are not rendered yet."""
        return [number for number in numbers if number not in self._prompts]

    def fill(self, prompts: dict[int, Prompt], first_needed: int) -> None:
        """Add prompts and forget those below `first_needed`."""
        self._prompts.update(prompts)
        for number in [n for n in self._prompts if n < first_needed]:
            del self._prompts[number]


@dataclass(slots=True)
class LiveJob:
    """The parts of a job that run in this process: absent while the job is not running."""

    plane: DataPlane
    prompts: PromptBuffer = field(default_factory=PromptBuffer)


def _no_fault(name: str) -> None:
    """Outside crash tests a commit point does nothing."""


@dataclass(frozen=True, slots=True)
class Deps:
    """Everything a command may touch."""

    store: Store
    blobs: Blobs
    clock: Clock
    settings: ServiceSettings
    key: Ed25519PrivateKey  # the coordinator's identity
    started_at: float
    wake: Wakeups = field(default_factory=Wakeups)
    live: dict[str, LiveJob] = field(default_factory=dict)  # job id -> running parts
    presence: Presence = field(default_factory=Presence)  # when workers were last heard, between two flushes
    control: ControlUse = field(default_factory=ControlUse)
    market: MarketBoard = field(default_factory=MarketBoard)  # the newest verdicts
    rentals: RentalDesk = field(default_factory=RentalDesk)  # what could be rented, and what the market wants of it
    transfers: Transfers = field(default_factory=Transfers)  # edges that are being encoded
    pieces: asyncio.Lock = field(default_factory=asyncio.Lock)  # from encoding to the row, and while pieces are removed
    lag: LoopLag = field(default_factory=LoopLag)  # of the event loop, lately
    plans: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # each takes a core for seconds
    reach: Callable[[str], None] = _no_fault  # called at named commit points
