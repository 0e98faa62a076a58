"""Does a model fit, with what KV cache and what context: arithmetic before a server is started, in words.

    weights a card = file bytes * (bytes an element / 2) / cards            (files hold bf16)
    KV a token and card = 2 * layers * max(KV heads / cards, 1) * head size * bytes an element

What the runtime itself needs is an allowance; on a GPU vLLM measures it and takes what is left for the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

GIB: Final = 1 << 30
ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
LEAST_CONTEXT: Final = 256
DEFAULT_CPU_KV_BYTES: Final = GIB
_RUNTIME_BYTES: Final = {"cpu": GIB * 5 // 4, "gpu": GIB * 3 // 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its memory. Sliding windows are not counted: the estimate is then too large."""

    layers: int
    kv_heads: int
    head_dim: int
    context: int  # positions
    vocab: int
    file_bytes: int  # of its weights, in bf16
    heads: int  # of attention


@dataclass(frozen=True, slots=True)
class Room:
    """Where it is to run. `memory_bytes`: of one card, or what this machine has free, for all ranks together; None: not known."""

    place: str  # "cpu" or "gpu"
    memory_bytes: int | None
    share: float  # of a card's memory that may be used
    cards: int
    dtype: str
    slots: int
    kv_bytes: int | None = None  # a card; None: by default, or what is left
    max_model_len: int | None = None  # None: the model's, or what fits


@dataclass(frozen=True, slots=True)
class Fit:
    """How to start the server. `words` is for the owner."""

    max_model_len: int
    kv_bytes: int | None  # None: vLLM takes what is left
    words: str


def read_shape(config: Mapping[str, Any], file_bytes: int) -> Shape:
    """From a config.json. Raises ValueError that names the missing or odd entry."""
    layers, heads, hidden = (_count(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    head_dim = _count(config, "head_dim") if config.get("head_dim") else hidden // heads
    return Shape(
        layers, kv_heads, head_dim, _count(config, "max_position_embeddings"), _count(config, "vocab_size"), file_bytes, heads
    )


def token_bytes(shape: Shape, *, dtype: str, cards: int) -> int:
    """KV cache of one token on one card."""
    return 2 * shape.layers * max(shape.kv_heads // cards, 1) * shape.head_dim * ELEMENT_BYTES[dtype]


def fit(shape: Shape, room: Room) -> Fit:
    """The context and cache to start with. Raises ValueError that says what does not fit and what to change."""
    if room.max_model_len is not None and room.max_model_len > shape.context:
        raise ValueError(f"--max-model-len {room.max_model_len}: the model has {shape.context} positions")
    if shape.heads % room.cards:
        raise ValueError(f"--tensor-parallel {room.cards}: the model's {shape.heads} attention heads cannot be shared evenly")
    weights = shape.file_bytes * ELEMENT_BYTES[room.dtype] // 2 // room.cards
    cache = _cache_bytes(room, weights)
    one = token_bytes(shape, dtype=room.dtype, cards=room.cards)
    weights_words = f"weights {_gib(weights)}{' a card' if room.cards > 1 else ''} in {room.dtype}"
    if cache is None:  # memory not known: vLLM will say
        length = room.max_model_len or shape.context
        return Fit(length, room.kv_bytes, f"{weights_words}; memory is not known here, context {length} tokens")
    tokens = cache // one
    length = room.max_model_len or min(shape.context, tokens // 16 * 16)
    if length > tokens or length < min(LEAST_CONTEXT, shape.context):
        raise ValueError(
            f"the model does not fit: {weights_words} leave {_gib(cache)} for the KV cache = {max(tokens, 0)} tokens, "
            f"{max(length, LEAST_CONTEXT)} are needed for one completion: {_advice(room)}"
        )
    words = (
        f"{weights_words}, KV cache {_gib(cache)} = {tokens} tokens: {room.slots} slots of {tokens // room.slots} tokens at once"
    )
    shorter = f" (of the model's {shape.context})" if length < shape.context else ""
    return Fit(length, _given(room), f"{words}, context {length} tokens{shorter}")


def _given(room: Room) -> int | None:
    """What the server is told: on a GPU nothing unless its owner chose."""
    return (room.kv_bytes or DEFAULT_CPU_KV_BYTES) if room.place == "cpu" else room.kv_bytes


def _cache_bytes(room: Room, weights: int) -> int | None:
    """What is there for the cache on one card; None when it cannot be known. Raises ValueError when the given cache is too large."""
    given = _given(room)
    if room.memory_bytes is None:
        return given
    memory = room.memory_bytes // room.cards if room.place == "cpu" else room.memory_bytes
    left = int(memory * room.share) - weights - _RUNTIME_BYTES[room.place]
    if given is None:
        return left
    if given > left:
        raise ValueError(
            f"the model does not fit: weights {_gib(weights)} in {room.dtype}, KV cache {_gib(given)} and {_gib(_RUNTIME_BYTES[room.place])} "
            f"for the runtime are more than {room.share:.0%} of {_gib(memory)}: {_advice(room)}"
        )
    return given


def _advice(room: Room) -> str:
    ways = ["lower --max-model-len"] if room.max_model_len is not None else []
    if room.kv_bytes is not None:
        ways.append("change --kv-cache-gib")
    if room.dtype == "float32":
        ways.append("use --dtype bfloat16")
    if room.place == "gpu":
        ways += ["raise --gpu-memory", "more cards with --tensor-parallel"]
    return ", ".join([*ways, "or take a machine with more memory"])


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} in config.json is {value!r}: it must be a positive integer")
    return value


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
