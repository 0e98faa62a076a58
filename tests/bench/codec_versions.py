"""Real bf16 versions of SmolLM2-135M for the codec bench, made by a short policy-gradient run and kept under `tests/.cache`.

    python -m tests.bench.codec_versions

Start: the model of `tests/models/smollm2.py`. It comes from a 4-bit file, whose few levels are not what a checkpoint looks like,
so uniform noise of one quantisation step is added before rounding to bf16. Run: on-policy sampling of GSM8K answers, rewards
from the overlap with the reference answer, group-normalised advantages, gradient clip 1.0, Adam (0.9, 0.999, eps 1e-8) on fp32
masters, constant learning rate after 5 warm-up steps. The policy is the live one of `VARIANTS["live"]`.

Adam's normalised steps do not depend on the learning rate or on the scale of the weights, so their sum U replays other cases from
the same gradients: version = bf16(start / scale - rate * U). Scale 5.7 gives the weights the median magnitude of 0.5 to 8B models.
One core needs about four minutes; each variant keeps four versions of 270 MB.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.models import smollm2

TEXTS = Path(__file__).resolve().parents[1] / "data" / "gsm8k" / "train.jsonl"
VARIANTS: Mapping[str, tuple[float, float]] = MappingProxyType({"live": (1e-6, 1.0), "w1": (1e-6, 5.7), "w3": (3e-6, 5.7)})
KEPT = (6, 7, 10, 14)  # so that k = 1, 4 and 8 start at version 6, after the warm-up
WARM_UP = 5
BETAS = (0.9, 0.999)
EPSILON = 1e-8
CLIP = 1.0
PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 3, 6, 20, 80
NOISE_BLOCK = 16  # elements that share a scale in the 4-bit file, at least


def versions(cache: Path = smollm2.CACHE) -> dict[str, dict[int, Path]]:
    """Directories by variant and version; made when they are not there. Raises SmolLM2Unavailable."""
    root = cache / "codec-versions"
    if not (root / "run.json").is_file():
        partial = cache / ".codec-versions.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _train(smollm2.directory(cache), partial)
        shutil.rmtree(root, ignore_errors=True)
        partial.rename(root)
    return {variant: {number: root / variant / f"v{number:02}" for number in KEPT} for variant in VARIANTS}


def _train(source: Path, target: Path) -> None:
    """Run to the last kept version; write each kept one in every variant."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    _roughen(model)
    names = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in names.items()}
    adam = _Adam(start)
    prompts = _prompts(tokenizer)
    log = []
    for step in range(1, max(KEPT) + 1):
        begun = time.monotonic()
        reward, norm = _gradients(model, tokenizer, [next(prompts) for _ in range(PROMPTS)])
        adam.step({name: parameter.grad for name, parameter in names.items()}, min(1.0, step / WARM_UP))
        _place(names, start, adam.total, *VARIANTS["live"])
        model.zero_grad(set_to_none=True)
        log.append({"version": step, "reward": reward, "gradient_norm": norm, "seconds": time.monotonic() - begun})
        print(f"version {step}: reward {reward:.3f}, gradient {norm:.2f}, {log[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        if step in KEPT:
            _write(source, target, step, start, adam.total)
    (target / "run.json").write_text(json.dumps({"variants": dict(VARIANTS), "steps": log}, indent=2))


class _Adam:
    """The sum of Adam's normalised steps: what the masters have moved at a learning rate of 1, apart from any master's rounding."""

    def __init__(self, shapes: Mapping[str, Any]) -> None:
        import torch

        self.total = {name: torch.zeros_like(value) for name, value in shapes.items()}
        self._first = {name: torch.zeros_like(value) for name, value in shapes.items()}
        self._second = {name: torch.zeros_like(value) for name, value in shapes.items()}
        self._steps = 0

    def step(self, gradients: Mapping[str, Any], warmth: float) -> None:
        """One step; `warmth` is the share of the full learning rate."""
        self._steps += 1
        short, long = (1 - beta**self._steps for beta in BETAS)
        for name, gradient in gradients.items():
            self._first[name].mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
            self._second[name].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            normaliser = (self._second[name] / long).sqrt_().add_(EPSILON)
            self.total[name].addcdiv_(self._first[name], normaliser, value=warmth / short)


def _roughen(model: Any) -> None:
    """Uniform noise of one quantisation step on every matrix, then round to bf16."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                step = torch.from_numpy(_quantisation_steps(parameter.numpy()))
                parameter.add_((torch.rand_like(parameter) - 0.5) * step)
            parameter.copy_(parameter.bfloat16().float())


def _quantisation_steps(weights: Any) -> Any:
    """The step of each element's block: the least distance between two of its distinct values (0 where all are equal)."""
    ordered = np.sort(weights.reshape(-1, NOISE_BLOCK), axis=1)
    distance = np.diff(ordered, axis=1)
    distance[distance <= np.abs(ordered).max(axis=1, keepdims=True) * 2.0**-8] = np.inf  # bf16 rounding of one level
    steps = distance.min(axis=1, keepdims=True)
    steps[np.isinf(steps)] = 0
    return np.broadcast_to(steps, ordered.shape).reshape(weights.shape).astype(np.float32)


def _prompts(tokenizer: Any) -> Iterator[tuple[list[int], str]]:
    """Questions as token ids, short ones, with their reference answers."""
    with TEXTS.open() as lines:
        for line in lines:
            record = json.loads(line)
            ids = tokenizer(f"Question: {record['question']}\nAnswer:")["input_ids"]
            if len(ids) <= PROMPT_TOKENS:
                yield ids, record["answer"]


def _gradients(model: Any, tokenizer: Any, prompts: list[tuple[list[int], str]]) -> tuple[float, float]:
    """Sample, score, and leave the clipped policy gradient in the parameters; mean reward and norm before clipping."""
    import torch

    rewards = []
    for ids, answer in prompts:
        prompt = torch.tensor([ids])
        with torch.no_grad():
            whole = model.generate(
                prompt.expand(SAMPLES, -1),
                attention_mask=torch.ones(SAMPLES, len(ids)),
                do_sample=True,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                pad_token_id=tokenizer.eos_token_id,
            )
        sampled = whole[:, len(ids) :]
        scores = torch.tensor([_overlap(text, answer) for text in tokenizer.batch_decode(sampled)])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        logits = model(whole, logits_to_keep=NEW_TOKENS + 1).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        (-(advantages.unsqueeze(1) * chosen).sum() / (len(prompts) * SAMPLES * NEW_TOKENS)).backward()
        rewards.append(float(scores.mean()))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return sum(rewards) / len(rewards), float(norm)


def _overlap(text: str, answer: str) -> float:
    """F1 of the words that a completion shares with the reference answer."""
    ours, theirs = Counter(text.lower().split()), Counter(answer.lower().split())
    shared = sum((ours & theirs).values())
    return 2 * shared / max(1, ours.total() + theirs.total())


def _place(parameters: Mapping[str, Any], start: Mapping[str, Any], total: Mapping[str, Any], rate: float, scale: float) -> None:
    """Put the masters of a variant into the model's parameters."""
    import torch

    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name] / scale - rate * total[name])


def _write(source: Path, target: Path, step: int, start: Mapping[str, Any], total: Mapping[str, Any]) -> None:
    """One version in every variant, as Hugging Face directories."""
    from safetensors.torch import save_file

    for variant, (rate, scale) in VARIANTS.items():
        directory = target / variant / f"v{step:02}"
        directory.mkdir(parents=True)
        tensors = {name: (value / scale - rate * total[name]).bfloat16() for name, value in start.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        for path in source.iterdir():
            if path.name != "model.safetensors":
                shutil.copy(path, directory)


if __name__ == "__main__":
    for of_variant in versions().values():
        for directory in of_variant.values():
            print(directory)
