"""The grant rule (DESIGN 4.1): how many whole groups may be issued to a worker that holds version x.

With t committed steps and n groups issued and not yet settled, g more groups are allowed iff
``t + (n + g - 1) // B <= x + S``: even if all unsettled groups are trained first, in order, the last of the new ones is
trained by step x + S. The planned number of steps T bounds it too: nothing is issued that no step will need.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """How many groups may be issued now, and why not more."""

    groups: int
    reason: str


def grantable(
    *, committed_steps: int, unsettled: int, groups_per_step: int, bound: int, held_version: int, planned_steps: int
) -> Grant:
    """The most groups g >= 0 that the rule allows for a worker holding `held_version`."""
    by_bound = groups_per_step * (held_version + bound - committed_steps + 1) - unsettled
    by_plan = groups_per_step * (planned_steps - committed_steps) - unsettled
    if by_plan <= 0:
        return Grant(0, f"every group of the remaining {max(planned_steps - committed_steps, 0)} steps is issued")
    if by_bound <= 0:
        return Grant(
            0,
            f"version {held_version} can serve steps up to {held_version + bound}; "
            f"{unsettled} unsettled groups fill them (step {committed_steps}, {groups_per_step} groups a step)",
        )
    return Grant(min(by_bound, by_plan), f"{min(by_bound, by_plan)} groups fit before step {held_version + bound}")
