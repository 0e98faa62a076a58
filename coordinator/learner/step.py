"""One optimiser step, read top to bottom: batch -> signal -> micro-batches -> gradients -> AdamW.

The step is a function of (weights, optimiser state, batch): a replay of the same batch from the same state gives the same
bits, as long as the process computes with one thread and deterministic algorithms (`process.py` sees to that).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from coordinator.learner import attention, checkpointing, collate, head, lora, losses, metrics
from coordinator.learner.batch_file import Batch
from coordinator.learner.model import Policy
from coordinator.learner.parts import local
from coordinator.learner.sharding import shard
from coordinator.learner.team import Team
from coordinator.wire.job import JobConfig


@dataclass(slots=True)
class Learner:
    """What a step changes: weights, optimiser state, and the count of steps taken (the version of the weights)."""

    policy: Policy
    optimizer: torch.optim.AdamW
    config: JobConfig
    reference: Policy | None  # version 0, once its adapters are off; only where the job asks for a KL to it
    step: int = 0
    team: Team = field(default_factory=Team)

    @property
    def device(self) -> str:
        """Where this rank computes."""
        return self.team.device


def start(policy: Policy, config: JobConfig, *, device: str = "cpu", team: Team | None = None) -> Learner:
    """A learner at step 0: `policy` is version 0, whatever a checkpoint brings later. Weight decay, if any, is for matrices only.

    Ranks of a team each bring the same policy, whole; they leave with a shard of it.
    """
    team = team or Team(device=device)
    rule = config.algorithm
    attention.prepare(policy.model)
    reference = policy.frozen_copy() if rule.reference_kl > 0 and config.lora is None else None
    if config.lora is not None:
        lora.attach(policy.model, config.lora)
    if config.learner.gradient_checkpointing:
        checkpointing.apply(policy.layers())
    if team.size > 1:
        policy = shard(policy, team)
        reference = shard(reference, team) if reference is not None else None
    if rule.reference_kl > 0 and config.lora is not None:
        reference = policy
    return Learner(policy, _optimizer(policy, config), config, reference, team=team)


def _optimizer(policy: Policy, config: JobConfig) -> torch.optim.AdamW:
    rule = config.algorithm
    parameters = list(policy.trained().values())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": rule.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=rule.learning_rate, betas=rule.betas)


def take_step(learner: Learner, batch: Batch) -> dict[str, float]:
    """Take one step and return its metrics.

    A batch that teaches nothing (every rollout at weight 0, unscored, masked or guarded away; every token's gradient stopped)
    still is a step: the count goes up, weights and optimiser state stay. So does one whose gradient is not finite; its
    grad_norm says so. Both report `optim/applied` 0.
    """
    learner.optimizer.zero_grad(set_to_none=True)
    tally = gradients(learner, batch)
    lr = learning_rate(learner)
    grad_norm, applied = _update(learner, lr)
    learner.step += 1
    has_reference = learner.reference is not None
    return metrics.report(batch, tally, lr=lr, grad_norm=grad_norm, applied=applied, with_reference=has_reference)


def gradients(learner: Learner, batch: Batch) -> metrics.Tally:
    """Leave the gradient of the whole batch's loss in the parameters (of this rank's shard); the figures of all ranks."""
    signal = collate.signal_of(batch, learner.config)
    split, arrange = (collate.split_packed, collate.pack) if learner.config.learner.packing else (collate.split, collate.collate)
    parts = split(batch, learner.config.algorithm.micro_batch_tokens)
    tally = metrics.Tally()
    team = learner.team
    for begin in range(0, len(parts), team.size):
        together = parts[begin : begin + team.size]
        teaches = any(bool((signal.weights[rows] > 0).any()) for rows in together)
        if team.rank < len(together):
            accumulate(learner, arrange(batch, signal, together[team.rank], device=learner.device), tally, teaches=teaches)
        else:  # nothing is left for this rank, but the others need its shards
            idle = replace(signal, weights=torch.zeros_like(signal.weights))
            accumulate(learner, arrange(batch, idle, together[0][:1], device=learner.device), metrics.Tally(), teaches=teaches)
    return tally.over(team)


def accumulate(learner: Learner, micro: collate.MicroBatch, tally: metrics.Tally, *, teaches: bool = True) -> None:
    """Add a micro-batch's share of the gradient: the sum over micro-batches is the gradient of the whole batch's loss.

    `teaches`: whether any rank's micro-batch has a trained token; only then there is a backward pass, on all ranks.
    """
    of_reference = _reference_logprobs(learner, micro)
    with torch.set_grad_enabled(teaches):
        logprobs, entropy = _logprobs(learner, learner.policy, micro)
        tokens = losses.Tokens(
            logprobs,
            micro.sampler.to(logprobs.dtype),
            micro.advantages.to(logprobs.dtype),
            micro.weights.to(logprobs.dtype),
            micro.age,
            of_reference,
        )
        terms = losses.policy_loss(tokens, learner.config.algorithm)
    if teaches:
        terms.loss.backward()
    tally.add(micro, terms, logprobs.detach(), entropy)


def _reference_logprobs(learner: Learner, micro: collate.MicroBatch) -> Tensor | None:
    if learner.reference is None:
        return None
    with torch.no_grad(), lora.without(learner.reference.model):
        return _logprobs(learner, learner.reference, micro)[0]


def _logprobs(learner: Learner, policy: Policy, micro: collate.MicroBatch) -> tuple[Tensor, Tensor]:
    config = learner.config
    return token_logprobs(policy, micro, config.sampling.temperature, is_autocast=config.learner.dtype == "bfloat16")


def token_logprobs(
    policy: Policy, micro: collate.MicroBatch, temperature: float, *, is_autocast: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of the completion tokens [b, c], and the entropy at each of them (without gradient); 0 where none was sampled.

    From logits in fp32 at least, divided by the sampling temperature: the distribution the sampler drew from. `is_autocast`: the
    layers below the head compute in bf16.
    """
    targets = micro.targets.flatten()[micro.cells]

    def found(model: nn.Module) -> tuple[Tensor, Tensor]:
        hidden = _hidden(model, micro, is_autocast=is_autocast).flatten(0, 1).index_select(0, micro.before)
        return head.logprobs(hidden, model.lm_head.weight, targets, head.shape_of(model, temperature))

    logprobs, entropy = (_on_rectangle(each, micro) for each in policy.call(found))
    return logprobs, entropy


