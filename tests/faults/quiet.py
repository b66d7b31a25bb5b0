"""Forbids a process all system calls on files for the rest of its life, with seccomp(2).

The process may still use memory, clocks and futexes, exit, and check a name in one open directory.
Any other call ends it by SIGSYS, even if the call does not go through libc.
"""

from __future__ import annotations

import ctypes
import os
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_KILL_PROCESS, _ALLOW = 0x80000000, 0x7FFF0000
# opcodes of classic BPF: ld word, jeq constant, ret constant
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
# offsets in struct seccomp_data
_NUMBER_AT, _MACHINE_AT, _FOLDER_AT, _FD_OF_MMAP_AT = 0, 4, 16, 48

#: For each machine: its AUDIT_ARCH, the numbers of mmap and newfstatat, and those of `ALLOWED`.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        (9, 262),
        (202, 12, 11, 28, 25, 10, 13, 14, 15, 228, 39, 186, 24, 60, 231),
    ),
    "aarch64": (
        0xC00000B7,
        (222, 79),
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


def be_quiet(folder: int) -> None:
    """Allows this process only the calls in `ALLOWED`, and maps of memory without a file.

    Args:
        folder: descriptor of a directory in which names may be checked (fstatat), but not opened.
    """
    audit, (mmap, look), numbers = _MACHINES[os.uname().machine]
    assert len(numbers) == len(ALLOWED)
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for number in numbers:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, at, allowed in ((look, _FOLDER_AT, folder), (mmap, _FD_OF_MMAP_AT, 0xFFFFFFFF)):
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, at),
            (_EQUAL, 0, 1, allowed),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _KILL_PROCESS),
        ]
    steps += [(_RETURN, 0, 0, _KILL_PROCESS)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, *arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, program)):
        if libc.prctl(option, *arguments, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
