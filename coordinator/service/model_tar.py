"""Unpacks an uploaded model: an uncompressed tar of plain files with allow-listed names, and nothing else.

No member chooses where it is written: its name must be one of the allowed bare names. Links, devices, sparse files, directories
besides `.`, repeated names and more bytes than declared are refused before anything outside the target could be touched.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import IO

from coordinator.service.operator_errors import RequestRefused, invalid

MOST_MEMBERS = 256
HEADER_READ_LIMIT = 1 << 20
_COPY_BYTES = 1 << 20
_ALLOWED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.json|vocab\.txt|merges\.txt|chat_template\.jinja|chat_template\.json"
    r"|model\.safetensors|model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json"
    r"|adapter_config\.json|adapter_model\.safetensors"
)


def is_model_file(name: str) -> bool:
    """Whether a Hugging Face directory may hold, and show, a file of that name."""
    return _ALLOWED.fullmatch(name) is not None


class _BoundedReads:
    """A file whose single reads are bounded: a tar header may announce any size for its own extension records."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > HEADER_READ_LIMIT:
            raise tarfile.ReadError(f"a header record of {size} bytes; at most {HEADER_READ_LIMIT} are read")
        return self._source.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()


def unpack_model(source: Path, target: Path, *, limit_bytes: int) -> None:
    """Write the members into the empty directory `target`. Raises RequestRefused; the caller then removes `target`."""
    try:
        with source.open("rb") as raw, tarfile.open(fileobj=_BoundedReads(raw), mode="r:") as tar:  # type: ignore[call-overload]
            _unpack(tar, target, limit_bytes)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, UnicodeError) as error:
        raise _refused(f"the body is not an uncompressed tar: {error}") from error
    names = {path.name for path in target.iterdir()}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise _refused("it holds no config.json, or no .safetensors file")


def _unpack(tar: tarfile.TarFile, target: Path, limit_bytes: int) -> None:
    total = 0
    for count, member in enumerate(tar, start=1):
        if count > MOST_MEMBERS:
            raise _refused(f"it holds more than {MOST_MEMBERS} members")
        if member.isdir() and member.name in (".", "./", ""):
            continue
        name = _checked_name(member)
        total += member.size
        if total > limit_bytes:
            raise _refused(f"its files hold more than {limit_bytes} bytes")
        _copy(tar, member, target / name)


def _checked_name(member: tarfile.TarInfo) -> str:
    name = member.name.removeprefix("./")
    if member.issparse() or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise _refused(f"member {member.name[:200]!r} is not a plain file")
    if not is_model_file(name):
        raise _refused(f"member {member.name[:200]!r} is not a file of a Hugging Face model directory")
    return name


def _copy(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = tar.extractfile(member)
    if content is None or path.exists():
        raise _refused(f"member {member.name[:200]!r} appears twice or has no content")
    left = member.size
    with path.open("xb") as out:
        while left > 0:
            block = content.read(min(_COPY_BYTES, left))
            if not block:
                raise _refused(f"member {member.name[:200]!r} is shorter than its header says")
            out.write(block)
            left -= len(block)


def _refused(why: str) -> RequestRefused:
    return invalid(
        "model_tar_refused",
        f"the model tar was refused: {why}",
        field="body",
        fix="make it with `tar -C MODEL_DIRECTORY -cf model.tar config.json tokenizer.json model.safetensors ...`",
    )
