"""Everything drawn at random is a function of the job's seed, so that a replay and a re-lease draw the same."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from blake3 import blake3

CANARY_TOKENS = 24


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for a named purpose: BLAKE3 over the parts, length-prefixed."""
    state = blake3(str(seed).encode())
    for part in parts:
        word = str(part).encode()
        state.update(len(word).to_bytes(4, "little") + word)
    return int.from_bytes(state.digest()[:8], "little") >> 1


def slot_seed(job_seed: int, group_number: int, slot: int, turn: int = 0) -> int:
    """The sampling seed of a slot's turn; the attempt is deliberately not part of it."""
    return derive(job_seed, "slot", group_number, slot, *([turn] if turn else []))


def prompt_index(job_seed: int, number: int, prompts: int | None) -> int:
    """Which prompt group `number` carries: each epoch is a fresh permutation; endless splits count up."""
    if prompts is None:
        return number
    epoch, place = divmod(number, prompts)
    return permutation(derive(job_seed, "epoch", epoch), prompts)[place]


@lru_cache(maxsize=4)
def permutation(seed: int, length: int) -> tuple[int, ...]:
    """A permutation of range(length); the current epochs are cached, since every group asks for one place in it."""
    return tuple(shuffled(seed, length))


def shuffled(seed: int, length: int) -> list[int]:
    """The numbers of range(length) in an order drawn from the seed."""
    order = list(range(length))
    Random(seed).shuffle(order)  # noqa: S311 (seeded on purpose)
    return order


def canary_ids(job_seed: int, vocab_size: int) -> tuple[int, ...]:
    """The fixed token sequence whose log-probs prove which bits an engine holds."""
    draw = Random(derive(job_seed, "canary"))  # noqa: S311 (seeded on purpose)
    return tuple(draw.randrange(vocab_size) for _ in range(CANARY_TOKENS))
