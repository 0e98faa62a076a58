"""What a child applies to itself before it loads anything a job's author or a model's maker wrote.

In this order: own session, no new privileges, private network, mount and IPC namespaces, a scratch file system of bounded size, an
unprivileged user, no capabilities, Landlock, rlimits, death with the parent, and a system call filter. Every layer is optional
(kernels and containers differ) and the report says what is in force, tried and found to hold, and what is missing with
its reason. Call while the process has one thread. Threads can be started afterwards; processes cannot.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.environments import kernel as k
from coordinator.environments import seccomp
from coordinator.environments.kernel import Kernel
from coordinator.environments.syscalls import machine

FIRST_UNPRIVILEGED_UID = 0x70000000
_SYSTEM_READABLE = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_SYSTEM_READABLE_FILES = ("/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")


@dataclass(frozen=True, slots=True)
class JailLimits:
    """Bounds of one child. `cpu_s` is CPU time a request may use; None: the request's wall-clock limit."""

    address_space_bytes: int = 2 << 30
    file_bytes: int = 64 << 20
    scratch_bytes: int = 64 << 20
    open_files: int = 128
    processes: int = 64
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class JailReport:
    """What holds in a child. `missing` names each absent layer with its reason."""

    network: bool = False  # a network namespace of its own, without any interface up
    sockets_denied: bool = False  # socket() was tried and refused
    seccomp: bool = False
    no_new_privs: bool = False
    user: int = -1  # the uid the child runs under
    capabilities_dropped: bool = False
    landlock: int = 0  # ABI version; 0: files of the coordinator's user are readable
    scratch_bounded: bool = False
    rlimits: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def confines_author_code(self) -> bool:
        """Whether a stranger's Python may run here: it must have no way to the network."""
        return self.network or (self.seccomp and self.sockets_denied)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def report_from(values: dict[str, Any]) -> JailReport:
    """The report a child sent. Raises TypeError on unknown fields."""
    return JailReport(**{**values, "rlimits": tuple(values["rlimits"]), "missing": tuple(values["missing"])})


@dataclass(frozen=True, slots=True)
class JailPlan:
    """What to apply: bounds, the scratch directory, the files to be read later, and the parent's process id."""

    limits: JailLimits
    scratch: Path
    readable: tuple[Path, ...]
    parent_pid: int


def apply(plan: JailPlan) -> JailReport:
    """Jail this process for good. Never raises for an absent layer; exits when the parent is already gone."""
    return _Jail(plan).close()


