"""What a vLLM server must offer, judged from its own description (OpenAPI), and what its answers mean.

The names are those of vLLM 0.32; they are new and move between releases, so they are looked for, not taken for granted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

OLDEST: Final = (0, 32)
ROUTES: Final = (
    ("post", "/inference/v1/generate"),
    ("post", "/pause"),
    ("post", "/resume"),
    ("post", "/init_weight_transfer_engine"),
    ("post", "/start_weight_update"),
    ("post", "/update_weights"),
    ("post", "/finish_weight_update"),
    ("post", "/update_weight_version"),
    ("post", "/reset_prefix_cache"),
    ("post", "/collective_rpc"),
    ("get", "/health"),
    ("get", "/metrics"),
    ("get", "/v1/models"),
)
WORDS: Final = ("token_ids", "cache_salt", "prompt_logprobs", "weight_version", "update_info")  # fields that requests use
_CACHE: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_GENERATED: Final = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def too_old(version: str) -> str:
    """Why a release of vLLM is refused before it is started; empty when it may do. Versions look like `0.32.0` or `0.33.0rc1+cu130`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"vLLM's version {version!r} cannot be read: install 0.{OLDEST[1]} or newer"
    if (int(found[1]), int(found[2])) < OLDEST:
        return f"vLLM {version} cannot update weights as this worker does: install {OLDEST[0]}.{OLDEST[1]} or newer"
    return ""


def lacking(description: Mapping[str, Any], text: str) -> list[str]:
    """Routes and fields that the server's OpenAPI document lacks, by name. `text` is the document as it came."""
    paths = description.get("paths", {})
    routes = [f"{method.upper()} {path}" for method, path in ROUTES if method not in paths.get(path, {})]
    return routes + [word for word in WORDS if f'"{word}"' not in text]


def token_versions(spans: Sequence[Mapping[str, Any]] | None, labels: Mapping[str, int], length: int) -> tuple[int, ...]:
    """One version a token from spans `{version, start, end}` over `length` tokens. Raises ValueError when they do not fit together."""
    versions: list[int] = []
    for span in spans or ():
        label, start, end = str(span["version"]), int(span["start"]), int(span["end"])
        if label not in labels:
            raise ValueError(f"tokens {start} to {end} carry the unknown weight label {label!r}")
        if start != len(versions) or end < start:
            raise ValueError(f"the span {start} to {end} does not follow {len(versions)} tokens")
        versions += [labels[label]] * (end - start)
    if len(versions) != length:
        raise ValueError(f"the weight spans cover {len(versions)} of {length} tokens")
    if any(later < earlier for earlier, later in pairwise(versions)):
        raise ValueError("the weight spans go back to an older version")
    return tuple(versions)


def progress(metrics: str) -> tuple[float, float] | None:
    """Tokens made, and the share of the KV cache in use, which also grows with each part of a long prompt; None when tokens are not told."""
    made = generated_tokens(metrics)
    return None if made is None else (made, sum(float(value) for value in _CACHE.findall(metrics)))


def generated_tokens(metrics: str) -> float | None:
    """Tokens made since the server's start, from its Prometheus page; None when they are not told."""
    found = _GENERATED.findall(metrics)
    return sum(float(value) for value in found) if found else None
