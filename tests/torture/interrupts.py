"""Ctrl-C at any moment of a call, and what stays locked behind it.

SIGINT raises KeyboardInterrupt within `finishes` only: it must not reach the code that logs, stands
still or looks, which is not what is tried.
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
    """From now on SIGINT interrupts what `finishes` calls, and nothing else."""
    signal.signal(signal.SIGINT, _interrupt)
    gc.freeze()  # so that a collection, after each interrupt, is short
    sys.unraisablehook = _unraisable


def _interrupt(number: int, frame: object) -> None:
    global _open, _came
    if _open:
        _open, _came = False, True
        raise KeyboardInterrupt


def _unraisable(what: Any) -> None:
    """An interrupt in a finalizer is said to be ignored: that is no news."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


def finishes(work: Callable[[], None]) -> bool:
    """Whether the work came to its end, and not an interrupt before it."""
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
    except TypeError:  # numpy's fromfile takes an interrupt for "this is no path"
        if not _came:
            raise
        return False
    return True


def held_locks() -> list[str]:
    """The files that this process has locked with flock(2), in what it has open."""
    gc.collect()
    held = []
    for number in os.listdir("/proc/self/fdinfo"):
        with suppress(OSError), open(f"/proc/self/fdinfo/{number}") as info:
            if "FLOCK" in info.read():
                held.append(os.readlink(f"/proc/self/fd/{number}"))
    return held
