"""The torch engine: transformers, batched decoding with a KV cache, weights replaced in place between two steps.

The worker's only import of torch. Rows are left-padded to one width; new rows are prefilled (equal prompts once) and merged
into the running batch, finished rows are cut out. Sampling is a function of the slot's seed: uniforms from Philox, inverse
CDF in float64. Log-probs are computed in float32 at the sampling temperature.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch.nn.functional import pad

from coordinator.wire.messages import EngineInfo
from worker_node.adapters.engine import MOST_QUEUED, Aborted, Applied, Finished, Output, Unmakeable, Weights
from worker_node.adapters.model_files import read_config
from worker_node.domain.generation import Completion, GenerationRequest, SlotKey
from worker_node.errors import EngineError

MODEL_TYPES = frozenset(
    {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "granite"}
)  # those that the learner trains
ATTENTIONS = (None, "eager", "sdpa")  # any other name is a library, or a repository whose code would be downloaded
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """float32 keeps the published bf16 bits exact and agrees with the learner to 1e-4; the others are faster on GPUs."""

    slots: int = 32
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    threads: int = 1


@dataclass(slots=True)
class _Row:
    """One running completion."""

    request: GenerationRequest
    draw: np.random.Generator
    started_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the newest token stands; it is the next to be fed."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def stopped(self) -> bool:
        """Whether the newest token is a stop token."""
        return self.token_ids[-1] in self.request.sampling.stop_token_ids

    @property
    def is_done(self) -> bool:
        """Whether the newest token ends the completion."""
        return self.stopped or len(self.token_ids) >= self.request.sampling.max_new_tokens


@dataclass(slots=True)
class _Batch:
    """Rows, their cache (keys and values by layer, width T) and which of the T columns are real."""

    rows: list[_Row]
    cache: transformers.DynamicCache
    mask: torch.Tensor  # [rows, T] int64

    def keep(self, kept: list[int]) -> None:
        """Cut every other row out, and the columns that are padding in all rows left."""
        index = torch.tensor(kept, device=self.mask.device)
        mask = self.mask[index]
        first = int(mask.argmax(dim=1).min()) if kept else 0
        self.mask = mask[:, first:]
        self.rows = [self.rows[i] for i in kept]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index][:, :, first:]
            layer.values = layer.values[index][:, :, first:]

    def merge(self, other: _Batch) -> None:
        """Append the rows of another batch, both padded on the left to the same width."""
        width = max(self.mask.shape[1], other.mask.shape[1])
        self.mask = torch.cat([_widen_mask(self.mask, width), _widen_mask(other.mask, width)])
        self.rows += other.rows
        for mine, its in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([_widen(mine.keys, width), _widen(its.keys, width)])
            mine.values = torch.cat([_widen(mine.values, width), _widen(its.values, width)])


class TorchEngine:
    """An EngineCore on transformers."""

    def __init__(self, options: TorchOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        torch.set_num_threads(options.threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._options = options
        self._clock = clock
        self._device = _device(options.device)
        self._dtype = DTYPES[options.dtype]
        self._model: Any = None
        self._version = 0
        self._queued: deque[GenerationRequest] = deque()
        self._batch: _Batch | None = None
        self._tokens = 0

    @property
    def info(self) -> EngineInfo:
        version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type
        return EngineInfo(kind="torch", version=version, dtype=self._options.dtype, device=name)

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def is_busy(self) -> bool:
        return bool(self._queued or self._batch)

    def load(self, weights: Weights) -> None:
        _check_architecture(weights.directory)
        self._model = None
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                weights.directory,
                dtype=self._dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            model = model.to(self._device).eval().requires_grad_(False)
        except Exception as error:  # the library raises anything on a configuration it does not know, the card when it is full
            raise EngineError(f"version {weights.version} cannot be loaded: {type(error).__name__}: {error}") from error
        lacking = sorted(str(name) for name in (*report["missing_keys"], *report["mismatched_keys"]))
        if lacking:
            raise EngineError(f"version {weights.version} does not fit its config.json: {lacking[:3]} would be drawn at random")
        self._model = model
        self._version = weights.version

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        if len(self._queued) + len(requests) > MOST_QUEUED:
            raise EngineError(f"more than {MOST_QUEUED} completions are queued: ask for fewer leases")
        self._queued.extend(requests)

    def step(self) -> list[Output]:
        self._loaded()
        with torch.inference_mode():
            outputs, fresh = self._take_queued()
            if self._batch is not None:
                self._decode(self._batch)
            if fresh:
                self._join(self._prefill(fresh))
            return outputs + self._give_up() + self._retire()

    def abort(self, keys: Collection[SlotKey]) -> list[Output]:
        stopped = [request.key for request in self._queued if request.key in keys]
        self._queued = deque(request for request in self._queued if request.key not in keys)
        if self._batch is not None:
            rows = self._batch.rows
            stopped += [row.request.key for row in rows if row.request.key in keys]
            with torch.inference_mode():
                self._keep([i for i, row in enumerate(rows) if row.request.key not in keys])
        return [Aborted(key) for key in stopped]

    def apply(self, weights: Weights, *, abort_running: bool) -> Applied:
        started = self._clock()
        _check_architecture(weights.directory)
        copy_weights(self._loaded(), weights.directory)
        self._version = weights.version
        stopped = [row.request.key for row in self._batch.rows] if abort_running and self._batch is not None else []
        return Applied(self.abort(stopped), self._clock() - started)

    def canary(self, ids: Sequence[int]) -> tuple[float, ...]:
        model = self._loaded()
        if len(ids) < 2:
            return ()
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)], device=self._device)
            logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            return tuple(logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist())

    def close(self) -> None:
        self._queued.clear()
        self._batch = None
        self._model = None

    def _loaded(self) -> Any:
        if self._model is None:
            raise EngineError("no weights are loaded: call load first")
        return self._model

    def _take_queued(self) -> tuple[list[Output], list[_Row]]:
        """Requests that become rows now; a few at a time, so that prefills are not one row wide."""
        running = len(self._batch.rows) if self._batch is not None else 0
        free = self._options.slots - running
        if running and free < min(len(self._queued), max(1, self._options.slots // 8)):
            return [], []
        refused: list[Output] = []
        fresh: list[_Row] = []
        while self._queued and len(fresh) < free:
            request = self._queued.popleft()
            problem = self._problem(request)
            if problem:
                refused.append(Unmakeable(request.key, problem))
            else:
                fresh.append(_Row(request, np.random.Generator(np.random.Philox(key=request.seed)), self._clock()))
        return refused, fresh

    def _problem(self, request: GenerationRequest) -> str:
        config = self._model.config
        needed = len(request.prompt_ids) + request.sampling.max_new_tokens
        limit = getattr(config, "max_position_embeddings", needed)
        if needed > limit:
            return f"prompt and completion need {needed} positions, the model has {limit}: lower sampling.max_new_tokens"
        if not request.prompt_ids:
            return "the prompt is empty: at least one token is needed"
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < config.vocab_size:
            return f"the prompt holds a token outside the vocabulary of {config.vocab_size}"
        return ""

    def _prefill(self, rows: list[_Row]) -> _Batch:
        prompts = list(dict.fromkeys(row.request.prompt_ids for row in rows))
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        batch = _Batch(rows, transformers.DynamicCache(), mask)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions, batch.cache)
        index = torch.tensor([prompts.index(row.request.prompt_ids) for row in rows], device=self._device)
        batch.mask = mask[index]
        batch.cache.batch_select_indices(index)
        self._extend(batch.rows, logits[index])
        return batch

    def _join(self, new: _Batch) -> None:
        if self._batch is None:
            self._batch = new
        else:
            self._batch.merge(new)

    def _decode(self, batch: _Batch) -> None:
        ids = torch.tensor([[row.token_ids[-1]] for row in batch.rows], device=self._device)
        positions = torch.tensor([[row.position] for row in batch.rows], device=self._device)
        batch.mask = pad(batch.mask, (0, 1), value=1)
        self._extend(batch.rows, self._forward(ids, batch.mask, positions, batch.cache))

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [rows, vocabulary] of the last column; the cache grows by the columns fed."""
        outcome = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1
        )
        logits: torch.Tensor = outcome.logits[:, -1]
        return logits

    def _extend(self, rows: list[_Row], logits: torch.Tensor) -> None:
        temperatures = torch.tensor([row.request.sampling.temperature for row in rows], device=self._device)
        uniforms = torch.tensor([row.draw.random() for row in rows], dtype=torch.float64, device=self._device)
        tokens, logprobs = sample(logits, temperatures, uniforms)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
        self._tokens += len(rows)

    def _give_up(self) -> list[Output]:
        """Rows whose newest token came from a distribution that is none."""
        if self._batch is None:
            return []
        rows = self._batch.rows
        lost = [row for row in rows if not math.isfinite(row.logprobs[-1])]
        if lost:
            self._keep([i for i, row in enumerate(rows) if math.isfinite(row.logprobs[-1])])
        words = f"the logits of version {self._version} are not finite in {self._options.dtype}: try another --dtype or --device"
        return [Unmakeable(row.request.key, words) for row in lost]

    def _retire(self) -> list[Output]:
        if self._batch is None:
            return []
        rows = self._batch.rows
        done = [row for row in rows if row.is_done]
        if done:
            self._keep([i for i, row in enumerate(rows) if not row.is_done])
        return [Finished(row.request.key, self._completion(row)) for row in done]

    def _keep(self, kept: list[int]) -> None:
        if self._batch is None or len(kept) == len(self._batch.rows):
            return
        if kept:
            self._batch.keep(kept)
        else:
            self._batch = None

    def _completion(self, row: _Row) -> Completion:
        return Completion(
            token_ids=np.array(row.token_ids, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            versions=np.array(row.versions, np.int32),
            stop_reason="stop" if row.stopped else "length",
            generate_s=max(self._clock() - row.started_at, 0.0),
        )


def sample(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF samples [rows] and their float32 log-probs for logits [rows, vocabulary], one uniform in [0, 1) a row.

    Where the logits make no distribution (NaN, or all -inf) the log-prob is NaN, and the token any of the vocabulary.
    """
    scaled = logits.float() / temperatures[:, None]
    cdf = scaled.double().softmax(-1).cumsum(-1)
    total = cdf[:, -1:].contiguous()
    tokens = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    tokens = torch.minimum(tokens, torch.searchsorted(cdf, total))  # rounding must not pass the last possible token
    tokens = tokens.clamp(max=logits.shape[-1] - 1)  # NaN lies after every token
    logprobs = scaled.log_softmax(-1).gather(-1, tokens)
    return tokens[:, 0], logprobs[:, 0].clamp(max=0.0)


def copy_weights(model: Any, directory: Path) -> None:
    """Replace every parameter by the directory's tensors: all checked before the first is touched.

    Tied parameters need one of their names. Raises EngineError, poisoned once a parameter may have been overwritten.
    """
    own = dict(model.state_dict(keep_vars=True))
    files = {name: path for path in sorted(directory.glob("*.safetensors")) for name in _names(path)}
    _check_names(own, files.keys())
    changed = False
    try:
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as tensors:
                _check_shapes(own, tensors, path.name)
        with torch.no_grad():
            for path in sorted(set(files.values())):
                with safe_open(path, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                        tensor = tensors.get_tensor(name)
                        changed = True
                        own[name].copy_(tensor)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"the weights in {directory.name} could not be copied: {error}", poisoned=changed) from error


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path.name} is not a safetensors file: {error}") from error


def _check_names(own: dict[str, torch.Tensor], given: Collection[str]) -> None:
    unknown = sorted(set(given) - own.keys())
    if unknown:
        raise EngineError(f"the new weights hold {unknown[:3]}, which the model has not: another architecture was published")
    filled = {own[name].data_ptr() for name in given}
    missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in filled)
    if missing:
        raise EngineError(f"the new weights lack {missing[:3]}: the old ones are kept")


def _check_shapes(own: dict[str, torch.Tensor], tensors: Any, file: str) -> None:
    for name in tensors.keys():  # noqa: SIM118 (not a mapping)
        shape = tuple(tensors.get_slice(name).get_shape())
        if shape != tuple(own[name].shape):
            raise EngineError(
                f"{name} in {file} has shape {shape}, the model's has {tuple(own[name].shape)}: the old weights are kept"
            )


def _check_architecture(directory: Path) -> None:
    """Only models that the library implements itself, and no code or quantised weights from the directory."""
    config = read_config(directory)
    kind = config.get("model_type")
    attention = [config.get(key) for key in ("attn_implementation", "_attn_implementation")]
    if kind not in MODEL_TYPES:
        raise EngineError(f"model_type is {kind!r} in config.json; this engine loads one of {', '.join(sorted(MODEL_TYPES))}")
    if any(name not in ATTENTIONS for name in attention):
        raise EngineError(f"config.json asks for attention {attention}: only eager and sdpa are used, kernels are not downloaded")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise EngineError(
            f"--device {name!r} cannot be used: {why}; `auto` takes a GPU when this build of torch finds one"
        ) from error
    return device


def _widen(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros on the left of the next-to-last dimension."""
    return pad(tensor, (0, 0, width - tensor.shape[-2], 0))


def _widen_mask(mask: torch.Tensor, width: int) -> torch.Tensor:
    return pad(mask, (width - mask.shape[1], 0))
