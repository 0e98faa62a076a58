"""What a scripted engine answers to a canary: a function of the digest alone, known to both sides."""

from __future__ import annotations

from blake3 import blake3

_DEEPEST = 9.0


def scripted_canary(digest: str, length: int) -> tuple[float, ...]:
    """`length` log-probs in (-10, -1]: value i is -(1 + 9 u_i), u_i from 8 bytes of BLAKE3 of digest and i."""
    return tuple(-(1.0 + _DEEPEST * _uniform(digest, index)) for index in range(length))


def _uniform(digest: str, index: int) -> float:
    word = blake3(f"echo2-canary {digest} {index}".encode()).digest()[:8]
    return int.from_bytes(word, "little") / 2**64
