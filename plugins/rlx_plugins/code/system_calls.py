"""The system calls that a sandbox refuses, as a filter of the kernel (seccomp).

Namespaces leave some doors open: sockets to the machine's host (vsock), the kernel's keys of the
user, memory that no limit of a process counts, and interfaces whose faults have let programs out.
"""

import errno
import os
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_REFUSED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
"""Numbers on x86_64 and aarch64."""
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_FAMILIES = (1, 2, 10)
"""Unix sockets, IPv4 and IPv6, which reach nothing outside of the network namespace."""
_NEW_NAMESPACE = 0x7E020000
"""Flags of `clone` that make namespaces."""
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; the low half of an argument comes first on both machines."""
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def build_filter() -> bytes:
    """Returns the filter for this machine, as `struct sock_filter` has its instructions."""
    machine = os.uname().machine
    if machine not in _COLUMN:
        raise OSError(errno.ENOSYS, f"no sandbox for the processor {machine}: x86_64, aarch64")
    column = _COLUMN[machine]
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _refuse(errno.EPERM),
    ]
    for numbers in _REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), _refuse(errno.EPERM)]
    # Its flags are in memory, where a filter cannot look: libraries then use `clone`.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), _refuse(errno.ENOSYS)]
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 2 + len(_FAMILIES), _SOCKET[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)),
        _refuse(errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _refuse(number: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, 0x00050000 | number)
