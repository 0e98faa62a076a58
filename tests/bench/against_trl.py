"""Our learner against TRL's GRPOTrainer: the same model, completions, log-probs and loss form; one process each, one thread.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0
    python -m tests.bench.against_trl --trl-python /tmp/trl/bin/python [--timed]

Without `--timed` a table of differences in float64 for each loss form that both have, and exit code 1 when loss or gradient differ by more
than 1e-5 (relative). With it also CPU seconds of a warm step on one thread (median of 5: loss, backward, clip, AdamW) and peak memory in float32, as ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner import collate, metrics, model, step
from coordinator.learner.batch_file import Batch
from coordinator.wire.job import JobConfig

TOLERANCE = 1e-5
WARM, TIMED = 2, 5


@dataclass(frozen=True, slots=True)
class Form:
    """One loss as both spell it."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
FORMS = (
    Form(
        "ppo_clip, token mean",
        {"loss": "ppo_clip", "dual_clip": None, **CLIP},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    ),
    Form(
        "ppo_clip with dual clip",
        {"loss": "ppo_clip", "dual_clip": 1.4, **CLIP},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.4},
    ),
    Form(
        "ppo_clip, sequence mean",
        {"loss": "ppo_clip", "dual_clip": None, "aggregation": "sequence_mean"},
        {"loss_type": "grpo", "epsilon": 0.2},
    ),
    Form(
        "ppo_clip, constant",
        {"loss": "ppo_clip", "dual_clip": None, "aggregation": "constant"},
        {"loss_type": "dr_grpo", "epsilon": 0.2},
    ),
    Form("cispo", {"loss": "cispo", "ratio_cap": 1.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
    Form(
        "gspo",
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    ),
    Form(
        "ppo_clip with reference KL",
        {"loss": "ppo_clip", "dual_clip": None, "reference_kl": 0.1},
        {"loss_type": "dapo", "epsilon": 0.2, "beta": 0.1},
    ),
)


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of model and batch."""

    vocab: int
    hidden: int
    layers: int
    rollouts: int
    prompt: int
    completion: int


SMALL = Size(vocab=64, hidden=32, layers=2, rollouts=8, prompt=6, completion=12)
LARGE = Size(vocab=8192, hidden=256, layers=6, rollouts=32, prompt=64, completion=128)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="the Python of an environment that holds TRL")
    parser.add_argument("--timed", action="store_true", help="also time steps and read peak memory")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours is not None:
        run_ours(options.ours)
        return 0
    if options.trl_python is None:
        parser.error("--trl-python is needed; see the top of this file")
    worst = 0.0
    print(f"{'loss form':<30}{'loss, relative':>16}{'gradient, relative':>20}")
    for form in FORMS:
        loss, gradient = differences(form, options.trl_python)
        worst = max(worst, loss, gradient)
        print(f"{form.name:<30}{loss:>16.1e}{gradient:>20.1e}", flush=True)
    if options.timed:
        print_ratios(options.trl_python)
    return int(worst > TOLERANCE)


def differences(form: Form, trl_python: Path) -> tuple[float, float]:
    """Relative differences of the loss and of the whole gradient, in float64."""
    with tempfile.TemporaryDirectory(prefix="against-trl-") as folder:
        place = Path(folder)
        write_job(place, form, SMALL, dtype="float64", timed=0)
        ours, theirs = run_both(place, trl_python)
        mine, other = np.load(place / "ours.npz"), np.load(place / "trl.npz")
        names = sorted(set(mine.files) & set(other.files))
        assert len(names) == len(mine.files), f"other parameters: {set(mine.files) ^ set(other.files)}"
        gap = np.sqrt(sum(float(np.square(mine[name] - other[name]).sum()) for name in names))
        size = np.sqrt(sum(float(np.square(other[name]).sum()) for name in names))
        assert size > 0
        return abs(ours["loss"] - theirs["loss"]) / max(abs(theirs["loss"]), 1e-3), gap / size


def print_ratios(trl_python: Path) -> None:
    """Time and peak memory of both, and ours over theirs."""
    with tempfile.TemporaryDirectory(prefix="against-trl-") as folder:
        place = Path(folder)
        write_job(place, FORMS[0], LARGE, dtype="float32", timed=TIMED)
        ours, theirs = run_both(place, trl_python)
    mine, other = statistics.median(ours["seconds"]), statistics.median(theirs["seconds"])
    print(f"\nwarm step, median CPU time of {TIMED}: ours {mine:.3f} s, TRL {other:.3f} s, ratio {mine / other:.2f}")
    kib = ours["peak_kib"], theirs["peak_kib"]
    print(f"peak memory of the process: ours {kib[0] / 1024:.0f} MiB, TRL {kib[1] / 1024:.0f} MiB, ratio {kib[0] / kib[1]:.2f}")


def run_both(place: Path, trl_python: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours first, then TRL's, each in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ours = [sys.executable, "-m", "tests.bench.against_trl", "--ours", str(place)]
    theirs = [str(trl_python), str(Path(__file__).with_name("trl_side.py")), str(place)]
    for command in (ours, theirs):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads((place / "ours.json").read_text()), json.loads((place / "trl.json").read_text())


def write_job(place: Path, form: Form, size: Size, *, dtype: str, timed: int) -> None:
    """Model, completions and settings, for both sides."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
    )
    policy = Qwen3ForCausalLM(shape)
    policy.save_pretrained(place / "model")
    Tokenizer(models.WordLevel({f"<{each}>": each for each in range(size.vocab)}, unk_token="<0>")).save(
        str(place / "tokenizer.json")
    )
    config = {
        "name": "bench",
        "model": "m",
        "environment": {"type": "digit_sort"},
        "algorithm": {
            "group_size": 4,
            "groups_per_step": size.rollouts // 4,
            "advantage": "group_std",
            "learning_rate": 1e-6,
            "micro_batch_tokens": 1 << 20,  # one micro-batch, as on the other side
            **form.ours,
        },
        "sampling": {"max_new_tokens": size.completion},
        "budget": {"steps": 1},
    }
    job = {
        "config": config,
        "trl": {"beta": 0.0, **form.theirs},
        "dtype": dtype,
        "rollouts": size.rollouts,
        "group_size": 4,
        "max_new_tokens": size.completion,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "betas": [0.9, 0.95],
        "warm": WARM if timed else 0,
        "timed": timed,
    }
    (place / "job.json").write_text(json.dumps(job))
    write_batch(place, size)


