"""One optimiser step, read top to bottom: batch -> signal -> micro-batches -> gradients -> AdamW.

The step is a function of (weights, optimiser state, batch): a replay of the same batch from the same state gives the same
bits, as long as the process computes with one thread and deterministic algorithms (`process.py` sees to that).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coordinator.learner import collate, losses, metrics
from coordinator.learner.batch_file import Batch
from coordinator.learner.model import Policy
from coordinator.wire.job import JobConfig


@dataclass(slots=True)
class Learner:
    """What a step changes: weights, optimiser state, and the count of steps taken (the version of the weights)."""

    policy: Policy
    optimizer: torch.optim.AdamW
    config: JobConfig
    reference: Policy | None  # version 0, frozen; only where the job asks for a KL to it
    step: int = 0
    device: str = "cpu"


def start(policy: Policy, config: JobConfig, *, device: str = "cpu") -> Learner:
    """A learner at step 0: `policy` is version 0, whatever a checkpoint brings later. Weight decay, if any, is for matrices only."""
    rule = config.algorithm
    parameters = list(policy.model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": rule.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(filled, lr=rule.learning_rate, betas=rule.betas)
    return Learner(policy, optimizer, config, policy.frozen_copy() if rule.reference_kl > 0 else None, device=device)


def take_step(learner: Learner, batch: Batch) -> dict[str, float]:
    """Take one step and return its metrics.

    A batch that teaches nothing (every rollout at weight 0, unscored, masked or guarded away; every token's gradient stopped)
    still is a step: the count goes up, weights and optimiser state stay. So does one whose gradient is not finite; its
    grad_norm says so. Both report `optim/applied` 0.
    """
    rule = learner.config.algorithm
    learner.optimizer.zero_grad(set_to_none=True)
    signal = collate.signal_of(batch, learner.config)
    tally = metrics.Tally()
    for rows in collate.split(batch, rule.micro_batch_tokens):
        accumulate(learner, collate.collate(batch, signal, rows, device=learner.device), tally)
    lr = learning_rate(learner)
    grad_norm, applied = _update(learner, lr)
    learner.step += 1
    has_reference = learner.reference is not None
    return metrics.report(batch, tally, lr=lr, grad_norm=grad_norm, applied=applied, with_reference=has_reference)


def accumulate(learner: Learner, micro: collate.MicroBatch, tally: metrics.Tally) -> None:
    """Add a micro-batch's share of the gradient: the sum over micro-batches is the gradient of the whole batch's loss."""
    teaches = bool((micro.weights > 0).any())
    temperature = learner.config.sampling.temperature
    with torch.set_grad_enabled(teaches):
        logprobs, entropy = token_logprobs(learner.policy, micro, temperature)
        tokens = losses.Tokens(
            logprobs,
            micro.sampler.to(logprobs.dtype),
            micro.advantages.to(logprobs.dtype),
            micro.weights.to(logprobs.dtype),
            micro.age,
            _reference_logprobs(learner, micro, temperature),
        )
        terms = losses.policy_loss(tokens, learner.config.algorithm)
    if teaches:
        terms.loss.backward()
    tally.add(micro, terms, logprobs.detach(), entropy)


def _reference_logprobs(learner: Learner, micro: collate.MicroBatch, temperature: float) -> Tensor | None:
    if learner.reference is None:
        return None
    with torch.no_grad():
        return token_logprobs(learner.reference, micro, temperature)[0]


def token_logprobs(policy: Policy, micro: collate.MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the completion tokens [b, c], and the entropy at each of them (without gradient).

    From logits in fp32 at least, divided by the sampling temperature: the distribution the sampler drew from.
    """
    completion = micro.targets.shape[1]
    logits = policy.model(
        input_ids=micro.input_ids,
        attention_mask=micro.attention_mask,
        position_ids=micro.position_ids,
        logits_to_keep=completion + 1,
        use_cache=False,
    ).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    every = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():  # row by row: a whole micro-batch of vocabularies once more would be the peak of the step's memory
        entropy = torch.stack([-(row.exp() * row).sum(dim=-1) for row in every])
    return every.gather(-1, micro.targets[:, :, None]).squeeze(-1), entropy


def learning_rate(learner: Learner) -> float:
    """Linear warm-up to the job's rate, then constant."""
    rule = learner.config.algorithm
    if learner.step >= rule.warmup_steps:
        return rule.learning_rate
    return rule.learning_rate * (learner.step + 1) / rule.warmup_steps


def _update(learner: Learner, lr: float) -> tuple[float, bool]:
    """Clip and apply the gradient; its norm before clipping, and whether it was applied.

    A gradient of zero is none: AdamW would go on along its old moments, and the step would look as if it had learned.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(learner.policy.model.parameters(), learner.config.algorithm.grad_clip))
    applied = math.isfinite(norm) and norm > 0
    if applied:
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return norm, applied
