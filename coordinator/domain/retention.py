"""How long token arrays of settled groups are kept. Texts, rewards and metrics are kept for good: they are rows."""

from __future__ import annotations

from collections.abc import Sequence


def first_kept(newest: Sequence[Sequence[int]], *, keep: int, lowest_unsettled: int | None, highest: int) -> int:
    """The lowest group number whose token arrays are kept; those of every group below it may go.

    `newest` are the group numbers of the newest `keep + 1` batches, newest first: fewer mean that no batch is old enough, and
    everything stays. A group that was never trained goes with its neighbours by number. `highest`: of any group; -1: none.
    """
    if len(newest) <= keep:
        return 0
    kept = [number for groups in newest[:keep] for number in groups]
    if lowest_unsettled is not None:
        kept.append(lowest_unsettled)
    return min(kept, default=highest + 1)