def write_batch(place: Path, size: Size) -> None:
    """Random completions of unequal lengths, with log-probs near the policy's, so that clips are met on both sides."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(size.completion // 2, size.completion + 1, size.rollouts).astype(np.int32)
    prompts = np.repeat(draw.integers(size.prompt // 2, size.prompt + 1, size.rollouts // 4), 4).astype(np.int32)
    arrays = {
        "prompt_ids": draw.integers(2, size.vocab, prompts.sum()).astype(np.int32),
        "prompt_lengths": prompts,
        "token_ids": draw.integers(2, size.vocab, lengths.sum()).astype(np.int32),
        "lengths": lengths,
        "logprobs": np.zeros(lengths.sum(), np.float32),
        "versions": np.zeros(lengths.sum(), np.int32),
        "rewards": np.tile(np.array([1, 0, 0.5, 0], np.float32), size.rollouts // 4),
        "group": np.repeat(np.arange(size.rollouts // 4), 4).astype(np.int32),
        "truncated": np.zeros(size.rollouts, np.uint8),
        "weight": np.ones(size.rollouts, np.float32),
        "sampled": np.ones(lengths.sum(), np.bool_),
    }
    np.savez(place / "sealed.npz", **arrays)
    np.save(place / "noise.npy", draw.uniform(-0.5, 0.5, lengths.sum()))


def run_ours(place: Path) -> None:
    """The product's own step code on the batch; writes TRL's inputs, our gradient, our times."""
    torch.set_num_threads(1)
    job = json.loads((place / "job.json").read_text())
    config = JobConfig.model_validate(job["config"])
    policy = model.load(place / "model")
    policy.model.to(getattr(torch, job["dtype"]))
    learner = step.start(policy, config)
    batch = _near(learner, Batch(step=0, **np.load(place / "sealed.npz")), np.load(place / "noise.npy"))
    _nudge(learner, place)
    signal = collate.signal_of(batch, config)
    micro = collate.collate(batch, signal, list(range(batch.rollouts)))
    _write_inputs(place, learner, micro)
    tally = metrics.Tally()
    step.accumulate(learner, micro, tally)
    np.savez(place / "ours.npz", **{name: each.grad.double().numpy() for name, each in policy.model.named_parameters()})
    seconds = [_timed(learner, batch) for _ in range(job["warm"] + job["timed"])][job["warm"] :]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (place / "ours.json").write_text(json.dumps({"loss": tally.loss, "seconds": seconds, "peak_kib": peak}))


def _near(learner: step.Learner, batch: Batch, noise: np.ndarray) -> Batch:
    """The batch with recorded log-probs that are the policy's, moved by up to a factor of 1.6."""
    signal = collate.signal_of(batch, learner.config)
    rows = []
    with torch.no_grad():
        for row in range(batch.rollouts):
            rows.append(step.token_logprobs(learner.policy, collate.collate(batch, signal, [row]), 1.0)[0][0].numpy())
    arrays = {name: getattr(batch, name) for name in Batch.__slots__ if name != "step"}
    return Batch(step=0, **arrays | {"logprobs": np.minimum(np.concatenate(rows) + noise, -1e-4).astype(np.float32)})


def _nudge(learner: step.Learner, place: Path) -> None:
    """Away from version 0 where there is a KL to it; TRL's side loads the moved weights."""
    if learner.reference is None:
        return
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    learner.policy.model.save_pretrained(place / "model")


def _write_inputs(place: Path, learner: step.Learner, micro: collate.MicroBatch) -> None:
    prompt = micro.input_ids.shape[1] - micro.targets.shape[1]
    assert micro.attention_mask is not None, "padded, as on the other side"
    arrays = {
        "prompt_ids": micro.input_ids[:, :prompt],
        "prompt_mask": micro.attention_mask[:, :prompt],
        "completion_ids": micro.targets,
        "completion_mask": micro.sampled.long(),
        "advantages": micro.advantages,
        "old_per_token_logps": micro.sampler,
    }
    if learner.reference is not None:
        with torch.no_grad():
            arrays["ref_per_token_logps"] = step.token_logprobs(learner.reference, micro, 1.0)[0]
    np.savez(place / "batch.npz", **{name: each.numpy() for name, each in arrays.items()})


def _timed(learner: step.Learner, batch: Batch) -> float:
    begun = time.process_time()
    step.take_step(learner, batch)
    return time.process_time() - begun


if __name__ == "__main__":
    sys.exit(main())
