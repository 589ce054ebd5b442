"""The seccomp filter of a sandbox: system calls that a program which computes has no use for, as BPF."""

import errno
import platform
import struct
from collections.abc import Mapping

DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # no further process, and no other program
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    # no look into other processes, and no signal to them
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    # no network; io_uring would make the calls that are denied here
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # no other view of the files
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # no memory that the limit of the address space does not count
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # parts of the kernel that have let programs out before
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
}  # fmt: skip
"""Names of system calls, with their numbers on x86-64 and ARM64; None: there is no such call."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Each machine's column in :data:`DENIED`, its name in the kernel, and the number of its ``clone``."""
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_KILL, _FAIL, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def filter_of(machine: str | None = None) -> bytes:
    """The filter of a ``platform.machine``, this one by default, as an array of ``sock_filter``.

    A denied call fails with EPERM. Threads may be started. Other machines than x86-64 and ARM64 are a ValueError.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"there is no seccomp filter for {machine}, only for {' and '.join(_ARCHITECTURES)}")
    column, architecture, clone = _ARCHITECTURES[machine]
    steps = [
        _step(_LOAD, _ARCHITECTURE), _step(_IF_EQUAL, architecture, 1, 0), _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER), _step(_IF_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL),
        # glibc asks for `clone` where there is no `clone3`, whose flags a filter can't see.
        _step(_IF_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS),
    ]  # fmt: skip
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            steps += [_step(_IF_EQUAL, number, 0, 1), _step(_RETURN, _FAIL | errno.EPERM)]
    steps += [
        _step(_IF_EQUAL, clone, 0, 3), _step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, _CLONE_THREAD, 1, 0),
        _step(_RETURN, _FAIL | errno.EPERM), _step(_RETURN, _ALLOW),
    ]  # fmt: skip
    return b"".join(steps)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
