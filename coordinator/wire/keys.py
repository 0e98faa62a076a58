"""What to say about a key that no section knows: the nearest one that there is (pure)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

FILTERS = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def about_unknown(model: type[BaseModel], place: Sequence[str | int]) -> str:
    """Words about the unknown key at `place` of a document of that model."""
    *way, key = place
    if way == ["sampling"] and key in FILTERS:
        return (
            "training takes no sampling filters, since the sampler's log-probs would be of another distribution than the learner's: "
            "remove it (there is sampling.temperature)"
        )
    section = _section(model, way)
    near = difflib.get_close_matches(str(key), section.model_fields, n=1) if section is not None else []
    if near:
        return f"did you mean {'.'.join(map(str, [*way, *near]))}?"
    elsewhere = next((name for name in _names(model) if name.rpartition(".")[2] == key), None)
    return f"did you mean {elsewhere}?" if elsewhere else _known(section)


def _known(section: type[BaseModel] | None) -> str:
    return "correct its spelling" if section is None else f"known here: {', '.join(section.model_fields)}"


def _section(model: type[BaseModel], way: Sequence[str | int]) -> type[BaseModel] | None:
    """The section at the end of a way of keys and places in lists."""
    found: type[BaseModel] | None = model
    for step in way:
        if isinstance(step, str) and found is not None:
            found = _inner(found.model_fields[step].annotation) if step in found.model_fields else None
    return found


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: itself, or inside a list, a tuple or an optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _inner(one)) is not None), None)


def _names(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Dotted names of all keys, outer ones first."""
    for name in model.model_fields:
        yield before + name
    for name, field in model.model_fields.items():
        if (inner := _inner(field.annotation)) is not None:
            yield from _names(inner, f"{before}{name}.")
