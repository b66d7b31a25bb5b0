"""The terminal of a program that fills it: keys are read as they come, and all is put back."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


def sleep(seconds: float) -> bool:
    """Waits; False, because nobody can press q."""
    time.sleep(seconds)
    return False


@contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Waits some seconds, or until q is pressed; says whether it was. What is typed is not shown.

    A standard input that is no terminal, or belongs to another program now, is left alone.
    """
    if sys.stdin is None or not sys.stdin.isatty() or not _is_ours(sys.stdin.fileno()):
        yield sleep
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed_q(seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            typed_something = select.select([keyboard], [], [], left_s)[0]
            if not _is_ours(keyboard):  # it went to the background: this is for the shell
                return sleep(max(0.0, deadline_s - time.monotonic()))
            if typed_something:
                typed = os.read(keyboard, 1024)
                if not typed or b"q" in typed:  # nothing: the terminal is gone
                    return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield pressed_q
    finally:
        if _is_ours(keyboard):
            with suppress(termios.error):  # it is gone
                termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_ours(keyboard: int) -> bool:
    """Whether this process may use a terminal: in the background it would be stopped for that."""
    try:
        return os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        return True  # it is not the one that this session is controlled by


class _Signalled(BaseException):
    """A signal came. Nothing on the way may take it for a failure."""


@contextmanager
def unwound_on(*numbers: int) -> Iterator[list[int]]:
    """Lets signals unwind a block, in place of what they do else; the rest of the program goes on.

    Only the first unwinds: the way out has deadlines of its own, which a second would cut short.
    """
    came: list[int] = []

    def unwind(number: int, _frame: FrameType | None) -> None:
        if not came:
            came.append(number)
            raise _Signalled

    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield came
    except _Signalled:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
