"""A job without a network: the real learner, torch engine and environment in one process, with the lag of its data set exactly.

Part of other benchmarks. What the coordinator does between them is left out: nobody fails, no group is replaced, nothing is late.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer

from coordinator.domain.seeds import prompt_index, slot_seed
from coordinator.environments.base import Completion as Text
from coordinator.environments.base import Environment
from coordinator.learner import batch_file, export, model, step
from coordinator.learner.batch_file import Batch
from coordinator.wire.job import JobConfig
from coordinator.wire.learner_link import BATCH_FORMAT
from coordinator.wire.messages import SamplingParameters
from worker_node.adapters.engine import Finished, Weights
from worker_node.adapters.engine_torch import TorchEngine, TorchOptions
from worker_node.domain.generation import Completion, GenerationRequest


@dataclass(frozen=True, slots=True)
class Lagged:
    """What to run: the batch of step t is sampled by version max(0, t - lag)."""

    model: Path
    config: JobConfig
    environment: Environment
    lag: int
    measured_from: int = 0  # the first step of which the current version's reward is measured


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step: the learner's figures, and the mean reward of the version before it on the step's own prompts (None: not measured)."""

    figures: dict[str, float]
    current_reward: float | None


@dataclass(frozen=True, slots=True)
class _Rolled:
    """Completions of a step's groups, group-major, with their prompts and rewards."""

    prompts: list[tuple[int, ...]]
    completions: list[Completion]
    rewards: list[float]


def stepped(job: Lagged, folder: Path) -> Iterator[Stepped]:
    """Take the steps of the job's budget, one an iteration; versions are published into `folder`, and old ones removed.

    The reward of the current version is that of the batch itself where nothing lags, else of other completions of the same prompts
    by the same seeds.
    """
    learner = step.start(model.load(job.model), job.config)
    sampler = _Sampler(job, learner.policy.stop_token_ids)
    for number in range(job.config.budget.steps):
        export.write(learner.policy, _published(folder, number))
        if number - job.lag > 0:
            shutil.rmtree(_published(folder, number - job.lag - 1))
        used = max(0, number - job.lag)
        rolled = sampler.roll(number, Weights(_published(folder, used), used, ""))
        current = None
        if number >= job.measured_from:
            seen = rolled if used == number else sampler.roll(number, Weights(_published(folder, number), number, ""))
            current = float(np.mean(seen.rewards))
        yield Stepped(step.take_step(learner, _batch(job.config, number, rolled)), current)
    sampler.close()


def greedy_reward(job: Lagged, directory: Path, prompts: int) -> float:
    """Mean reward of the likeliest completions of held-out prompts, by the weights in a directory."""
    policy = model.load(directory)
    reader = Tokenizer.from_file(str(directory / "tokenizer.json"))
    from coordinator.learner import generate

    ids = [tuple(reader.encode(str(job.environment.prompt("eval", place))).ids) for place in range(prompts)]
    limits = [job.config.sampling.max_new_tokens] * prompts
    rows = generate.greedy(policy, ids, max_new_tokens=limits, stop_token_ids=policy.stop_token_ids, token_budget=16384)
    return float(
        np.mean(
            [job.environment.score("eval", place, [_text(reader, row)]).outcomes[0].reward or 0.0 for place, row in enumerate(rows)]
        )
    )


class _Sampler:
    """The worker's part: one engine, whose weights are replaced in place, and the data plane that scores what it makes."""

    def __init__(self, job: Lagged, stop_token_ids: tuple[int, ...]) -> None:
        self._job = job
        self._reader = Tokenizer.from_file(str(job.model / "tokenizer.json"))
        sampling = job.config.sampling
        self._sampling = SamplingParameters(
            max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, stop_token_ids=stop_token_ids
        )
        self._engine = TorchEngine(TorchOptions(slots=job.config.rollouts_per_step, device="cpu"))
        self._is_loaded = False

    def roll(self, number: int, weights: Weights) -> _Rolled:
        """The groups of a step, by these weights."""
        if self._is_loaded:
            self._engine.apply(weights, abort_running=False)
        else:
            self._engine.load(weights)
            self._is_loaded = True
        groups, size = self._job.config.algorithm.groups_per_step, self._job.config.algorithm.group_size
        seed = self._job.config.seed
        numbers = range(number * groups, (number + 1) * groups)
        places = [prompt_index(seed, group, self._job.environment.size("train")) for group in numbers]
        prompts = [tuple(self._reader.encode(str(self._job.environment.prompt("train", place))).ids) for place in places]
        made = self._made(
            [
                GenerationRequest((str(group), slot), prompt, slot_seed(seed, group, slot), self._sampling)
                for group, prompt in zip(numbers, prompts, strict=True)
                for slot in range(size)
            ]
        )
        rewards: list[float] = []
        for at, place in enumerate(places):
            texts = [_text(self._reader, each.token_ids.tolist()) for each in made[at * size : (at + 1) * size]]
            outcomes = self._job.environment.score("train", place, texts).outcomes
            rewards += [float("nan") if each.reward is None else each.reward for each in outcomes]
        return _Rolled([prompt for prompt in prompts for _ in range(size)], made, rewards)

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def _made(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self._engine.admit(requests)
        done: dict[tuple[str, int], Completion] = {}
        while self._engine.is_busy:
            done |= {out.key: out.completion for out in self._engine.step() if isinstance(out, Finished)}
        return [done[request.key] for request in requests]


def _text(reader: Tokenizer, ids: Sequence[int]) -> Text:
    return Text(ids, reader.decode(list(ids), skip_special_tokens=True))


def _published(folder: Path, version: int) -> Path:
    return folder / f"v{version}"


def _batch(config: JobConfig, number: int, rolled: _Rolled) -> Batch:
    """As the coordinator seals it, read as the learner reads it."""
    made = rolled.completions
    arrays = {
        "prompt_ids": np.concatenate([np.asarray(prompt, np.int32) for prompt in rolled.prompts]),
        "prompt_lengths": np.asarray([len(prompt) for prompt in rolled.prompts], np.int32),
        "token_ids": np.concatenate([each.token_ids for each in made]),
        "lengths": np.asarray([each.length for each in made], np.int32),
        "logprobs": np.concatenate([each.logprobs for each in made]),
        "versions": np.concatenate([each.versions for each in made]),
        "rewards": np.asarray(rolled.rewards, np.float32),
        "group": np.repeat(np.arange(config.algorithm.groups_per_step), config.algorithm.group_size).astype(np.int32),
        "truncated": np.asarray([each.stop_reason == "length" for each in made], np.uint8),
        "weight": np.asarray([not np.isnan(reward) for reward in rolled.rewards], np.float32),
    }
    data = save(arrays, {"job": config.name, "step": str(number), "format": BATCH_FORMAT})
    return batch_file.parse(data, job_id=config.name, step=number)
