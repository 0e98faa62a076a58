"""Writes the systemd unit and, beside the key, the invite that it reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from worker_node.adapters.identity import make_state_dir
from worker_node.config import Invite
from worker_node.errors import ConfigError
from worker_node.service_unit import unit

UNIT_NAME = "echo2-worker.service"
INVITE_NAME = "invite"


def write_service(
    command: Sequence[str], *, state_dir: Path, unit_dir: Path, invite: Invite | None, drain_s: float, gpu: bool
) -> Path:
    """The unit's path. Raises ConfigError."""
    make_state_dir(state_dir)
    full = list(command)
    try:
        if invite is not None:
            path = state_dir / INVITE_NAME
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(invite.code + "\n")
            full += ["--invite-file", str(path)]
        text = unit(full, state_dir=state_dir, drain_s=drain_s, gpu=gpu)
        unit_dir.mkdir(parents=True, exist_ok=True)
        target = unit_dir / UNIT_NAME
        target.write_text(text, "utf-8")
    except ValueError as error:
        raise ConfigError(f"the unit cannot be written: {error}") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or unit_dir} cannot be written: {error.strerror}; choose another --unit-dir") from error
    return target
