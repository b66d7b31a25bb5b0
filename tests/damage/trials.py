"""Runs many cases in a child, which a case may kill.

The parent sees the effect of a case on the process. If a signal ends the child, the parent knows
the case, and continues with the next one in a new child. A case that hangs is ended by SIGALRM.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

Case = TypeVar("Case")

#: Number of seconds after which a case counts as hanging.
WATCHDOG_S = 60
_SHOWN = 5


def failures(
    cases: Sequence[Case], trial: Callable[[Case], None], *, apart: bool = False
) -> list[str]:
    """Returns the failed cases with their exception or signal, or a note that they hang.

    Args:
        cases: the cases, in the order in which they are tried.
        trial: runs a case; raises an exception if it fails.
        apart: run each case in its own process, because it may leave a handle that cannot close.
    """
    found: list[str] = []
    at = 0
    with mmap.mmap(-1, mmap.PAGESIZE) as reached, tempfile.TemporaryFile() as report:
        while at < len(cases):
            stop = at + 1 if apart else len(cases)
            status = _run(cases[:stop], trial, at, reached, report.fileno())
            at = int.from_bytes(reached[:8], "little") + 1
            if status != 0:
                case = cases[at - 1]
                what = "it never ends" if status == -signal.SIGALRM else f"signal {-status}"
                found.append(f"{case}: {what if status < 0 else _text_of(report.fileno())}")
    return found


def require_all(
    cases: Sequence[Case], trial: Callable[[Case], None], repeat: str, *, apart: bool = False
) -> None:
    """Fails with the first cases that fail, and with the command that repeats them."""
    wrong = failures(cases, trial, apart=apart)
    shown = "\n\n".join(wrong[:_SHOWN])
    assert not wrong, f"{len(wrong)} of {len(cases)} cases failed; repeat: {repeat}\n{shown}"


def _run(
    cases: Sequence[Case], trial: Callable[[Case], None], first: int, reached: mmap.mmap, out: int
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for at in range(first, len(cases)):
            reached[:8] = at.to_bytes(8, "little")
            signal.alarm(WATCHDOG_S)
            trial(cases[at])
        status = 0
    except BaseException:
        os.ftruncate(out, 0)
        os.pwrite(out, traceback.format_exc().encode(errors="replace"), 0)
    finally:
        os._exit(status)


def _text_of(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode()
