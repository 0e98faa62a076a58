"""Attention over packed sequences: the rollouts of a micro-batch stand one behind the other, and none sees another.

Every other layer works on the T tokens alone. Attention spreads them over a rectangle with one rollout a row, padded on the right,
where plain causal attention is exact (what pads stands after all that is real), and brings them back. So no mask of T x T is ever
made, the fastest causal kernel of the device is used, and nothing but attention pays for padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "echo2_packed"


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the tokens of a packed sequence stand in the rectangle of its rollouts."""

    cells: Tensor  # int64 [T], row * width + place
    rows: int
    width: int

    def to(self, device: str) -> Segments:
        """The same on another device."""
        return Segments(self.cells.to(device), self.rows, self.width)


def prepare(model: nn.Module) -> None:
    """Let the model take `segments` from now on. Calls without them are answered as transformers would."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.config._attn_implementation = NAME


def inputs(segments: Segments) -> dict[str, Any]:
    """What a packed call passes to the model. A mask of four dimensions is handed through unread, so that none is made."""
    return {"segments": segments, "attention_mask": torch.empty(1, 1, 1, 1, device=segments.cells.device)}


def attend(  # noqa: PLR0913 (transformers' interface)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query, key and value [1, heads, T, size]; the result is [1, T, heads, size]."""
    kernel: Callable[..., Any] = sdpa_attention_forward if softcap is None else partial(_capped, softcap=softcap)
    if segments is None:
        plain, _ = kernel(module, query, key, value, attention_mask, **settings)
        return plain, None
    spread = [_spread(each, segments) for each in (query, key, value)]
    mask = _window(segments.width, sliding_window, query.device)
    found, _ = kernel(module, *spread, mask, **{**settings, "is_causal": True})
    return found.flatten(0, 1).index_select(0, segments.cells)[None], None


def _capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    softcap: float,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """gemma2's, whose scores go through cap * tanh(score / cap): no kernel of torch has that. `mask`: bool; None: causal."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # not -inf: a row that pads sees nothing, and must not be NaN
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


def _spread(packed: Tensor, segments: Segments) -> Tensor:
    """[1, heads, T, size] to [rows, heads, width, size]; zeros where a rollout is shorter."""
    flat = packed[0].transpose(0, 1)
    room = flat.new_zeros(segments.rows * segments.width, *flat.shape[1:])
    return room.index_copy(0, segments.cells, flat).unflatten(0, (segments.rows, segments.width)).transpose(1, 2)


def _window(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """Who may see whom where a layer looks back `window` tokens only; None: whoever came before."""
    if window is None or width <= window:
        return None
    places = torch.arange(width, device=device)
    back = places[:, None] - places[None, :]
    return ((back >= 0) & (back < window))[None, None]
