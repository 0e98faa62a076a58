"""The few kernel calls that Python does not offer, through ctypes. Each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SETPCAP = 1, 2, 5, 8
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 8, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1


class Kernel:
    """The C library's doors to the kernel."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def prctl(self, option: int, value: int = 0, third: int = 0) -> int:
        unsigned = ctypes.c_ulong
        result = self._libc.prctl(option, unsigned(value), unsigned(third), unsigned(0), unsigned(0))
        return self._checked(result, f"prctl({option})")

    def no_new_privs(self) -> None:
        """No program started from here gains rights by its set-uid bit or capabilities."""
        self.prctl(_PR_SET_NO_NEW_PRIVS, 1)

    def die_with_parent(self, signal: int) -> None:
        """Send this process `signal` when the thread that started it ends. A change of user undoes it: set it after."""
        self.prctl(_PR_SET_PDEATHSIG, signal)

    def unshare(self, flags: int) -> None:
        """New namespaces for this (single-threaded) process."""
        self._checked(self._libc.unshare(flags), f"unshare({flags:#x})")

    def mount_scratch(self, directory: Path, *, size_bytes: int, uid: int) -> None:
        """A private in-memory file system of bounded size, in this process's mount namespace only."""
        self._mount(b"none", Path("/"), None, _MS_REC | _MS_PRIVATE, None)
        options = f"size={size_bytes},nr_inodes=4096,mode=700,uid={uid}".encode()
        self._mount(b"tmpfs", directory, b"tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)

    def keep_capabilities_over_setuid(self) -> None:
        self.prctl(_PR_SET_KEEPCAPS, 1)

    def drop_bounding_set(self) -> None:
        """No capability can be gained again. Raises OSError without CAP_SETPCAP."""
        for capability in range(_CAPABILITIES):
            try:
                self.prctl(_PR_CAPBSET_DROP, capability)
            except OSError:
                if capability == 0:
                    raise
                return  # past the last capability this kernel has

    def set_capabilities(self, kept: Iterable[int]) -> None:
        """Hold exactly the `kept` capabilities (below 32)."""
        mask = sum(1 << capability for capability in kept)
        head = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
        data = ctypes.create_string_buffer(struct.pack("=6I", mask, mask, 0, 0, 0, 0), 24)
        number = _CAPSET.get(platform.machine())
        if number is None:
            raise OSError(0, f"capset: unknown machine {platform.machine()}")
        self._checked(self._libc.syscall(ctypes.c_long(number), head, data), "capset")

    def clear_ambient(self) -> None:
        self.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)

    def landlock_version(self) -> int:
        """Landlock's ABI version; 0 where the kernel has none or it is switched off."""
        version = self._libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint32(1))
        return max(0, int(version))

    def landlock(self, *, readable: Iterable[Path], listable: Iterable[Path], writable: Iterable[Path]) -> None:
        """Restrict files to these trees (`writable` ones in full), and forbid TCP, outside abstract sockets and signals."""
        version = self.landlock_version()
        rules = self._ruleset(version)
        try:
            everything = _file_rights(version)
            trees = [(path, _READ_FILE | _READ_DIR) for path in readable]
            trees += [(path, _READ_DIR) for path in listable] + [(path, everything) for path in writable]
            for path, rights in trees:
                self._allow(rules, path, rights)
            self._checked(
                self._libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT), rules, ctypes.c_uint32(0)), "landlock_restrict_self"
            )
        finally:
            os.close(rules)

    def _ruleset(self, version: int) -> int:
        network = 0b11 if version >= 4 else 0
        scoped = 0b11 if version >= 6 else 0
        words = [_file_rights(version), *([network] if version >= 4 else []), *([scoped] if version >= 6 else [])]
        raw = ctypes.create_string_buffer(struct.pack(f"={len(words)}Q", *words), 8 * len(words))
        size = ctypes.c_size_t(8 * len(words))
        return self._checked(
            self._libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), raw, size, ctypes.c_uint32(0)), "landlock_create_ruleset"
        )

    def _allow(self, rules: int, path: Path, rights: int) -> None:
        """Allow `rights` beneath a path; a path that does not exist or cannot be reached needs no right."""
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        try:
            if not path.is_dir():
                rights &= _READ_FILE | _WRITE_FILE
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened), 12)
            result = self._libc.syscall(ctypes.c_long(_LANDLOCK_ADD), rules, ctypes.c_int(1), rule, ctypes.c_uint32(0))
            self._checked(result, f"landlock_add_rule({path})")
        finally:
            os.close(opened)

    def _mount(self, source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None) -> None:
        result = self._libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), options)
        self._checked(result, f"mount({target})")

    def _checked(self, result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return int(result)


def _file_rights(version: int) -> int:
    """All file rights this Landlock knows."""
    count = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    return (1 << count) - 1
