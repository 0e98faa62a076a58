"""Write the current weights as a Hugging Face directory in bf16: what is published, and what people download.

`AutoModelForCausalLM.from_pretrained` loads it. Configuration and tokenizer files are copied from the model's own directory
by an allow-list of names; config.json says bfloat16. Tied weights are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from coordinator.learner import tensor_file
from coordinator.learner.model import Policy, published_bits, read_json
from coordinator.learner.parts import Part, Walk
from p2p.adapters.durable import REAL_FILES, FileLayer, make_directory_durably, replace_directory_durably

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
    policy: Policy, directory: Path, *, reached: Callable[[str], None] = lambda _: None, files: FileLayer = REAL_FILES
) -> None:
    """Put the snapshot at `directory`, whole (one that is there is replaced atomically). Raises OSError.

    `reached` is told the name of the commit point before the rename.
    """
    tensors = policy.tensors()
    with Walk(tensors, tensor_file.order(tensors, published)) as walk:
        _write(policy, tensors, walk, directory, reached, files)


def follow(policy: Policy) -> None:
    """What the ranks that write nothing do meanwhile: gather the same tensors in the same order."""
    tensors = policy.tensors()
    with Walk(tensors, tensor_file.order(tensors, published)):
        pass


def _write(
    policy: Policy, tensors: Mapping[str, Part], walk: Walk, directory: Path, reached: Callable[[str], None], files: FileLayer
) -> None:
    temporary = directory.with_name(f".{directory.name}.partial")
    make_directory_durably(directory.parent, files=files)
    files.remove_tree(temporary)
    files.make_dir(temporary)
    weights = temporary / "model.safetensors"
    tensor_file.write(weights, tensors, walk, files=files, convert=published, metadata={"format": "pt"})
    for name, data in companions(policy.directory).items():
        files.write_file(temporary / name, data)
    reached(BEFORE_RENAME)
    replace_directory_durably(temporary, directory, files=files)


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
