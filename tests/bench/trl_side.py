"""TRL's half of `against_trl.py`: runs in an environment of its own, without ours. `python trl_side.py JOB_DIR`.

Reads `job.json`, `batch.npz` and the model directory; computes one loss and its gradient by `GRPOTrainer._compute_loss`, then times warm
steps (loss, backward, clip, AdamW). Writes `trl.npz` (gradients by parameter name) and `trl.json`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]  # in an environment of its own


def main() -> None:
    """Everything, once."""
    place = Path(sys.argv[1])
    job = json.loads((place / "job.json").read_text())
    torch.set_num_threads(1)
    if job["dtype"] == "float64":
        torch.set_default_dtype(torch.float64)
    trainer = build(place, job)
    inputs = inputs_of(place, trainer)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: parameter.grad.double().numpy() for name, parameter in trainer.model.named_parameters()}
    np.savez(place / "trl.npz", **gradients)
    seconds = [step(trainer, inputs) for _ in range(job["warm"] + job["timed"])][job["warm"] :]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (place / "trl.json").write_text(json.dumps({"loss": float(loss.detach()), "seconds": seconds, "peak_kib": peak}))


def build(place: Path, job: dict[str, Any]) -> Any:
    """A trainer whose model is in training mode (it has no dropout) and which takes one batch a step."""
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=getattr(torch, job["dtype"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), pad_token="<0>", eos_token="<1>")
    arguments = GRPOConfig(
        output_dir=str(place / "out"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["rollouts"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        disable_dropout=True,
        **job["trl"],
    )
    rows = [{"prompt": "x"}] * job["rollouts"]
    from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.optimizer = torch.optim.AdamW(
        trainer.model.parameters(), lr=job["learning_rate"], betas=tuple(job["betas"]), weight_decay=0.0
    )
    return trainer


def inputs_of(place: Path, trainer: Any) -> dict[str, torch.Tensor]:
    """The batch as TRL holds it after generation: prompts padded on the left, completions on the right."""
    batch = np.load(place / "batch.npz")
    inputs = {name: torch.from_numpy(batch[name]) for name in batch.files}
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
        if name in inputs:
            inputs[name] = inputs[name].to(next(trainer.model.parameters()).dtype)
    return inputs | {"num_items_in_batch": inputs["completion_mask"].sum()}


def step(trainer: Any, inputs: dict[str, torch.Tensor]) -> float:
    """CPU seconds of one whole step."""
    begun = time.process_time()
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer._compute_loss(trainer.model, inputs).backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    return time.process_time() - begun


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    assert isinstance(GRPOTrainer._compute_loss, types.FunctionType), "this TRL has no GRPOTrainer._compute_loss: use 1.16"
    main()