class _Jail:
    """The layers, each noting what it did."""

    def __init__(self, plan: JailPlan) -> None:
        self._plan = plan
        self._kernel = Kernel()
        self._report = JailReport()
        self._is_root = os.geteuid() == 0
        self._own_user_namespace = False
        self._has_own_user = False
        held = _permitted()
        self._readers = [c for c in (k.CAP_DAC_READ_SEARCH, k.CAP_DAC_OVERRIDE) if c in held][:1]
        self._parent_can_kill = k.CAP_KILL in held
        self._bounders = [c for c in (k.CAP_SETPCAP,) if c in held]

    def close(self) -> JailReport:
        os.umask(0o077)
        if os.getsid(0) != os.getpid():
            os.setsid()
        self._try("no_new_privs", self._no_new_privs)
        self._try("network namespace", self._namespaces)
        self._try("bounded scratch", self._scratch)
        os.chdir(self._plan.scratch)
        readable = _readable(self._plan.readable)
        self._try("unprivileged user", self._user)
        self._try("dropped capabilities", self._capabilities)
        self._try("Landlock", lambda: self._landlock(readable))
        self._try("rlimits", self._rlimits)
        self._parent()
        self._try("seccomp", self._seccomp)
        self._probe()
        return self._report

    def _try(self, layer: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:
            words = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._note(missing=(*self._report.missing, f"{layer}: {words}"))

    def _note(self, **facts: Any) -> None:
        self._report = replace(self._report, **facts)

    def _no_new_privs(self) -> None:
        self._kernel.no_new_privs()
        self._note(no_new_privs=True)

    def _namespaces(self) -> None:
        """Network, mounts and IPC of its own; by way of a user namespace when the process has no right to them itself."""
        wanted = k.CLONE_NEWNET | k.CLONE_NEWNS | k.CLONE_NEWIPC
        before = Path("/proc/self/ns/net").readlink()
        uid, gid = os.geteuid(), os.getegid()
        try:
            self._kernel.unshare(wanted)
        except OSError:
            self._kernel.unshare(wanted | k.CLONE_NEWUSER)
            self._own_user_namespace = True
            self._bounders = [k.CAP_SETPCAP]
            _map_user(uid, gid)
        interfaces = [line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
        self._note(network=Path("/proc/self/ns/net").readlink() != before and interfaces in ([], ["lo"]))

    def _scratch(self) -> None:
        if not self._report.network:
            raise OSError(errno.EPERM, "it needs a mount namespace")
        self._kernel.mount_scratch(self._plan.scratch, size_bytes=self._plan.limits.scratch_bytes, uid=os.geteuid())
        self._note(scratch_bounded=True)

    def _user(self) -> None:
        """Root becomes a user that owns nothing, if Landlock can bound the right to read that imports need."""
        self._note(user=os.geteuid())
        if not self._is_root or self._own_user_namespace:
            return
        if self._kernel.landlock_version() == 0 or not self._readers or not self._parent_can_kill:
            raise OSError(errno.ENOSYS, "it needs Landlock and the capabilities to read files and to kill; the child stays root")
        uid = FIRST_UNPRIVILEGED_UID + os.getpid()
        os.chown(self._plan.scratch, uid, uid)
        self._kernel.keep_capabilities_over_setuid()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        self._has_own_user = True
        self._note(user=uid)
        self._kernel.set_capabilities([*self._readers, *self._bounders])

    def _capabilities(self) -> None:
        """None are left, but the right to read files past their modes where Landlock bounds which files."""
        if self._bounders:
            self._kernel.drop_bounding_set()
        self._kernel.clear_ambient()
        self._kernel.set_capabilities(self._readers if self._has_own_user else [])
        self._note(capabilities_dropped=True)

    def _landlock(self, readable: _Readable) -> None:
        version = self._kernel.landlock_version()
        if version == 0:
            raise OSError(errno.ENOSYS, "the kernel has none, so files that this user can read are readable")
        writable = (self._plan.scratch, Path("/dev/null"))
        self._kernel.landlock(readable=readable.trees, listable=readable.listed, writable=writable)
        self._note(landlock=version)

    def _rlimits(self) -> None:
        limits = self._plan.limits
        wanted = {
            "AS": limits.address_space_bytes,
            "FSIZE": limits.file_bytes,
            "NOFILE": limits.open_files,
            "CORE": 0,
            "MEMLOCK": 0,
            "MSGQUEUE": 0,
        }
        if self._own_user_namespace or self._has_own_user:
            wanted["NPROC"] = (
                limits.processes
            )  # counted per user: only one of the child's own can be bounded without starving others
        for name, value in wanted.items():
            _lower(getattr(resource, f"RLIMIT_{name}"), value)
        self._note(rlimits=tuple(wanted))

    def _parent(self) -> None:
        self._try("death with the parent", lambda: self._kernel.die_with_parent(signal.SIGKILL))
        if os.getppid() != self._plan.parent_pid:
            os._exit(1)  # it died before the order above stood

    def _seccomp(self) -> None:
        known = machine(platform.machine())
        if known is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, f"no system call table for {platform.machine()}")
        seccomp.install(seccomp.build(known, pid=os.getpid()), self._kernel.prctl)
        self._note(seccomp=True)

    def _probe(self) -> None:
        """Try what must fail."""
        try:
            socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        except OSError:
            self._note(sockets_denied=True)


@dataclass(frozen=True, slots=True)
class _Readable:
    """Trees that may be read, and trees of which only the names may be listed."""

    trees: tuple[Path, ...]
    listed: tuple[Path, ...]


def _readable(extra: Sequence[Path]) -> _Readable:
    """Python, its libraries, this package and the job's own files; links are followed, as rules are on real files."""
    trees = [Path(name) for name in (*_SYSTEM_READABLE, *_SYSTEM_READABLE_FILES)]
    trees += [Path(sys.prefix), Path(sys.base_prefix)]
    entries = [Path(entry) for entry in sys.path if entry]
    package = Path(__file__).resolve().parents[1]
    libraries = [entry for entry in entries if entry.resolve() != package.parent]
    for path in extra:
        trees.append(path)
        trees += [item.resolve() for item in path.iterdir() if item.is_symlink()] if path.is_dir() else []
    trees += [*libraries, package]
    return _Readable(tuple(dict.fromkeys(path.resolve() for path in trees)), (package.parent,))


def _permitted() -> set[int]:
    """The capabilities this process may use."""
    words = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm:"))
    mask = int(words.split()[1], 16)
    return {place for place in range(mask.bit_length()) if mask >> place & 1}


def _map_user(uid: int, gid: int) -> None:
    """In a new user namespace, be who we were: files keep their owner, and the kernel can name us."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _lower(limit: int, value: int) -> None:
    """Set both limits to `value`, or to the hard limit in force where that is lower."""
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def allow_cpu(seconds: float) -> None:
    """Let this process use about `seconds` more CPU seconds (all threads); beyond that the kernel ends it with SIGXCPU."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = int(used + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
