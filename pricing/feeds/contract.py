"""One contract for every provider of machines: search, create, get, list by label, destroy.

An adapter (`Feed`) does no I/O. It builds a `Call` and reads the `Answer`; the shell sends the call and adds the key, which an adapter
never sees. What goes wrong is a value (`Failed`), because what follows depends on it: see `pricing.rentals`. After a create that failed
in any way the machine may exist all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

MOST_BODY_BYTES = 8 << 20
MOST_WORDS = 300


class Trouble(StrEnum):
    """Why a call brought nothing."""

    RETRY_AFTER = "retry_after"  # too many calls: wait
    GONE = "gone"  # the offer or the machine is not there (any more)
    NO_CAPACITY = "no_capacity"  # this candidate cannot be had, or breaks a rule: another one may
    NO_BALANCE = "no_balance"  # the account is empty: nothing can be had
    REFUSED = "refused"  # the same call will fail again: key, scope or contract
    MALFORMED = "malformed"  # an answer came and cannot be read
    UNKNOWN = "unknown"  # no answer, or one that says nothing: it may have worked


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `path` starts with a slash; `body` is sent as JSON; no credential is in here."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, Any] | None = field(default=None, repr=False)  # holds the machine's invite


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply. Header names are in lower case; `at` is the provider's clock (its Date header), Unix seconds, None: it did not say."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """What a call brought instead of an answer. `instance_id`: a machine that the error itself names."""

    trouble: Trouble
    words: str
    retry_after_s: float | None = None
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a machine must have."""

    cards: tuple[str, ...] = ()  # names as the provider shows them; empty: any
    min_vram_mb: int = 0  # of one card
    most_uusd_per_hour: int = 10_000_000  # of the whole machine; dearer offers are left out
    disk_gb: int = 40
    min_reliability: float = 0.0
    min_down_mbps: float = 0.0  # claimed
    most_uusd_per_gb: int = 10_000_000  # of traffic, either way; dearer offers are left out
    limit: int = 64  # offers asked for


@dataclass(frozen=True, slots=True)
class RentalOffer:
    """A machine that a provider would rent.

    Attributes:
        provider, id: whose offer, and its name there.
        machine: key of the machine, for cool-downs; "" where the provider does not say.
        card, cards, vram_mb: name, number, memory of one card in MB.
        uusd_per_hour: the whole machine, with the disk that was asked for.
        min_bid_uusd_per_hour: for an interruptible machine; None: not offered.
        uusd_per_gb_up, uusd_per_gb_down: traffic, per 10^9 bytes.
        up_mbps, down_mbps: claimed, Mbit/s, read in the way that is worst for us; None: not stated.
        reliability: 0 to 1; None: not stated.
        region: free text.
        most_hours: it can be had no longer; None: not stated.
        fetched_at: Unix seconds of the coordinator's clock.
        tier: what the provider needs to hear again in a create (RunPod: the cloud).
    """

    provider: str
    id: str
    card: str
    uusd_per_hour: int
    machine: str = ""
    cards: int = 1
    vram_mb: int = 0
    min_bid_uusd_per_hour: int | None = None
    uusd_per_gb_up: int = 0
    uusd_per_gb_down: int = 0
    up_mbps: float | None = None
    down_mbps: float | None = None
    reliability: float | None = None
    region: str = ""
    most_hours: float | None = None
    fetched_at: float = 0.0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Offers:
    """What a search brought; `skipped` says of each unreadable offer which field was wrong."""

    offers: tuple[RentalOffer, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spec:
    """What runs on the machine. `env` holds the single-use invite; `bid_uusd_per_hour`: None for a machine that is not interruptible."""

    image: str
    script: str
    env: Mapping[str, str] = field(repr=False)
    disk_gb: int = 40
    bid_uusd_per_hour: int | None = None


class Shown(StrEnum):
    """What the provider says of a machine."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"  # outbid, or stopped: it bills for its disk
    GONE = "gone"  # over: it bills for nothing
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Handle:
    """One machine as the provider shows it.

    Attributes:
        id, label: its name there, and the one that we gave it.
        state: see `Shown`.
        uusd_per_hour: what it costs now; None: not stated.
        started_at: since when it is billed, by the provider's clock; None: not stated.
        words: the provider's own.
    """

    id: str
    label: str
    state: Shown
    uusd_per_hour: int | None = None
    started_at: float | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list. `next_page`: what to ask for next; None: this was the last. `skipped`: records that could not be read."""

    handles: tuple[Handle, ...]
    next_page: str | None = None
    skipped: tuple[str, ...] = ()


class Feed(Protocol):
    """A provider's language."""

    @property
    def name(self) -> str: ...

    @property
    def farewell(self) -> str:
        """The shell command by which a machine ends itself, with a key of its own; "" where there is none."""
        ...

    def search(self, need: Need) -> Call: ...

    def offers(self, answer: Answer, need: Need, *, now: float) -> Offers | Failed: ...

    def create(self, offer: RentalOffer, spec: Spec, label: str) -> Call: ...

    def created(self, answer: Answer, label: str) -> Handle | Failed: ...

    def get(self, instance_id: str) -> Call: ...

    def got(self, answer: Answer) -> Handle | Failed: ...

    def list(self, label_prefix: str, page: str | None) -> Call: ...

    def listed(self, answer: Answer, label_prefix: str) -> Page | Failed: ...

    def destroy(self, instance_id: str) -> Call: ...

    def destroyed(self, answer: Answer) -> Failed | None:
        """None: the provider took the order, or has no such machine."""
        ...
