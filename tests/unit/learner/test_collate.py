"""Who is trained, how rollouts are grouped, and where their tokens land."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learner import collate
from coordinator.learner.batch_file import Batch


def with_lengths(made: ModuleType, pairs: list[tuple[int, int]]) -> Batch:
    """A batch with the given (prompt, completion) lengths; every token id is unique modulo the vocabulary."""
    prompts, lengths = (np.array(each, np.int32) for each in zip(*pairs, strict=True))
    return made.batch(
        prompt_lengths=prompts,
        lengths=lengths,
        prompt_ids=np.arange(prompts.sum(), dtype=np.int32) + 100,
        token_ids=np.arange(lengths.sum(), dtype=np.int32) + 500,
        logprobs=-np.arange(lengths.sum(), dtype=np.float32),
        versions=np.zeros(lengths.sum(), np.int32),
        rewards=np.arange(len(pairs), dtype=np.float32),
        group=np.zeros(len(pairs), np.int32),
        truncated=np.zeros(len(pairs), np.uint8),
        weight=np.ones(len(pairs), np.float32),
    )


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20), budget=st.integers(1, 200))
def test_split_places_every_rollout_once_and_keeps_to_the_budget(
    made: ModuleType, pairs: list[tuple[int, int]], budget: int
) -> None:
    parts = collate.split(with_lengths(made, pairs), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(pairs)))
    for part in parts:
        padded = len(part) * (max(pairs[row][0] for row in part) + max(pairs[row][1] for row in part))
        assert padded <= budget or len(part) == 1


def test_collate_puts_completions_in_one_rectangle(made: ModuleType) -> None:
    batch = with_lengths(made, [(2, 1), (1, 3)])
    signal = collate.signal_of(batch, made.config(advantage="mean"))
    micro = collate.collate(batch, signal, [1, 0])
    assert micro.input_ids.tolist() == [[0, 102, 501, 502, 503], [100, 101, 500, 0, 0]]
    assert micro.attention_mask.tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 2, 2]]
    assert micro.targets.tolist() == [[501, 502, 503], [500, 0, 0]]
    assert micro.sampler.tolist() == [[-1, -2, -3], [0, 0, 0]]
    assert micro.sampled.tolist() == [[True, True, True], [True, False, False]]
    assert micro.age.tolist() == [[3, 3, 3], [3, 0, 0]]
    assert micro.weights.tolist() == [[0.25, 0.25, 0.25], [0.25, 0, 0]]
    assert micro.advantages.tolist() == [0.5, -0.5]


def test_who_is_trained_and_what_counts(made: ModuleType) -> None:
    """Truncated and zero-weight rollouts stay in the baseline; a missing score is out of both."""
    batch = made.batch(
        lengths=np.array([1, 2, 4, 8], np.int32),
        rewards=np.array([1, math.nan, 0, 0.5], np.float32),
        group=np.zeros(4, np.int32),
        truncated=np.array([0, 0, 1, 0], np.uint8),
        weight=np.array([1, 1, 1, 0], np.float32),
    )
    masked = collate.signal_of(batch, made.config(truncated="mask"))
    kept = collate.signal_of(batch, made.config(truncated="keep"))
    assert masked.weights.tolist() == [1, 0, 0, 0]
    assert masked.trained_tokens == 1
    assert kept.weights.tolist() == [0.2, 0, 0.2, 0]
    assert kept.trained_tokens == 1 + 4
    assert masked.advantages.tolist() == [0.5, 0, -0.5, 0]
    assert masked.weights.dtype == torch.float64
