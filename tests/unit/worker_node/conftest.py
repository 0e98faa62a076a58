"""A session in the hands of a test: time is a number, answers are given by hand."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest

from coordinator.wire.messages import Lease, SamplingParameters
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.generation import Completion
from worker_node.domain.session import Session, SessionSettings
from worker_node.domain.weights import Version

Kind = TypeVar("Kind")


def version(number: int = 0, *, job: str = "job", digest: str | None = None) -> Version:
    return Version(job, number, digest or f"{number:064x}")


def completion(numbers: tuple[int, ...] = (0, 0)) -> Completion:
    length = len(numbers)
    return Completion(
        token_ids=np.zeros(length, np.int32),
        logprobs=np.full(length, -1.0, np.float32),
        versions=np.array(numbers, np.int32),
        stop_reason="length",
        generate_s=0.1,
    )


def lease(lease_id: str = "L1", *, slots: tuple[int, ...] = (0, 1), job: str = "job", **changes: Any) -> Lease:
    values: dict[str, Any] = {
        "lease_id": lease_id,
        "job_id": job,
        "group_id": f"group-{lease_id}",
        "fence": 1,
        "prompt_ids": (1, 2),
        "slots": slots,
        "seeds": tuple(100 + slot for slot in slots),
        "sampling": SamplingParameters(max_new_tokens=4, temperature=1.0, stop_token_ids=(3,)),
        "version": 0,
        "digest": f"{0:064x}",
        "last_step": 4,
        "deadline": 0.0,
        "on_update": "keep",
    }
    return Lease(**{**values, **changes})


class Driver:
    """Feeds a session and keeps what it ordered."""

    def __init__(self, **changes: Any) -> None:
        self.now = 1000.0
        stored = changes.pop("stored", frozenset())
        self.session = Session(SessionSettings(**{"slots": 8, **changes}), rng=Random(1), stored=stored)
        self.new: list[do.Instruction] = []

    def tell(self, event: ev.Event) -> list[do.Instruction]:
        self.new = self.session.handle(event, self.now)
        return self.new

    def wake(self, seconds: float = 0.0) -> list[do.Instruction]:
        self.now += seconds
        return self.tell(ev.Woke())

    def wake_when_due(self) -> list[do.Instruction]:
        due = self.session.next_deadline()
        assert due is not None
        self.now = max(self.now, due)
        return self.tell(ev.Woke())

    def ordered(self, kind: type[Kind]) -> list[Kind]:
        return [instruction for instruction in self.new if isinstance(instruction, kind)]

    def only(self, kind: type[Kind]) -> Kind:
        (found,) = self.ordered(kind)
        return found

    def beat(self, *versions: Version, cancelled: tuple[ev.CancelledLease, ...] = (), **changes: Any) -> list[do.Instruction]:
        values: dict[str, Any] = {"state": "active", "reason": "active", "heartbeat_s": 10.0}
        return self.tell(ev.BeatAnswered(versions=versions, cancelled=cancelled, **{**values, **changes}))

    def fail(self, call: ev.Call, outcome: ev.Outcome = ev.Outcome.TRY_AGAIN, **changes: Any) -> list[do.Instruction]:
        return self.tell(
            ev.CallFailed(call, outcome, changes.pop("code", "timeout"), changes.pop("reason", "no answer"), **changes)
        )

    def join(self, epoch: int = 1) -> list[do.Instruction]:
        self.wake()
        return self.tell(ev.Joined("w-1", epoch, 10.0))

    def fetch(self, wanted: Version) -> list[do.Instruction]:
        """From the manifest's order to the swap's."""
        self.tell(ev.ManifestArrived(wanted))
        return self.tell(ev.FetchFinished(wanted, 100, 40, 2.0))

    def hold(self, wanted: Version) -> list[do.Instruction]:
        """From a fresh session to work being asked for with this version."""
        self.join()
        self.beat(wanted)
        self.fetch(wanted)
        self.tell(ev.SwapFinished(wanted, (-1.0,), 0.5))
        return self.tell(ev.ConfirmAnswered(wanted, accepted=True, reason=""))

    def grant(self, *leases: Lease, ends_in: float = 100.0, epoch: int = 1) -> list[do.Instruction]:
        return self.tell(ev.LeaseAnswered(epoch, tuple(ev.GrantedLease(one, self.now + ends_in) for one in leases), "granted"))

    def finish(self, lease_id: str, slot: int, numbers: tuple[int, ...] = (0, 0)) -> list[do.Instruction]:
        return self.tell(ev.CompletionFinished(lease_id, slot, completion(numbers)))

    def codes(self) -> list[str]:
        return [note.code for note in self.session.report().notes]


@pytest.fixture
def drive() -> Callable[..., Driver]:
    return Driver


@pytest.fixture
def make_version() -> Callable[..., Version]:
    return version


@pytest.fixture
def make_lease() -> Callable[..., Lease]:
    return lease


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    return completion
