"""The systemd unit that `install-service` writes: joins at boot, drains at stop, and may touch little else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Characters that systemd would read as its own inside an argument.
_SPECIAL = str.maketrans({"%": "%%", "$": "$$", "\\": "\\\\", '"': '\\"'})


def quote(argument: str) -> str:
    """One argument of ExecStart, taken literally. Raises ValueError for control characters."""
    if any(ord(character) < 32 for character in argument):
        raise ValueError(f"{argument!r} holds a control character, which a unit file cannot carry")
    return f'"{argument.translate(_SPECIAL)}"'


def unit(command: Sequence[str], *, state_dir: Path, drain_s: float, gpu: bool) -> str:
    """The unit's text for a command line that runs `echo2-worker join ...`."""
    devices = "" if gpu else "PrivateDevices=yes\n"
    return f"""\
[Unit]
Description=ECHO-2 worker
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target nvidia-persistenced.service
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join(quote(argument) for argument in command)}
Environment=OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
Restart=on-failure
RestartSec=10
# Fenced by a newer session with the same key: a restart would fight it.
RestartPreventExitStatus=4
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={int(drain_s) + 30}
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={quote(str(state_dir))}
PrivateTmp=yes
{devices}ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
LockPersonality=yes
# AF_NETLINK: gloo and NCCL (vLLM) list the network interfaces.
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
CapabilityBoundingSet=
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=default.target
"""
