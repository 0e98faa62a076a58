"""The jail's system call filter as classic BPF: built as plain values (tested without a kernel), installed by prctl.

A refused call fails with EPERM, so that author code sees an ordinary exception with a name, not a dead process. clone3 answers
"not implemented", which makes the C library fall back to clone, whose flags a filter can read.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable, Sequence

from coordinator.environments.syscalls import REFUSED_VALUES, Machine

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]
Prctl = Callable[..., int]


def build(machine: Machine, *, pid: int) -> list[Instruction]:
    """The filter's instructions (code, jump if true, jump if false, operand) for the process `pid`."""
    refuse = _ERRNO | errno.EPERM
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, machine.audit_arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine.has_x32:
        program += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, refuse)]
    for number in machine.denied:
        program += _on(number, [(_RETURN, 0, 0, refuse)])
    special = machine.by_argument
    program += _on(special["clone3"], [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)])
    program += _on(special["clone"], [(_LOAD, 0, 0, _argument(0)), (_ANY_BIT, 1, 0, _CLONE_THREAD), *_verdicts(refuse)])
    for name in ("kill", "tgkill"):
        program += _on(special[name], [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 1, 0, pid), *_verdicts(refuse)])
    program += _on(special["prlimit64"], [(_LOAD, 0, 0, _argument(0)), (_EQUAL, 1, 0, 0), *_verdicts(refuse)])
    program += _on(special["sendto"], _null_pointer(4, refuse))
    for (name, argument), values in REFUSED_VALUES.items():
        program += _on(special[name], _none_of(argument, values, refuse))
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def install(program: list[Instruction], prctl: Prctl) -> None:
    """Put the filter on this thread and all it starts. Needs no_new_privs. Raises OSError where the kernel has no seccomp."""
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    code = ctypes.create_string_buffer(raw, len(raw))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    holder = Program(len(program), ctypes.addressof(code))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(holder))


def _on(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body` (which must return) when the loaded call number is `number`, else skip it."""
    return [(_EQUAL, 0, len(body), number), *body]


def _verdicts(refuse: int) -> list[Instruction]:
    """Falling in refuses; a jump over the first allows."""
    return [(_RETURN, 0, 0, refuse), (_RETURN, 0, 0, _ALLOW)]


def _null_pointer(argument: int, refuse: int) -> list[Instruction]:
    """Allow only a null pointer: both halves of the argument are zero."""
    return [
        (_LOAD, 0, 0, _argument(argument)),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _argument(argument) + 4),
        (_EQUAL, 1, 0, 0),
        *_verdicts(refuse),
    ]


def _none_of(argument: int, values: Sequence[int], refuse: int) -> list[Instruction]:
    """Refuse these values of an argument that the kernel reads as 32 bits."""
    body: list[Instruction] = [(_LOAD, 0, 0, _argument(argument))]
    for value in values:
        body += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, refuse)]
    return [*body, (_RETURN, 0, 0, _ALLOW)]


def _argument(place: int) -> int:
    """Offset of the low half of a call's argument (both machines are little-endian)."""
    return _ARGUMENTS_AT + 8 * place
