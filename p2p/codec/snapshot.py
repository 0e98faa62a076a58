"""The identity of a version: one digest over what its tensors are called, how they are shaped, and every bit they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blake3 import blake3

from p2p.codec.layout import Bytes, view
from p2p.domain import strict_json as js
from p2p.domain.manifest import Tensor

FORMAT = "echo2-snapshot-1"


def whole_digest(
    tensors: Sequence[Tensor],
    aliases: Mapping[str, str],
    files: Mapping[str, str],
    read: Callable[[str], Bytes],
) -> str:
    """BLAKE3 (hex) of the canonical header, a line break, and the bytes of the tensors in order of name.

    `files` maps the name of each file to the BLAKE3 of its content; `read` gives a tensor's bytes by name. How the version is
    encoded, sharded or cut into pieces does not enter.
    """
    by_name = sorted(tensors, key=lambda tensor: tensor.name)
    state = blake3(header(by_name, aliases, files))
    for tensor in by_name:
        state.update(view(read(tensor.name)))
    return state.hexdigest()


def header(tensors: Sequence[Tensor], aliases: Mapping[str, str], files: Mapping[str, str]) -> bytes:
    """What is hashed before the tensor bytes."""
    fields = {
        "format": FORMAT,
        "tensors": [[one.name, one.dtype, list(one.shape)] for one in tensors],
        "aliases": dict(aliases),
        "files": dict(files),
    }
    return js.canonical(fields).encode() + b"\n"
