"""Numbers of the system calls that the jail's filter refuses, for the two machines it knows. A fixed kernel interface."""

from __future__ import annotations

from dataclasses import dataclass

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); None where the machine has no such call.
# Sockets of every family, and the ways to use a ready-made one (a datagram pair) to reach another; io_uring does the same unseen.
SOCKETS = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
# New programs, and reaching into or signalling other processes.
PROCESSES = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
}
# The machine: mounts, namespaces, modules, clocks, other kernels.
MACHINE = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "personality": (135, 92),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "vhangup": (153, 58),
    "sync": (162, 81),  # writes back all that the host has open
    "syncfs": (306, 267),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
}
# Memory that the address-space limit does not count.
UNCOUNTED_MEMORY = {
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
# Refused by argument: signals and limits of others, messages with an address, clones that are not threads, and `REFUSED_VALUES`.
BY_ARGUMENT = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sendto": (44, 206),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
}
# Values of one argument that are refused: (call, argument) -> values.
REFUSED_VALUES = {
    ("fcntl", 1): (8, 10, 15),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a file that is ready would signal another process
    ("ioctl", 1): (0x8901, 0x8902),  # FIOSETOWN, SIOCSPGRP: the same for sockets
    ("prctl", 0): (1,),  # PR_SET_PDEATHSIG: the process would outlive its parent
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the filter needs to know of a processor architecture."""

    audit_arch: int
    denied: tuple[int, ...]
    by_argument: dict[str, int]
    has_x32: bool


def machine(name: str) -> Machine | None:
    """The table of `platform.machine()`'s name, or None when the jail does not know that machine."""
    if name not in AUDIT_ARCH:
        return None
    place = 0 if name == "x86_64" else 1
    tables = (SOCKETS, PROCESSES, MACHINE, UNCOUNTED_MEMORY)
    denied = tuple(number for table in tables for pair in table.values() if (number := pair[place]) is not None)
    return Machine(AUDIT_ARCH[name], denied, {call: pair[place] for call, pair in BY_ARGUMENT.items()}, name == "x86_64")
