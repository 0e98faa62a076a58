"""Make the demo's model: `python -m coordinator.learner.warm_start --out DIR --seed N [--recipe NAME] [--json]`.

A small real `Qwen3ForCausalLM` (312,816 parameters) with a one-token-per-character tokenizer, taught in seconds by a sloppy
teacher (`warm_start_lessons.py`), so that there is something to gain. The same seed gives the same bits on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from coordinator.domain.seeds import derive
from coordinator.learner import export
from coordinator.learner.model import Policy
from coordinator.learner.process import make_deterministic
from coordinator.learner.warm_start_lessons import RECIPES, Recipe

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n.,:;!?'\"()+-*/="
TOKENS = (PAD, EOS, UNKNOWN, *CHARACTERS)
PAD_TOKEN_ID, EOS_TOKEN_ID = TOKENS.index(PAD), TOKENS.index(EOS)
CONTEXT_TOKENS = 256

DEFAULT_RECIPE = "digit_sort"
BATCH = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
BETAS = (0.9, 0.95)
IGNORED = -100  # the label cross_entropy leaves out
PROGRESS_EVERY = 25


def main(arguments: list[str] | None = None) -> int:
    """Make the model and say where it lies; the exit status."""
    parser = argparse.ArgumentParser(prog="coordinator.learner.warm_start", description="Make the demo's warm-started model.")
    parser.add_argument("--out", required=True, type=Path, help="directory to write; one that exists is replaced")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the problems and the teacher")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default=DEFAULT_RECIPE, help="what it is taught")
    parser.add_argument("--json", action="store_true", help="progress and result as one JSON object a line")
    options = parser.parse_args(arguments)
    make_deterministic()
    recipe = RECIPES[options.recipe]
    progress = partial(_json_progress if options.json else _text_progress, recipe.steps)
    begun = time.perf_counter()
    try:
        loss = make(options.out, seed=options.seed, progress=progress, recipe=recipe)
    except OSError as error:
        sys.stderr.write(f"warm_start: --out {options.out} cannot be written: {error}\n")
        return 1
    seconds = time.perf_counter() - begun
    if options.json:
        result = {"directory": str(options.out), "loss": loss, "seconds": round(seconds, 2), "seed": options.seed}
        sys.stdout.write(json.dumps({"done": result}) + "\n")
    else:
        sys.stdout.write(f"warm start: {options.out} written in {seconds:.0f} s\n")
    return 0


def make(directory: Path, *, seed: int, progress: Callable[[int, float], None], recipe: Recipe = RECIPES[DEFAULT_RECIPE]) -> float:
    """Train and write the model as a Hugging Face directory; the last step's loss. Raises OSError."""
    torch.manual_seed(derive(seed, "warm_start"))
    model = Qwen3ForCausalLM(configuration())
    loss = _train(model, seed, recipe, progress)
    scratch = directory.with_name(f".{directory.name}.files")
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        write_companions(model, scratch)
        export.write(Policy(model, scratch, len(TOKENS), (EOS_TOKEN_ID,)), directory)
    finally:
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()
    return loss


def configuration() -> Qwen3Config:
    """The demo model's shape."""
    return Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        architectures=["Qwen3ForCausalLM"],
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; decoding joins them without spaces."""
    core = Tokenizer(models.WordLevel({token: place for place, token in enumerate(TOKENS)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def write_companions(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Configuration, generation configuration and tokenizer files."""
    model.config.save_pretrained(directory)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.generation_config.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    named = json.loads(settings.read_bytes()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # the name every release knows
    settings.write_text(json.dumps(named, indent=2, sort_keys=True))


def encode(text: str) -> list[int]:
    """Token ids of a text, as the tokenizer gives them."""
    return [TOKENS.index(character) for character in text]


def _train(model: Qwen3ForCausalLM, seed: int, recipe: Recipe, progress: Callable[[int, float], None]) -> float:
    """Supervised steps with a warmed-up cosine learning rate; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    value = float("nan")
    for step in range(recipe.steps):
        inputs, labels = _lessons(recipe, seed, range(step * BATCH, (step + 1) * BATCH))
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 + math.cos(math.pi * step / recipe.steps)) / 2
        optimizer.step()
        value = float(loss.detach())
        if (step + 1) % PROGRESS_EVERY == 0:
            progress(step + 1, value)
    return value


def _lessons(recipe: Recipe, seed: int, indices: range) -> tuple[Tensor, Tensor]:
    """Token ids and labels, padded on the right (causal attention never looks there); only answers and their end are learnt."""
    rows = []
    for index in indices:
        prompt, answer = recipe.lesson(seed, index)
        rows.append((encode(prompt), [*encode(answer), EOS_TOKEN_ID]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    inputs = torch.full((len(rows), width), PAD_TOKEN_ID)
    labels = torch.full((len(rows), width), IGNORED)
    for row, (before, after) in enumerate(rows):
        inputs[row, : len(before) + len(after)] = torch.tensor(before + after)
        labels[row, len(before) : len(before) + len(after)] = torch.tensor(after)
    return inputs, labels


def _text_progress(steps: int, step: int, loss: float) -> None:
    sys.stdout.write(f"warm start: step {step}/{steps}, loss {loss:.3f}\n")
    sys.stdout.flush()


def _json_progress(steps: int, step: int, loss: float) -> None:
    sys.stdout.write(json.dumps({"step": step, "steps": steps, "loss": loss}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
