"""The worker's settings and the only place that reads its environment."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from worker_node.errors import ConfigError

INVITE_VARIABLE = "ECHO2_INVITE"
PASSPHRASE_VARIABLE = "ECHO2_IDENTITY_PASSPHRASE"  # noqa: S105 (a name, not a secret)
INVITE_FORMAT = "echo2-invite-1"
_SECRET = re.compile(r"[A-Za-z0-9_-]{16,128}")
_KEY = re.compile(r"[0-9a-f]{64}")
_MOST_INVITE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Invite:
    """What an operator hands out: whom to trust, and the right to enrol. `code` is sent whole, and is a secret."""

    coordinator_key: str  # Ed25519 public key, hex
    code: str = field(repr=False)


def parse_invite(text: str) -> Invite:
    """Read `echo2-invite-1.<coordinator public key hex>.<secret base64url>`. Raises ConfigError without repeating the secret."""
    code = text.strip()
    parts = code.split(".")
    if len(parts) != 3 or parts[0] != INVITE_FORMAT:
        raise ConfigError(f"the invite must look like {INVITE_FORMAT}.<key>.<secret>: copy the whole line that the operator sent")
    if not _KEY.fullmatch(parts[1]):
        raise ConfigError("the invite's second part must be 64 hex digits: it was damaged in copying, ask for it again")
    if not _SECRET.fullmatch(parts[2]) or not _is_base64url(parts[2]):
        raise ConfigError("the invite's third part must be base64url: it was damaged in copying, ask for it again")
    return Invite(parts[1], code)


def find_invite(invite: str | None, invite_file: Path | None, environment: Mapping[str, str] | None = None) -> Invite | None:
    """The invite from the option, the file or the variable, in this order; None when none is given."""
    environment = os.environ if environment is None else environment
    if invite is not None:
        return parse_invite(invite)
    if invite_file is not None:
        try:
            with invite_file.open("rb") as file:
                return parse_invite(file.read(_MOST_INVITE_BYTES).decode("ascii", "replace"))
        except OSError as error:
            raise ConfigError(f"--invite-file {invite_file} cannot be read: {error.strerror}") from error
    text = environment.get(INVITE_VARIABLE, "")
    return parse_invite(text) if text else None


def passphrase(environment: Mapping[str, str] | None = None) -> str | None:
    """The identity passphrase from the environment, for scripts."""
    environment = os.environ if environment is None else environment
    return environment.get(PASSPHRASE_VARIABLE) or None


def default_state_dir(environment: Mapping[str, str] | None = None) -> Path:
    """`$XDG_STATE_HOME/echo2-worker`, by default ~/.local/state/echo2-worker."""
    environment = os.environ if environment is None else environment
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "echo2-worker"


def limit_threads(environment: dict[str, str] | None = None) -> None:
    """One thread for each numeric library, unless the owner chose: must run before torch is imported."""
    target = os.environ if environment is None else environment
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        target.setdefault(name, "false" if name == "TOKENIZERS_PARALLELISM" else "1")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Which engine, and how it runs."""

    kind: Literal["torch", "scripted"] = "torch"
    slots: int = 32
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    tokens_per_s: float = 0.0  # scripted: pace; 0 means as fast as it goes
    faults: Mapping[str, int] = field(default_factory=dict)  # scripted: see engine_scripted.FAULTS


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Where this worker serves pieces to others; port 0: it does not."""

    host: str = "127.0.0.1"
    port: int = 0
    bind: str = "0.0.0.0"  # noqa: S104 (others must reach it)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Everything `join` needs."""

    url: str
    coordinator_key: str
    invite_code: str | None = field(repr=False)
    name: str
    price_uusd_per_hour: int
    state_dir: Path
    engine: EngineSettings = EngineSettings()
    peer: PeerSettings = PeerSettings()
    insecure_http: bool = False
    drain_s: float = 120.0
    crash_at: tuple[str, int] | None = None


def parse_counts(values: list[str], option: str, names: tuple[str, ...]) -> dict[str, int]:
    """Read repeated `NAME:COUNT` options."""
    counts: dict[str, int] = {}
    for value in values:
        name, _, count = value.partition(":")
        if name not in names or not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"{option} {value!r} must be NAME:COUNT with a count of at least 1 and a name of {', '.join(names)}")
        counts[name] = int(count)
    return counts


def parse_price(usd_per_hour: float) -> int:
    """USD per hour of active time, as micro-dollars."""
    if not 0 <= usd_per_hour <= 10_000:
        raise ConfigError(f"--price {usd_per_hour} must lie between 0 and 10000 USD per hour")
    return round(usd_per_hour * 1_000_000)


def _is_base64url(text: str) -> bool:
    try:
        base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return False
    return True
