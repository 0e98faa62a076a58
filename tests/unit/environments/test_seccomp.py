"""The system call filter, run by a small interpreter of classic BPF."""

from __future__ import annotations

import errno

import pytest

from coordinator.environments import syscalls
from coordinator.environments.seccomp import Instruction, build
from coordinator.environments.syscalls import machine

ALLOW, KILL, REFUSE, ABSENT = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PID = 4321
NAMES = ["x86_64", "aarch64"]


def run(program: list[Instruction], number: int, arguments: tuple[int, ...] = (), *, arch: int) -> int:
    """What the kernel would answer to a call."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    words = (
        {0: number, 4: arch}
        | {16 + 8 * i: a & 0xFFFFFFFF for i, a in enumerate(padded)}
        | {20 + 8 * i: a >> 32 for i, a in enumerate(padded)}
    )
    loaded, at = 0, 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        match code:
            case 0x20:
                loaded = words[operand]
            case 0x06:
                return operand
            case 0x15:
                at += yes if loaded == operand else no
            case 0x35:
                at += yes if loaded >= operand else no
            case 0x45:
                at += yes if loaded & operand else no
            case _:
                raise AssertionError(code)


def answer(name: str, call: str, *arguments: int) -> int:
    known = machine(name)
    assert known is not None
    place = NAMES.index(name)
    tables = (syscalls.SOCKETS, syscalls.PROCESSES, syscalls.MACHINE, syscalls.UNCOUNTED_MEMORY, syscalls.BY_ARGUMENT)
    number = next(table[call][place] for table in tables if call in table)
    assert number is not None
    return run(build(known, pid=PID), number, arguments, arch=known.audit_arch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "call", ["socket", "connect", "sendmsg", "io_uring_setup", "ptrace", "mount", "kexec_load", "execve", "bpf", "unshare"]
)
def test_doors_out_of_the_jail_are_shut(name: str, call: str) -> None:
    """Refused whatever their arguments."""
    assert answer(name, call, 2, 1, 0) == REFUSE


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_call_is_refused_and_no_number_is_listed_twice(name: str) -> None:
    """The tables hold what they say."""
    known = machine(name)
    assert known is not None
    program = build(known, pid=PID)
    assert len(set(known.denied) | set(known.by_argument.values())) == len(known.denied) + len(known.by_argument)
    assert {run(program, number, arch=known.audit_arch) for number in known.denied} == {REFUSE}
    assert len(program) < 4096
    assert all(yes < 256 and no < 256 for _, yes, no, _ in program)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_decide_where_a_call_is_needed(name: str) -> None:
    """Threads, own signals, own limits and connected sends are allowed; their dangerous twins are not."""
    assert answer(name, "clone", 0x00010000 | 0x100) == ALLOW
    assert answer(name, "clone", 17) == REFUSE
    assert answer(name, "clone3") == ABSENT
    for call in ("kill", "tgkill"):
        assert answer(name, call, PID, 9) == ALLOW
        assert answer(name, call, 1, 9) == REFUSE
        assert answer(name, call, 2**64 - 1, 9) == REFUSE
    assert answer(name, "prlimit64", 0) == ALLOW
    assert answer(name, "prlimit64", 77) == REFUSE
    assert answer(name, "sendto", 3, 1, 1, 0, 0) == ALLOW
    assert answer(name, "sendto", 3, 1, 1, 0, 0xDEAD) == REFUSE
    assert answer(name, "sendto", 3, 1, 1, 0, 1 << 32) == REFUSE
    for call, argument, refused, allowed in (
        ("fcntl", 1, (8, 10, 15), (1, 2, 3, 4, 9, 1030)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX; F_GETFD to F_DUPFD_CLOEXEC
        ("ioctl", 1, (0x8901, 0x8902), (0x5401, 0x541B, 0x8903)),  # FIOSETOWN, SIOCSPGRP; TCGETS, FIONREAD, FIOGETOWN
        ("prctl", 0, (1,), (2, 15, 38)),  # PR_SET_PDEATHSIG; its reading, names, no_new_privs
    ):
        before = (0,) * argument
        assert {answer(name, call, *before, value) for value in refused} == {REFUSE}
        assert {answer(name, call, *before, value | 1 << 32) for value in refused} == {REFUSE}, "the kernel reads 32 bits"
        assert {answer(name, call, *before, value) for value in allowed} == {ALLOW}


@pytest.mark.parametrize("name", NAMES)
def test_ordinary_calls_pass_and_another_architecture_is_killed(name: str) -> None:
    """read/close pass; a call made with the other machine's table ends the process."""
    known = machine(name)
    assert known is not None
    program = build(known, pid=PID)
    assert run(program, 3 if name == "x86_64" else 63, arch=known.audit_arch) == ALLOW
    assert run(program, 3, arch=0x40000003) == KILL


def test_the_x32_numbers_are_refused() -> None:
    """They would reach the same calls by other numbers."""
    known = machine("x86_64")
    assert known is not None
    assert run(build(known, pid=PID), 0x40000000 | 41, arch=known.audit_arch) == REFUSE


def test_an_unknown_machine_has_no_filter() -> None:
    """The jail then reports what is missing."""
    assert machine("riscv64") is None
