"""When weights are published, and which published versions are needed no more (DESIGN 5).

kappa is the number of learner updates between publications. It never exceeds S + 1: with more, the learner would come to a
step that no published version may serve, and wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Literal

PAUSE_SHARE = 0.05  # of the time between publications that a worker may stand still for loading


def kappa(
    setting: int | Literal["auto"],
    *,
    bound: int,
    train_s: float | None,
    bcast_p95_s: float | None,
    pause_s: float | None,
) -> int:
    """Learner updates per publication.

    "auto": the smallest k >= 1 with k * train_s >= bcast_p95_s and pause_s <= 5 % of k * train_s, at most max(1, S - 1).
    A time that is not measured yet (None) asks for nothing.
    """
    if setting != "auto":
        return max(1, min(setting, bound + 1))
    most = max(1, bound - 1)
    needed_s = max(bcast_p95_s or 0.0, (pause_s or 0.0) / PAUSE_SHARE)
    if not train_s or needed_s <= train_s:
        return 1
    if needed_s >= most * train_s:
        return most
    return math.ceil(needed_s / train_s)


def is_due(*, committed_steps: int, published: int | None, kappa: int, planned_steps: int) -> bool:
    """Whether the version after `committed_steps` steps is to be published now; `published` is the newest that is.

    The first version and the last are always published: nothing can start without the one, the other is the result.
    """
    if published is None:
        return True
    if committed_steps <= published:
        return False
    return committed_steps - published >= kappa or committed_steps >= planned_steps


def retired(versions: Iterable[int], *, held_or_leased: Collection[int], newest: int) -> list[int]:
    """Published versions that are older than the newest and that no worker holds, fetches from or is leased, ascending."""
    return sorted(version for version in versions if version < newest and version not in held_or_leased)
