"""Valid rows for the store's tests, overridden by keyword."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.domain.model import Event, Group, GroupState, Rollout, RolloutState, Worker, WorkerState


class Make:
    """Rows that are valid by default."""

    def group(self, number: int = 0, **changes: Any) -> Group:
        values: dict[str, Any] = {"id": f"group_{number}", "job_id": "job", "number": number, "prompt_index": number}
        values |= {"prompt_ids": (1, 2, 3), "size": 4, "state": GroupState.ISSUED, "issued_at": 10.0}
        return Group(**(values | changes))

    def rollout(self, slot: int = 0, **changes: Any) -> Rollout:
        values: dict[str, Any] = {"group_id": "group_0", "slot": slot, "job_id": "job", "group_number": 0}
        return Rollout(**(values | {"state": RolloutState.OPEN} | changes))

    def worker(self, name: str = "a", **changes: Any) -> Worker:
        values: dict[str, Any] = {"id": f"worker_{name}", "public_key": f"key_{name}", "name": name, "owner": "o", "invite_id": "i"}
        values |= {"state": WorkerState.STANDBY, "reason": "", "state_since": 1.0, "joined_at": 1.0, "last_seen_at": 1.0}
        values |= {"session_epoch": 1, "engine": {"name": "torch"}, "price_uusd_per_hour": 350_000, "max_slots": 8}
        return Worker(**(values | changes))

    def event(self, seq: int, **changes: Any) -> Event:
        values: dict[str, Any] = {"job_id": "job", "seq": seq, "at": float(seq), "kind": "step", "data": {}}
        return Event(**(values | changes))


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def putting() -> Callable[..., Any]:
    """An action that puts rows."""

    def action_of(*rows: object) -> Any:
        async def action(tx: Any) -> None:
            await tx.put(*rows)

        return action

    return action_of
