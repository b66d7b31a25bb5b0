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


@contextmanager
def woken() -> Iterator[int]:
    """A file that can be read once a signal with a handler came.

    A wait that reads it as well misses no signal: one that comes just before the wait interrupts
    nothing, and what its handler raises may be lost in a finalizer.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


@contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Waits some seconds, or until q is pressed or a signal came; says whether one of these was.

    What is typed is not shown. A standard input that is no terminal, or belongs to another program
    now, is left alone.
    """
    with woken() as signalled:
        if sys.stdin is None or not sys.stdin.isatty() or not _is_ours(sys.stdin.fileno()):
            yield lambda seconds: bool(select.select([signalled], [], [], seconds)[0])
            return
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)

        def pressed_q(seconds: float) -> bool:
            deadline_s = time.monotonic() + seconds
            heard = [signalled, keyboard]
            while (left_s := deadline_s - time.monotonic()) > 0:
                ready = select.select(heard, [], [], left_s)[0]
                if signalled in ready:
                    return True
                if not _is_ours(keyboard):  # it went to the background: this is for the shell
                    heard = [signalled]
                elif ready:
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
