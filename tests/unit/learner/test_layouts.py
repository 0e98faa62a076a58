"""Packed or padded, any architecture of the list: the log-probs are those of the model's own logits, one rollout at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.learner import attention, collate, generate, step
from coordinator.learner.batch_file import Batch
from coordinator.learner.model import ARCHITECTURES, Policy
from tests.unit.learner.test_collate import with_lengths

WINDOW = 4  # shorter than most rollouts, so that the layers that look back a little only are told from the others
TEMPERATURE = 0.7
EXACT = {"gemma2": 1e-6}  # its own attention takes the softmax in float32, whatever comes in


def policy_of(kind: str) -> Policy:
    """A random model of two layers, in float64; the config's own switches (scales, caps, windows) are on where it has them."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 1,
    }
    extra = {"granite": {"logits_scaling": 3.0}, "gemma3_text": {"final_logit_softcapping": 2.0}}
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **extra.get(kind, {})))
    return Policy(built.double().eval(), Path("/none"), 32, (1,))


def plain(policy: Policy, batch: Batch) -> list[list[float]]:
    """By the model's own forward pass, a rollout at a time, padding nowhere."""
    found, prompt_at, token_at = [], 0, 0
    for prompt_length, length in zip(batch.prompt_lengths, batch.lengths, strict=True):
        ids = np.concatenate([batch.prompt_ids[prompt_at:][:prompt_length], batch.token_ids[token_at:][:length]])
        with torch.no_grad():
            logits = policy.model(input_ids=torch.from_numpy(ids[None]).long(), use_cache=False).logits[0] / TEMPERATURE
        every = torch.log_softmax(logits, dim=-1)
        found.append([float(every[place - 1, ids[place]]) for place in range(prompt_length, len(ids))])
        prompt_at, token_at = prompt_at + prompt_length, token_at + length
    return found


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_both_layouts_give_the_models_own_log_probs(made: ModuleType, kind: str) -> None:
    policy, batch = policy_of(kind), made.batch(seed=2)
    expected = plain(policy, batch)
    signal = collate.signal_of(batch, made.config())
    order = [3, 0, 7, 5, 1, 2, 6, 4]
    attention.prepare(policy.model)
    for arrange in (collate.collate, collate.pack):
        micro = arrange(batch, signal, order)
        with torch.no_grad():
            logprobs, entropy = step.token_logprobs(policy, micro, TEMPERATURE)
        for place, row in enumerate(order):
            assert logprobs[place][: batch.lengths[row]].tolist() == pytest.approx(expected[row], rel=EXACT.get(kind, 1e-9))
        assert float(entropy[micro.sampled].min()) > 0
        assert not bool(logprobs[~micro.sampled].any())


def test_a_packed_micro_batch_is_one_sequence(made: ModuleType) -> None:
    batch = with_lengths(made, [(2, 1), (1, 3)])
    batch = replace(batch, sampled=np.array([True, True, False, True]))
    micro = collate.pack(batch, collate.signal_of(batch, made.config()), [1, 0])
    assert micro.input_ids.tolist() == [[102, 501, 502, 503, 100, 101, 500]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert micro.attention_mask is None
    assert micro.segments is not None
    assert (micro.segments.rows, micro.segments.width, micro.segments.cells.tolist()) == (2, 4, [0, 1, 2, 3, 4, 5, 6])
    assert micro.before.tolist() == [0, 2, 5]  # after 102 came 501, after 502 came 503, after 101 came 500
    assert micro.cells.tolist() == [0, 2, 3]
    assert micro.targets.tolist() == [[501, 502, 503], [500, 0, 0]]
    assert micro.sampled.tolist() == [[True, False, True], [True, False, False]]


@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20), budget=st.integers(1, 200))
def test_packing_places_every_rollout_once_and_keeps_to_the_budget(
    made: ModuleType, pairs: list[tuple[int, int]], budget: int
) -> None:
    parts = collate.split_packed(with_lengths(made, pairs), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(pairs)))
    for part in parts:
        assert sum(sum(pairs[row]) for row in part) <= budget or len(part) == 1


@settings(max_examples=40, deadline=None)
@given(longest=st.integers(1, 400), others=st.lists(st.integers(2, 40), min_size=1, max_size=30), budget=st.integers(64, 512))
def test_one_long_rollout_does_not_blow_up_attention(made: ModuleType, longest: int, others: list[int], budget: int) -> None:
    """Lengths have long tails: 1 of 8000 tokens and 80 of 100 are 16,000 tokens, and would be a rectangle of 648,000 cells."""
    batch = with_lengths(made, [(longest, 1), *((1, length - 1) for length in others)])
    signal = collate.signal_of(batch, made.config())
    for part in collate.split_packed(batch, budget):
        spread = collate.pack(batch, signal, part).segments
        assert spread is not None
        assert spread.rows * spread.width <= collate.MOST_SPREAD * budget or len(part) == 1


def test_rollouts_of_one_length_fill_the_budget(made: ModuleType) -> None:
    parts = collate.split_packed(with_lengths(made, [(4, 4)] * 20), 64)
    assert [len(part) for part in parts] == [8, 8, 4]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_a_prepared_model_still_decodes_as_it_did(made: ModuleType, kind: str) -> None:
    """Prompts of unequal lengths, padded on the left, a token at a time through the cache."""
    policy, prompts = policy_of(kind), ((3, 4, 5, 6, 7, 8, 9), (10,), (11, 12))
    settings = {"stop_token_ids": (1,), "token_budget": 999}
    before = [generate.greedy(policy, (prompt,), max_new_tokens=(6,), **settings)[0] for prompt in prompts]
    attention.prepare(policy.model)
    assert list(generate.greedy(policy, prompts, max_new_tokens=(6, 6, 6), **settings)) == before
