"""Reads a job file: TOML with dotted overrides, validated before anything is sent; names that exist here are uploaded."""

from __future__ import annotations

import ast
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.errors import CoordinatorError
from coordinator.rest_client import RequestFailed, RestClient
from coordinator.service.model_tar import is_model_file
from coordinator.wire.environment import EnvironmentConfig
from coordinator.wire.job import JobConfig
from coordinator.wire.keys import about_unknown


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
        raise JobFileWrong(f"override {override!r} does not read section.key=value, for example budget.steps=100")
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
        return f"{path}: {field} is no known key; {about_unknown(JobConfig, error['loc'])}"
    shown = "" if error["type"] == "missing" else f" (it is {error['input']!r:.80})"
    return f"{path}: {field or 'job'}: {error['msg']}{shown}"


def check_reward_code(path: Path, function: str, *, where: str) -> None:
    """The reward function must be defined in the file. Looks, and runs nothing. Raises JobFileWrong."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise JobFileWrong(f"{where}: {path} is no Python that can be read: {error}") from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if function not in defined and function not in named:
        raise JobFileWrong(f"{where}: {path} defines no function {function!r}; it defines {', '.join(defined) or 'none'}")


def missing_names(tree: Mapping[str, Any], base: Path) -> list[str]:
    """Names in the job that stand for nothing beside the job file: they must lie on the coordinator."""
    named = EnvironmentConfig.model_validate(tree["environment"]).files()
    names = [tree.get("model"), *(file.name for file in named)]
    return [
        name for name in names if isinstance(name, str) and name and not name.startswith("upload:") and _local(name, base) is None
    ]


async def submit_with_uploads(client: RestClient, tree: dict[str, Any], base: Path) -> tuple[list[str], Any]:
    """Upload what lies beside the job file, then submit: (what was sent, the job).

    Absolute names go as they are, since the coordinator may have them inside a root, and are uploaded only when it does not.
    """
    sent = await upload_names(client, tree, base, absolute=False)
    try:
        return sent, await client.post("/jobs", tree)
    except RequestFailed as refused:
        more = await upload_names(client, tree, base) if refused.code == "name_not_allowed" else []
        if not more:
            raise
        return [*sent, *more], await client.post("/jobs", tree)


async def upload_names(client: RestClient, tree: dict[str, Any], base: Path, *, absolute: bool = True) -> list[str]:
    """Upload the files that the job names and that exist here; put their references in. Returns what was sent.

    `absolute`: also those with an absolute name.
    """

    def here(name: object) -> Path | None:
        path = _local(name, base)
        return path if absolute or not Path(str(name)).expanduser().is_absolute() else None

    sent: list[str] = []
    environment = tree["environment"]
    for part in (environment, *environment.get("sources", ())):
        for key in ("train", "eval"):
            local = here(part.get(key))
            if local is not None:
                part[key] = await _send(client, local, "dataset", sent)
    parts = [("environment", environment)]
    parts += [(f"environment.{key}.{n}", one) for key in ("rewards", "sources") for n, one in enumerate(environment.get(key, ()))]
    for where, part in parts:
        kind, _, rest = str(part.get("type", "")).partition(":")
        name, _, function = rest.rpartition(":")
        local = here(name) if kind == "python" else None
        if local is not None:
            check_reward_code(local, function, where=f"{where}.type")
            part["type"] = f"python:{await _send(client, local, 'code', sent)}:{function}"
    model = here(tree.get("model"))
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
