"""Write the current weights as a Hugging Face directory in bf16: what is published, and what people download.

`AutoModelForCausalLM.from_pretrained` loads it. Configuration and tokenizer files are copied from the model's own directory
by an allow-list of names; config.json says bfloat16. Tied weights are stored once. With [lora] the adapters lie in a folder of their
own below it, in bf16 too: `peft.PeftModel.from_pretrained` loads that, and low-rank edges are made of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from coordinator.learner import lora, tensor_file, whole_directory
from coordinator.learner.model import Policy, published_bits, read_json
from coordinator.learner.parts import Part, Walk
from p2p.adapters.durable import REAL_FILES, FileLayer
from p2p.codec import peft_files

BEFORE_RENAME = "learner.snapshot.before_rename"
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write(
    policy: Policy,
    directory: Path,
    *,
    base: str = "",
    reached: Callable[[str], None] = lambda _: None,
    files: FileLayer = REAL_FILES,
) -> None:
    """Put the snapshot at `directory`, whole (one that is there is replaced atomically). Raises OSError.

    `base` is what the job calls its model: adapters name it. `reached` is told the name of the commit point before the rename.
    """
    tensors, factors = policy.tensors(), lora.factors(policy.model)
    with (
        _walk(tensors, factors) as walk,
        whole_directory.filled(directory, before_rename=lambda: reached(BEFORE_RENAME), files=files) as temporary,
    ):
        _write_model(policy, tensors, walk, temporary, files)
        if factors:
            _write_adapter(policy, factors, walk, temporary / peft_files.FOLDER, base, files)


def follow(policy: Policy) -> None:
    """What the ranks that write nothing do meanwhile: gather the same tensors in the same order."""
    with _walk(policy.tensors(), lora.factors(policy.model)):
        pass


def _walk(tensors: Mapping[str, Part], factors: Mapping[str, Part]) -> Walk:
    order = [*tensor_file.order(tensors, published), *tensor_file.order(factors, published)]
    return Walk({**tensors, **factors}, order)


def _write_model(policy: Policy, tensors: Mapping[str, Part], walk: Walk, directory: Path, files: FileLayer) -> None:
    weights = directory / "model.safetensors"
    tensor_file.write(weights, tensors, walk, files=files, convert=published, metadata={"format": "pt"})
    for name, data in companions(policy.directory).items():
        files.write_file(directory / name, data)


def _write_adapter(policy: Policy, factors: Mapping[str, Part], walk: Walk, directory: Path, base: str, files: FileLayer) -> None:
    files.make_dir(directory)
    tensor_file.write(directory / peft_files.WEIGHTS, factors, walk, files=files, convert=published, metadata={"format": "pt"})
    files.write_file(directory / peft_files.CONFIG, lora.description(policy.model, base))


def published(tensor: Tensor) -> Tensor:
    """The published bits of one tensor: floating ones rounded to bf16."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def companions(source: Path) -> dict[str, bytes]:
    """The files beside the weights, by name."""
    config = read_json(source / "config.json")
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    written = {"config.json": json.dumps(config, indent=2, sort_keys=True).encode()}
    return written | {name: (source / name).read_bytes() for name in COPIED if (source / name).is_file()}


def canary(policy: Policy, ids: Sequence[int], *, device: str = "cpu") -> tuple[float, ...]:
    """Log-probs (temperature 1) of `ids` from the second on, by the published bits in fp32, as a batch of one."""
    if len(ids) < 2:
        return ()
    sequence = torch.tensor([list(ids)], dtype=torch.int64, device=device)
    with published_bits(policy):
        logits = policy.call(lambda model: model(input_ids=sequence, use_cache=False).logits)[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, sequence[0, 1:, None]).squeeze(-1)
    return tuple(logprobs.tolist())
