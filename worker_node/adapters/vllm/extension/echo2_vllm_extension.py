"""What vLLM's worker processes load of ours: weights from files, in place, and a few facts.

Runs in vLLM's Python, which may be another one than the worker's: standard library, torch, safetensors and vLLM only. It is
named to the server as `--worker-extension-cls echo2_vllm_extension.Echo2Worker`; importing it registers the back end
`echo2_file` of vLLM's weight transfer (`vllm.distributed.weight_transfer`, vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "echo2_file"


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there for mypy
    """Nothing is needed."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The safetensors files of a whole version, in checkpoint names and shapes."""

    files: list[str]


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Replaces every weight by those of the files, between `start` and `finish`, while vLLM is paused."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Lift the loaded layers out of the model; without this, `load_weights` leaves a mixture on a CPU."""
        self._expected = {name for name, _ in self.model.named_parameters()}  # tied ones once: a reload unties them for its while
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load all files. Raises RuntimeError when a weight of the model is in none of them."""
        loaded = self.model.load_weights(_tensors(update_info.files))
        missing = sorted(self._expected - loaded) if loaded is not None else []
        if missing:
            raise RuntimeError(f"the files hold no {missing[:3]}: the model would be a mixture of two versions")

    def finish_weight_update(self) -> None:
        """Put the layers back, packed for the processor, the output head too."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def pack_heads(model: torch.nn.Module) -> None:
    """Pack embedding matrices that serve as output heads anew.

    On a CPU vLLM computes logits with a packed copy of the head. A layer-wise reload does not renew it when the head is tied to the
    embedding, and logits would go on coming from the old weights (measured: 0.33 mean error of a log-prob).
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _tensors(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


class Echo2Worker:
    """Mixed into vLLM's worker class; called through `collective_rpc`."""

    device: Any
    model_config: Any

    def echo2_facts(self) -> dict[str, Any]:
        """What this worker process runs on."""
        device = torch.device(self.device)
        on_gpu = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
            "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else 0,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
        }


if BACKEND not in WeightTransferEngineFactory._registry:  # registering twice raises, and there is no public look-up
    WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
