"""A process that may not ask the system for files any more: seccomp(2), one way, for its life.

What is left: memory, clocks, futexes, its own end. Any other call ends it by SIGSYS, also one that
does not go through libc.
"""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_KILL_PROCESS, _ALLOW = 0x80000000, 0x7FFF0000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of classic BPF: ld word, jeq constant, ret constant
_NUMBER_AT, _MACHINE_AT, _FD_OF_MMAP_AT = 0, 4, 48  # in struct seccomp_data

#: AUDIT_ARCH of the machine; number of mmap; numbers of what is allowed, in the order below.
_MACHINES = {
    "x86_64": (0xC000003E, 9, (202, 12, 11, 28, 25, 10, 13, 14, 15, 228, 39, 186, 24, 60, 231)),
    "aarch64": (
        0xC00000B7,
        222,
        (98, 214, 215, 233, 216, 226, 134, 135, 139, 113, 172, 178, 124, 93, 94),
    ),
}
ALLOWED = (
    *("futex", "brk", "munmap", "madvise", "mremap", "mprotect"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn"),
    *("clock_gettime", "getpid", "gettid", "sched_yield", "exit", "exit_group"),
)


def machine_is_known() -> bool:
    return os.uname().machine in _MACHINES


def be_quiet() -> None:
    """From now on this process may call what is `ALLOWED`, and map memory that is no file."""
    audit, mmap, numbers = _MACHINES[os.uname().machine]
    assert len(numbers) == len(ALLOWED)
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for number in numbers:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    steps += [
        (_EQUAL, 1, 0, mmap),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _FD_OF_MMAP_AT),
        (_EQUAL, 0, 1, 0xFFFFFFFF),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, program)):
        if libc.prctl(option, *arguments, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
