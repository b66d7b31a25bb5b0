"""Full-screen use of a terminal: reads single keys, and restores the settings at the end."""

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
    """Yields a file that becomes readable after a signal with a handler.

    Waiting for the file misses no signal. Otherwise a signal just before the wait would not
    interrupt it, and the error of its handler could get lost.
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
    """Yields a function that waits some seconds, and returns True early for q or a signal."""
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
                if not _is_ours(keyboard):  # in the background, keys are for the shell
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
                with suppress(termios.error):  # the terminal is gone
                    termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_ours(keyboard: int) -> bool:
    """True if this process may use a terminal; in the background it would be stopped."""
    try:
        return os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        return True  # not the controlling terminal of this session


class _Signalled(BaseException):
    """Raised by a signal; derives from BaseException, so that error handlers do not catch it."""


@contextmanager
def unwound_on(*numbers: int) -> Iterator[list[int]]:
    """Ends the block at the first signal, and continues after it; further signals are ignored.

    A second signal would interrupt the cleanup, which has deadlines of its own.
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
