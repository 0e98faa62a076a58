"""What the audit says about turns that do not add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.domain.audit_turns import CountedTurn, counted, turn_findings
from coordinator.domain.model import RolloutState, Turn


def story(make_rollout: Any, make_lease: Any) -> tuple[Any, dict[str, Any], list[CountedTurn]]:
    """A slot at its third turn, and the two before it."""
    rollout = make_rollout(group_id="g", slot=0, state=RolloutState.OPEN, turn=2, preceding=5, oldest_version=1)
    leases = {f"l{n}": make_lease(id=f"l{n}", group_id="g", slots=(0,), worker_id=f"w{n}") for n in range(2)}
    common = {"group_id": "g", "slot": 0, "job_id": rollout.job_id, "blob": "b", "blob_start": 0, "length": 1}
    rest = {"stop_reason": "stop", "generate_s": 0.1, "accepted_at": 1.0}
    turns = [
        counted(Turn(turn=n, lease_id=f"l{n}", worker_id=f"w{n}", token_ids=tokens, **common, **rest))  # type: ignore[arg-type]
        for n, tokens in enumerate([(1, 2, 3), (1, 2)])
    ]
    return rollout, leases, turns


def test_turns_that_add_up_are_no_finding(make_rollout: Any, make_lease: Any) -> None:
    rollout, leases, turns = story(make_rollout, make_lease)
    assert list(turn_findings([rollout], leases, turns)) == []
    assert list(turn_findings([make_rollout()], {}, [])) == []


def test_what_does_not_add_up_is_named(make_rollout: Any, make_lease: Any) -> None:
    rollout, leases, turns = story(make_rollout, make_lease)
    first, second = turns
    cases = {
        "is at turn 2 and has rows of turns [0] before it": ([rollout], leases, [first]),
        "says that 6 tokens precede turn 2, its turns have 5": ([replace(rollout, preceding=6)], leases, turns),
        "has 2 turns and no policy version": ([replace(rollout, oldest_version=None)], leases, turns),
        "has 2 turns and no rollout": ([], leases, turns),
        "turn 0 was settled under lease l0, which does not hold it": ([rollout], {"l1": leases["l1"]}, turns),
        "turn 1 was settled by worker w9, lease l1 is worker w1's": ([rollout], leases, [first, replace(second, worker_id="w9")]),
        "turn 1 has 3 sampled tokens of 2": ([rollout], leases, [first, replace(second, length=3)]),
    }
    for words, rows in cases.items():
        assert any(words in finding for finding in list(turn_findings(*rows))), words
