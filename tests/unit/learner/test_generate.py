"""Greedy completions: the same as transformers' own, whatever is batched with what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.learner import generate, model
from coordinator.learner.model import Policy

PROMPTS = tuple(tuple(2 + (place * 7 + offset * 3) % 30 for offset in range(1 + place % 5)) for place in range(9))


@pytest.fixture(scope="module")
def policy(tiny: Path) -> Policy:
    """With weights that bf16 holds exactly, so that plain generation sees the published bits."""
    loaded = model.load(tiny)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return loaded


def plain(policy: Policy, prompt: tuple[int, ...], stop: tuple[int, ...], cap: int) -> tuple[int, ...]:
    """One prompt, the whole sequence anew for each token."""
    ids = list(prompt)
    while len(ids) - len(prompt) < cap:
        with torch.no_grad():
            ids.append(int(policy.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop:
            break
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_batches_of_any_size_give_each_prompts_own_completion(policy: Policy, budget: int) -> None:
    stop = (plain(policy, PROMPTS[3], (), 3)[-1], 1)
    expected = tuple(plain(policy, prompt, stop, 12) for prompt in PROMPTS)
    found = generate.greedy(policy, PROMPTS, max_new_tokens=[12] * len(PROMPTS), stop_token_ids=stop, token_budget=budget)
    assert found == expected
    assert any(len(each) < 12 for each in found)
    assert any(each[-1] in stop for each in found)


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_each_prompt_may_have_a_limit_of_its_own(policy: Policy, budget: int) -> None:
    """As rollouts of several turns have, each with what its turns before left."""
    limits = [1 + (place * 5) % 12 for place in range(len(PROMPTS))]
    limits[4] = 0
    found = generate.greedy(policy, PROMPTS, max_new_tokens=limits, stop_token_ids=(1,), token_budget=budget)
    assert found == tuple(plain(policy, prompt, (1,), limit) for prompt, limit in zip(PROMPTS, limits, strict=True))
    assert found[4] == ()


def test_the_stop_token_is_the_last_one_given(policy: Policy) -> None:
    first = plain(policy, PROMPTS[0], (), 1)
    assert generate.greedy(policy, PROMPTS[:1], max_new_tokens=(9,), stop_token_ids=first, token_budget=99) == (first,)


def test_no_prompts_and_no_tokens_are_no_fault(policy: Policy) -> None:
    assert generate.greedy(policy, (), max_new_tokens=(), stop_token_ids=(1,), token_budget=99) == ()
    assert generate.greedy(policy, PROMPTS[:2], max_new_tokens=(0, 0), stop_token_ids=(1,), token_budget=99) == ((), ())


def test_it_speaks_for_the_published_bits_not_the_masters(tiny: Path) -> None:
    policy = model.load(tiny)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.02)
    found = generate.greedy(policy, PROMPTS, max_new_tokens=[20] * len(PROMPTS), stop_token_ids=(1,), token_budget=999)
    with model.published_bits(policy):
        expected = tuple(plain(policy, prompt, (1,), 20) for prompt in PROMPTS)
    assert found == expected