def _hidden(model: nn.Module, micro: collate.MicroBatch, *, is_autocast: bool) -> Tensor:
    """The last hidden states [r, s, h]."""
    masks = {"attention_mask": micro.attention_mask} if micro.segments is None else attention.inputs(micro.segments)
    kind = micro.input_ids.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=is_autocast, cache_enabled=False):  # a cache would hold the whole model again
        hidden: Tensor = model.base_model(
            input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **masks
        ).last_hidden_state
    return hidden


def _on_rectangle(values: Tensor, micro: collate.MicroBatch) -> Tensor:
    room = values.new_zeros(micro.targets.numel())
    return room.index_copy(0, micro.cells, values).view_as(micro.targets)


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
    parameters = list(learner.policy.trained().values())
    total = _global_norm(learner, parameters)
    torch.nn.utils.clip_grads_with_norm_(parameters, learner.config.algorithm.grad_clip, total)
    norm = float(total)
    applied = math.isfinite(norm) and norm > 0
    if applied:
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return norm, applied


def _global_norm(learner: Learner, parameters: list[nn.Parameter]) -> Tensor:
    """Of the gradient of all ranks' shards together; the same number on each."""
    own = torch.nn.utils.get_total_norm([local(each.grad) for each in parameters if each.grad is not None])
    if learner.team.size == 1:
        return own
    (squared,) = learner.team.total([float(own.double().square())])
    return torch.tensor(math.sqrt(squared), dtype=own.dtype, device=own.device)
