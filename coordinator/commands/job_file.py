"""Reads a job file: TOML with dotted overrides, validated before anything is sent; names that exist here are uploaded."""

from __future__ import annotations

import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.errors import CoordinatorError
from coordinator.rest_client import RestClient
from coordinator.service.model_tar import is_model_file
from coordinator.wire.job import JobConfig


class JobFileWrong(CoordinatorError):
    """The job file cannot be used; the words name the key and the fix."""


def read_job(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The job as the API takes it. Overrides read `section.key=value`, the value in TOML's syntax or a bare word."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise JobFileWrong(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobFileWrong(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    try:
        JobConfig.model_validate(tree)
    except ValidationError as error:
        raise JobFileWrong("\n".join(_words(path, e) for e in error.errors(include_url=False))) from error
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise JobFileWrong(f"override {override!r} does not read section.key=value")
    place = tree
    *sections, key = name.split(".")
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise JobFileWrong(f"override {override!r}: {section!r} is a value, not a section")
    try:
        place[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[key] = text


def _words(path: Path, error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path}: {field} is no known key; check its spelling against the job file reference in README.md"
    shown = "" if error["type"] == "missing" else f" (it is {error['input']!r:.80})"
    return f"{path}: {field or 'job'}: {error['msg']}{shown}"


async def upload_names(client: RestClient, tree: dict[str, Any], base: Path) -> list[str]:
    """Upload the files that the job names and that exist beside the job file; put their references in. Returns what was sent."""
    sent: list[str] = []
    environment = tree["environment"]
    for key in ("train", "eval"):
        local = _local(environment.get(key), base)
        if local is not None:
            environment[key] = await _send(client, local, "dataset", sent)
    kind, _, rest = str(environment["type"]).partition(":")
    if kind == "python":
        name, _, function = rest.rpartition(":")
        local = _local(name, base)
        if local is not None:
            environment["type"] = f"python:{await _send(client, local, 'code', sent)}:{function}"
    model = _local(tree.get("model"), base)
    if model is not None and model.is_dir():
        tree["model"] = await _send_model(client, model, sent)
    return sent


def _local(name: object, base: Path) -> Path | None:
    if not isinstance(name, str) or not name or name.startswith("upload:"):
        return None
    path = (base / name).expanduser()
    return path if path.exists() else None


async def _send(client: RestClient, path: Path, kind: str, sent: list[str]) -> str:
    reply = await client.upload(path, kind=kind, name=path.name)
    sent.append(f"{path.name} ({reply['bytes']} bytes)")
    return str(reply["reference"])


async def _send_model(client: RestClient, directory: Path, sent: list[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="echo2-model-") as folder:
        packed = Path(folder) / f"{directory.name}.tar"
        with tarfile.open(packed, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted(directory.iterdir()):
                if is_model_file(path.name):
                    tar.add(path, path.name, filter=_plain)
        return await _send(client, packed, "model", sent)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """No owner and no time: the same model is the same upload."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o644
    return entry
