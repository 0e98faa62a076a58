"""Unknown keys: the nearest one, wherever it is."""

from __future__ import annotations

import pytest

from coordinator.wire.job import JobConfig
from coordinator.wire.keys import about_unknown


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("budgets",), "did you mean budget?"),
        (("algorithm", "groupsize"), "did you mean algorithm.group_size?"),
        (("group_size",), "did you mean algorithm.group_size?"),
        (("environment", "sources", 1, "wieght"), "did you mean environment.sources.1.weight?"),
        (("lora", "ranks"), "did you mean lora.rank?"),
        (("budget", "zzz"), "known here: steps, usd, usd_per_hour, deadline_hours"),
        (("nowhere", "zzz"), "correct its spelling"),
        (("algorithm", "betas", "zzz"), "correct its spelling"),
    ],
)
def test_the_nearest_key(place: tuple[str | int, ...], words: str) -> None:
    """In its own section first, then by its name anywhere; else what the section knows."""
    assert about_unknown(JobConfig, place) == words


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_sampling_filters_get_the_true_reason(key: str) -> None:
    """They are left out on purpose, not by oversight."""
    assert about_unknown(JobConfig, ("sampling", key)).startswith("training takes no sampling filters, since")
