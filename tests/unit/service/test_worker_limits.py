"""Buckets, nonces and byte budgets."""

from __future__ import annotations

from coordinator.service.worker_limits import ByteBudget, NonceMemory, TokenBuckets
from coordinator.wire.signing import NONCE_KEPT_S


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    buckets = TokenBuckets(rate_s=2.0, burst=3.0, most=10)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [0.0] * 3
    assert buckets.take("a", 0.0) == 0.5, "one token comes every half second"
    assert buckets.take("b", 0.0) == 0.0, "names do not share"
    assert buckets.wait_s("a", 0.25) == 0.25
    assert buckets.take("a", 0.5) == 0.0
    assert buckets.take("a", 0.4) > 0.0, "a clock that goes back gives nothing"
    assert [buckets.take("a", 100.0) for _ in range(4)][:3] == [0.0] * 3


def test_names_beyond_the_bound_are_forgotten_oldest_first() -> None:
    buckets = TokenBuckets(rate_s=1.0, burst=1.0, most=2)
    for name in ("a", "b", "c"):
        buckets.take(name, 0.0)
    assert buckets.wait_s("a", 0.0) == 0.0, "forgotten"
    assert buckets.wait_s("c", 0.0) > 0.0


def test_a_nonce_is_good_once_for_its_time() -> None:
    memory = NonceMemory(most=100)
    nonce = "ab" * 16
    assert memory.remember("w-1", nonce, 1000.0)
    assert memory.remember("w-2", nonce, 1000.0), "another worker's"
    for later in (0.0, 1.0, NONCE_KEPT_S - 0.001, NONCE_KEPT_S):
        assert not memory.remember("w-1", nonce, 1000.0 + later)
    assert memory.remember("w-1", nonce, 1000.0 + 10 * NONCE_KEPT_S)


def test_nonces_survive_a_turn_of_generations() -> None:
    memory = NonceMemory(most=100)
    memory.remember("w", "00" * 16, 1000.0)
    memory.remember("w", "01" * 16, 1000.0 + NONCE_KEPT_S - 1)
    assert not memory.remember("w", "01" * 16, 1000.0 + NONCE_KEPT_S + 1)
    assert not memory.remember("w", "01" * 16, 1000.0 + 2 * NONCE_KEPT_S - 2)


def test_a_full_memory_says_so_until_a_generation_is_forgotten() -> None:
    memory = NonceMemory(most=2)
    for n in range(2):
        memory.remember("w", f"{n:032x}", 1000.0)
    assert memory.is_full(1001.0)
    assert not memory.is_full(1000.0 + 2 * NONCE_KEPT_S)


def test_bytes_are_held_up_to_the_budget() -> None:
    budget = ByteBudget(10)
    assert budget.reserve(6)
    assert not budget.reserve(5)
    assert budget.reserve(4)
    budget.release(6)
    assert budget.reserve(6)
