"""The learner's step by setting: tokens/s, peak memory, and how far the gradient moves; bytes of a LoRA version's delta.

Each setting in a process of its own, one thread, float32 unless it says so. Seconds are of the CPU, so other load matters less.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner import export, head, model, step
from coordinator.learner.batch_file import Batch
from coordinator.learner.process import make_deterministic
from coordinator.wire.job import JobConfig
from p2p.adapters.weights_check import ENCODING
from p2p.adapters.weights_diff import diff
from p2p.codec.delta import Delta

VOCAB, HIDDEN, LAYERS, ROLLOUTS = 8192, 192, 4, 32
MOST_TOKENS = 256
BUDGET = 2048
QWEN_VOCAB, HEAD_TOKENS = 151_936, 2048
WHOLE = 1 << 40  # bytes: one chunk holds all


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    learner: dict[str, Any]
    lora: dict[str, Any] | None = None
    chunk_bytes: int = head.CHUNK_BYTES


SETTINGS = (
    Setting("padded", {"packing": False}),
    Setting("packed (default)", {}),
    Setting("packed, head in one chunk", {}, chunk_bytes=WHOLE),
    Setting("packed, gradient checkpointing", {"gradient_checkpointing": True}),
    Setting("packed, bfloat16", {"dtype": "bfloat16"}),
    Setting("packed, LoRA of rank 16", {}, {"rank": 16, "alpha": 32}),
)


def main(steps: int = 3) -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory(prefix="bench-learner-") as folder:
        place = Path(folder)
        write_model(place / "model")
        print(f"{'setting':<34}{'tokens/s':>10}{'peak MiB':>10}{'gradient':>10}", flush=True)
        expected: np.ndarray[Any, Any] | None = None
        for setting in SETTINGS:
            found = apart(measure, place, setting, steps)
            gradient = found.pop("gradient")
            expected = gradient if expected is None else expected
            moved = "-" if setting.lora else f"{np.linalg.norm(gradient - expected) / np.linalg.norm(expected):.0e}"
            print(f"{setting.name:<34}{found['tokens_per_s']:>10.0f}{found['peak_mib']:>10.0f}{moved:>10}", flush=True)
        for name in ("chunked", "plain"):
            print(
                f"head alone, vocabulary {QWEN_VOCAB}, {HEAD_TOKENS} tokens, {name}: {apart(head_mib, name):.0f} MiB more",
                flush=True,
            )
        for name, lora, rate in (
            ("all weights", None, 1e-6),
            ("LoRA of rank 16, merged", {"rank": 16, "alpha": 32}, 1e-5),
            ("LoRA of rank 16, merged", {"rank": 16, "alpha": 32}, 1e-4),
        ):
            nbytes, numbers = apart(delta_bytes, place, name, lora, rate)
            print(
                f"delta of one step, {name}, learning rate {rate:g}: {nbytes} bytes, {nbytes / numbers:.3f} a parameter", flush=True
            )


def apart(work: Any, *arguments: Any) -> Any:
    """The result of a function, called in a fresh process."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    process = context.Process(target=_deliver, args=(results, work, arguments))
    process.start()
    found = results.get(timeout=600)
    process.join()
    return found


def _deliver(results: Queue[Any], work: Any, arguments: tuple[Any, ...]) -> None:
    results.put(work(*arguments))


def write_model(directory: Path) -> None:
    """Random weights: 3.5 million parameters, of which nearly half are the head's."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN // 4,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
    )
    Qwen3ForCausalLM(shape).save_pretrained(directory)


def learner_of(place: Path, setting: Setting, *, rate: float = 1e-6) -> step.Learner:
    make_deterministic()
    config = {
        "name": "bench",
        "model": "m",
        "environment": {"type": "digit_sort"},
        "algorithm": {
            "group_size": 8,
            "groups_per_step": 4,
            "learning_rate": rate,
            "micro_batch_tokens": BUDGET,
            "truncated": "keep",
        },
        "learner": setting.learner,
        "lora": setting.lora,
        "sampling": {"max_new_tokens": MOST_TOKENS},
        "budget": {"steps": 1},
    }
    torch.manual_seed(1)
    return step.start(model.load(place / "model"), JobConfig.model_validate(config))


def batch_of(number: int) -> Batch:
    """Completions with a long tail (log-normal, as rollouts have), cut at the cap."""
    draw = np.random.default_rng(number)
    lengths = np.clip(draw.lognormal(4.2, 0.7, ROLLOUTS), 8, MOST_TOKENS).astype(np.int32)
    prompts = np.repeat(draw.integers(16, 65, ROLLOUTS // 8), 8).astype(np.int32)
    return Batch(
        step=number,
        prompt_ids=draw.integers(2, VOCAB, prompts.sum()).astype(np.int32),
        prompt_lengths=prompts,
        token_ids=draw.integers(2, VOCAB, lengths.sum()).astype(np.int32),
        lengths=lengths,
        logprobs=np.full(lengths.sum(), -np.log(VOCAB), np.float32),
        versions=np.full(lengths.sum(), number, np.int32),
        rewards=draw.integers(0, 2, ROLLOUTS).astype(np.float32),
        group=np.repeat(np.arange(ROLLOUTS // 8), 8).astype(np.int32),
        truncated=np.zeros(ROLLOUTS, np.uint8),
        weight=np.ones(ROLLOUTS, np.float32),
        sampled=np.ones(lengths.sum(), np.bool_),
    )


def measure(place: Path, setting: Setting, steps: int) -> dict[str, Any]:
    """Tokens (prompts too) a second of the median step after a warm one; peak memory of the process; the gradient of batch 0."""
    head.CHUNK_BYTES = setting.chunk_bytes
    learner = learner_of(place, setting)
    step.gradients(learner, batch_of(0))
    gradient = torch.cat([each.grad.flatten() for each in learner.policy.trained().values()]).double().numpy()
    rates = []
    for number in range(steps):
        batch = batch_of(number)
        begun = time.process_time()
        step.take_step(learner, batch)
        rates.append((len(batch.prompt_ids) + len(batch.token_ids)) / (time.process_time() - begun))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens_per_s": statistics.median(rates), "peak_mib": peak, "gradient": gradient[:1_000_000]}


def head_mib(name: str) -> float:
    """What forward and backward of the head add to the process's peak memory."""
    make_deterministic()
    torch.manual_seed(0)
    hidden = torch.randn(HEAD_TOKENS, 64, requires_grad=True)
    weight = torch.randn(QWEN_VOCAB, 64, requires_grad=True)
    targets = torch.randint(QWEN_VOCAB, (HEAD_TOKENS,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "chunked":
        found, _ = head.logprobs(hidden, weight, targets, head.Shape(1.0))
    else:
        found = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None])[:, 0]
    found.sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def delta_bytes(place: Path, name: str, lora: dict[str, Any] | None, rate: float) -> tuple[int, int]:
    """What the product's codec makes of a step late enough that AdamW's moments have settled, and the parameters of the model."""
    learner = learner_of(place, Setting(name, {}, lora), rate=rate)
    folder = place / name.replace(" ", "-")
    for number in range(4):
        if number == 3:
            export.write(learner.policy, folder / "before")
        step.take_step(learner, batch_of(number))
    export.write(learner.policy, folder / "after")
    diff(folder / "before", folder / "after", folder / "delta", encoding=ENCODING, encoder=Delta("dense", cores=1), threads=1)
    return (folder / "delta").stat().st_size, sum(part.shape.numel() for part in learner.policy.tensors().values())
