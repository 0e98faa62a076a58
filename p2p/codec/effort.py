"""Which coding a publisher takes for a shard: the quicker or the smaller, by what its link and its cores can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from p2p.codec.changes import Changes, Part
from p2p.codec.records import DENSE, FAST, GROUPED, Choose
from p2p.codec.words import WordKind, Words

Effort = Literal["fast", "grouped", "dense", "auto"]
MODES: Mapping[Effort, int] = {"fast": FAST, "grouped": GROUPED, "dense": DENSE}

# Measured on one core with real deltas of 1.4 to 14 % changed, BLAKE3 included: seconds a byte of the shard, and a change.
_ENCODE = {FAST: (0.25e-9, 24e-9), GROUPED: (0.7e-9, 33e-9), DENSE: (1.15e-9, 44e-9)}
_APPLY = {FAST: (0.17e-9, 5e-9), GROUPED: (0.7e-9, 12e-9), DENSE: (0.5e-9, 40e-9)}
_SAVED = {FAST: 0.0, GROUPED: 0.85, DENSE: 1.4}  # of what knowing the exponents takes from the entropy of the positions
_LEAST_SHARE = 0.6  # of fast's bytes: no coding was seen to do better
_SAMPLE = 1 << 14


@dataclass(frozen=True, slots=True)
class Auto:
    """The coding by which a worker has the shard soonest; a tie goes to the less work.

    Encoding and sending overlap shard by shard, so the slower of the two decides. Applying does not: pieces come in any order, so
    most shards are whole only near the end. Workers are taken to have as many cores as this publisher.
    """

    link_bytes_per_s: float
    cores: int

    def __call__(self, kind: WordKind, words: Words, part: Part) -> int:
        """The mode for a shard that starts with `part`, whose words in the base are `words`."""
        fast = fast_bytes(len(part.changes), len(words))
        known = known_bytes(kind, words, part.changes)
        return min(_SAVED, key=lambda mode: self._seconds(mode, words.nbytes, len(part.changes), fast, known))

    def _seconds(self, mode: int, nbytes: int, count: int, fast: float, known: float) -> float:
        sent = max(fast - _SAVED[mode] * known, _LEAST_SHARE * fast)
        encode, apply = (nbytes * a_byte + count * a_change for a_byte, a_change in (_ENCODE[mode], _APPLY[mode]))
        return max(encode / self.cores, sent / self.link_bytes_per_s) + apply / self.cores


def known_bytes(kind: WordKind, words: Words, changes: Changes) -> float:
    """What the words' exponents tell of where the changes are, by a sample: none where all words change as often.

    The mutual information of class and change, the difference of H(changed) and H(changed | class).
    """
    shift, mask = kind.exponent
    step, stride = max(1, len(words) // _SAMPLE), max(1, len(changes) // _SAMPLE)
    held, moved = words[::step], words[changes.positions[::stride]]
    moved_counts = np.bincount((moved >> shift) & mask, minlength=kind.classes) * (len(changes) / max(1, len(moved)))
    counts = np.bincount((held >> shift) & mask, minlength=kind.classes) * (len(words) / max(1, len(held)))
    # A class that the sample missed has at least its changes.
    counts = np.maximum(counts, moved_counts)
    together = _entropy_bits(np.array([float(len(words))]), np.array([float(len(changes))]))
    return max(0.0, together - _entropy_bits(counts, moved_counts)) / 8


def _entropy_bits(counts: NDArray[np.floating[Any]], moved: NDArray[np.floating[Any]]) -> float:
    """Of which of so many words are the so many that changed, class by class."""
    share = np.divide(moved, counts, out=np.zeros_like(moved), where=counts > 0)
    mixed = (share > 0) & (share < 1)
    p, n = share[mixed], counts[mixed]
    return float(-(n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))).sum())


def fast_bytes(count: int, elements: int) -> float:
    """About what the fast coding takes: gaps at their entropy, a sign bit, half a bit for larger changes."""
    if count == 0:
        return 0.0
    share = count / elements
    rest = -(1 - share) * math.log2(1 - share) / share if share < 1 else 0.0
    return count * (-math.log2(share) + rest + 1.5) / 8


def chooser(effort: Effort, link_bytes_per_s: float, cores: int) -> Choose:
    """How `records.encode` shall choose."""
    if effort == "auto":
        return Auto(link_bytes_per_s, cores)
    mode = MODES[effort]
    return lambda _kind, _words, _part: mode
