"""The worker's settings and the only place that reads its environment."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from worker_node.domain.vllm_fit import LEAST_CONTEXT
from worker_node.errors import ConfigError

INVITE_VARIABLE = "ECHO2_INVITE"
PASSPHRASE_VARIABLE = "ECHO2_IDENTITY_PASSPHRASE"  # noqa: S105 (a name, not a secret)
COORDINATOR_FILE = "coordinator.json"
INVITE_FORMAT = "echo2-invite-1"
_SECRET = re.compile(r"[A-Za-z0-9_-]{16,128}")
_KEY = re.compile(r"[0-9a-f]{64}")
_MOST_INVITE_BYTES = 4096
MOST_STEP_S = 10.0  # a throttled decode step: weights are swapped between steps


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


def default_unit_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Where a user's systemd units live."""
    environment = os.environ if environment is None else environment
    base = environment.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "systemd" / "user"


def limit_threads(environment: dict[str, str] | None = None) -> None:
    """One thread for each numeric library, unless the owner chose: must run before torch is imported."""
    target = os.environ if environment is None else environment
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        target.setdefault(name, "false" if name == "TOKENIZERS_PARALLELISM" else "1")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How a vLLM server is started. `python` is the one that has vLLM; it may be of another environment than ours."""

    python: Path = Path(sys.executable)
    tensor_parallel: int = 1  # cards
    gpu_memory: float = 0.9  # of each card, or of this machine's free memory
    kv_cache_gib: float = 0.0  # a card; 0: what is left on a GPU, 1 on a CPU
    max_model_len: int = 0  # 0: the model's, or what fits
    eager: bool = False  # no CUDA graphs: a quicker start, slower tokens
    log: Path | None = None  # None: gone with the server
    visible: str = ""  # the owner's CUDA_VISIBLE_DEVICES; empty: every card


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Which engine, and how it runs."""

    kind: Literal["torch", "vllm", "scripted"] = "torch"
    slots: int = 32
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    tokens_per_s: float = 0.0  # scripted: pace; 0 means as fast as it goes
    faults: Mapping[str, int] = field(default_factory=dict)  # scripted: see engine_scripted.FAULTS
    throttle: float = 0.0  # most tokens a second, with all slots busy; 0: none
    vllm: VllmSettings = VllmSettings()

    @property
    def least_step_s(self) -> float:
        """How long a decode step takes at least: a full one makes `slots` tokens, an emptier one fewer in the same time."""
        return self.slots / self.throttle if self.throttle > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Where this worker serves pieces to others; port 0: it does not. `control_port`: where it takes control messages over libp2p."""

    host: str = "127.0.0.1"
    port: int = 0
    bind: str = "0.0.0.0"  # noqa: S104 (others must reach it)
    control_port: int = 0


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What weights may take of this worker's link; None: not limited. Uploads stop once the month's bytes are used, downloads go on."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    month_bytes: int | None = None  # uploads, a calendar month in UTC


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
    link: LinkSettings = LinkSettings()
    libp2p: bool = True
    insecure_http: bool = False
    drain_s: float = 120.0
    give_up_s: float | None = None  # without a word from the coordinator; None: wait for ever
    crash_at: tuple[str, int] | None = None


def engine_settings(  # noqa: PLR0913 (the options of a command line)
    kind: str,
    *,
    slots: int = 32,
    dtype: str = "float32",
    device: str = "auto",
    tokens_per_s: float = 0.0,
    faults: Mapping[str, int] | None = None,
    throttle: float = 0.0,
    vllm: VllmSettings | None = None,
) -> EngineSettings:
    """Check the options of an engine. Raises ConfigError."""
    if kind not in ("torch", "vllm", "scripted"):
        raise ConfigError(f"--engine {kind!r} must be torch, vllm or scripted")
    if kind == "vllm" and device != "auto":
        raise ConfigError(f"--device {device!r}: vLLM takes the GPUs that it sees; choose them with CUDA_VISIBLE_DEVICES")
    if kind == "vllm" and throttle:
        raise ConfigError(f"--throttle {throttle:g} is for --engine torch: a vLLM server has no brake, give it fewer --slots")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype!r} must be float32, bfloat16 or float16")
    if kind != "scripted" and (tokens_per_s or faults):
        raise ConfigError("--tokens-per-s and --fault are for --engine scripted: a real engine is measured")
    if throttle and slots / throttle > MOST_STEP_S:
        raise ConfigError(
            f"--throttle {throttle:g} leaves {slots} slots less than a token each in {MOST_STEP_S:.0f} s: raise it or lower --slots"
        )
    return EngineSettings(
        kind,  # type: ignore[arg-type]  # checked above
        slots,
        dtype,  # type: ignore[arg-type]  # checked above
        device,
        tokens_per_s,
        dict(faults or {}),
        throttle,
        vllm or VllmSettings(),
    )


def vllm_settings(
    python: Path | None,
    *,
    tensor_parallel: int = 1,
    gpu_memory: float = 0.9,
    kv_cache_gib: float = 0.0,
    max_model_len: int = 0,
    eager: bool = False,
    environment: Mapping[str, str] | None = None,
) -> VllmSettings:
    """Check the options that are for --engine vllm only. Raises ConfigError."""
    if not 0.1 <= gpu_memory <= 0.98:
        raise ConfigError(f"--gpu-memory {gpu_memory:g} must lie between 0.1 and 0.98: the share of a card that vLLM may take")
    if kv_cache_gib and not 0.05 <= kv_cache_gib <= 4096:
        raise ConfigError(f"--kv-cache-gib {kv_cache_gib:g} must be 0 (what is left) or lie between 0.05 and 4096")
    if max_model_len and max_model_len < LEAST_CONTEXT:
        raise ConfigError(
            f"--max-model-len {max_model_len} must be 0 (the model's, or what fits) or at least {LEAST_CONTEXT} tokens"
        )
    path = (python or Path(sys.executable)).absolute()  # not resolved: a virtual environment's python is a link
    if not path.is_file():
        raise ConfigError(f"--vllm-python {python} is no file: name the python of the environment that has vLLM")
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES", "")
    return VllmSettings(path, tensor_parallel, gpu_memory, kv_cache_gib, max_model_len, eager, visible=visible)


def peer_settings(host: str, port: int, control_port: int = 0) -> PeerSettings:
    """Check where peers shall find this worker. Raises ConfigError."""
    for option, value in (("--peer-port", port), ("--control-port", control_port)):
        if value and not 1024 <= value <= 65535:
            raise ConfigError(f"{option} {value} must be 0 or lie in 1024 to 65535")
    if control_port and not port:
        raise ConfigError(f"--control-port {control_port} needs --peer-port: others are told of both or of none")
    if control_port and control_port == port:
        raise ConfigError(f"--control-port {control_port} is --peer-port too: give it another one")
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"--peer-host {host!r} must be an IP address literal: other workers do not resolve names") from error
    if "%" in host:
        raise ConfigError(
            f"--peer-host {host!r} has a scope, which means something on this host only: give an address that others reach"
        )
    anywhere = "::" if address.version == 6 else "0.0.0.0"  # noqa: S104
    bind = str(address) if address.is_loopback else anywhere
    return PeerSettings(host, port, bind, control_port)


def link_settings(up_mbit: float, down_mbit: float, month_gb: float) -> LinkSettings:
    """Limits from Mbit/s and GB (1e9 bytes) a month; 0 means not limited. Raises ConfigError."""
    for option, value in (("--up-mbit", up_mbit), ("--down-mbit", down_mbit), ("--up-gb-per-month", month_gb)):
        if not (value == 0 or 0.1 <= value <= 1e6):
            raise ConfigError(f"{option} {value:g} must be 0 (not limited) or lie between 0.1 and 1000000")
    return LinkSettings(up_mbit * 125_000 or None, down_mbit * 125_000 or None, int(month_gb * 1e9) or None)


def remember_coordinator(state_dir: Path, url: str, key: str) -> None:
    """Keep whom the invite named, so that a known worker comes back without it."""
    path = state_dir / COORDINATOR_FILE
    text = json.dumps({"url": url.rstrip("/"), "coordinator_key": key})
    with suppress(OSError, ValueError):  # what is known is not written again: a full disk keeps no worker from coming back
        if path.read_text("utf-8") == text:
            return
    temporary = path.with_name(f".{COORDINATOR_FILE}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir} cannot be written: {error.strerror}") from error


def read_coordinator(state_dir: Path, url: str) -> str:
    """The key of the coordinator at `url` that this worker joined before. Raises ConfigError when it never did."""
    try:
        known = json.loads((state_dir / COORDINATOR_FILE).read_text("utf-8"))
        if known["url"] == url.rstrip("/") and _KEY.fullmatch(known["coordinator_key"]):
            return str(known["coordinator_key"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"this worker never joined {url}: pass the operator's invite with --invite, --invite-file or {INVITE_VARIABLE}"
    )


def parse_counts(values: list[str], option: str, names: tuple[str, ...]) -> dict[str, int]:
    """Read repeated `NAME:COUNT` options."""
    counts: dict[str, int] = {}
    for value in values:
        name, _, count = value.partition(":")
        if name not in names or not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"{option} {value!r} must be NAME:COUNT with a count of at least 1 and a name of {', '.join(names)}")
        counts[name] = int(count)
    return counts


def give_up_s(minutes: float) -> float | None:
    """Seconds after which a worker without its coordinator ends; 0: never. Raises ConfigError."""
    if not (minutes == 0 or 1 <= minutes <= 100_000):
        raise ConfigError(f"--give-up-after-min {minutes:g} must be 0 (never) or lie between 1 and 100000")
    return minutes * 60 or None


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
