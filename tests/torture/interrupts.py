"""Interrupts calls at any time with SIGINT and finds the locks that they leave behind.

SIGINT raises KeyboardInterrupt only within `finishes`. The code that logs, stands still or checks
is not under test and must not be interrupted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_open = _came = False


def expect() -> None:
    """Makes SIGINT interrupt only the functions that `finishes` calls."""
    signal.signal(signal.SIGINT, _interrupt)
    gc.freeze()  # so that the garbage collection after each interrupt is short
    sys.unraisablehook = _unraisable


def _interrupt(number: int, frame: object) -> None:
    global _open, _came
    if _open:
        _open, _came = False, True
        raise KeyboardInterrupt


def _unraisable(what: Any) -> None:
    """Drops the report that an interrupt in a finaliser was ignored."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def finishes(work: Callable[[], None]) -> bool:
    """Runs a function; returns False if an interrupt ended it early."""
    global _open, _came
    _came = False
    try:
        try:
            _open = True
            work()
        finally:
            _open = False
    except KeyboardInterrupt:
        return False
    except TypeError:  # numpy.fromfile reports an interrupt as a wrong type of path
        if not _came:
            raise
        return False
    return True


def held_locks() -> list[str]:
    """Returns the open files that this process has locked with flock(2)."""
    gc.collect()
    held = []
    for number in os.listdir("/proc/self/fdinfo"):
        with suppress(OSError), open(f"/proc/self/fdinfo/{number}") as info:
            if "FLOCK" in info.read():
                held.append(os.readlink(f"/proc/self/fd/{number}"))
    return held
