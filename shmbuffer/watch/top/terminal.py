"""Reads single keys from a terminal and restores its settings, and handles signals."""

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
def signal_fd() -> Iterator[int]:
    """Yields a file descriptor that becomes readable when a signal with a handler arrives.

    A caller that waits for this descriptor cannot miss a signal. Without it, a signal that arrives
    just before the wait would not interrupt the wait, and an exception raised by the handler could
    be lost.
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
    """Yields a function that waits for a number of seconds.

    The function returns True as soon as the user presses q or a signal arrives. Otherwise it
    returns False at the end of the wait.
    """
    with signal_fd() as signalled:
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
                if not _is_ours(keyboard):  # in the background, the keys belong to the shell
                    heard = [signalled]
                elif ready:
                    typed = os.read(keyboard, 1024)
                    if not typed or b"q" in typed:  # no bytes: the terminal was closed
                        return True
            return False

        try:
            tty.setcbreak(keyboard)
            yield pressed_q
        finally:
            if _is_ours(keyboard):
                with suppress(termios.error):  # the terminal was closed
                    termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_ours(keyboard: int) -> bool:
    """True if this process is in the foreground.

    The kernel would stop a background process that uses the terminal.
    """
    try:
        return os.tcgetpgrp(keyboard) == os.getpgrp()
    except OSError:
        return True  # it is not the controlling terminal


class _Signalled(BaseException):
    """Raised by a signal handler. ``except Exception`` does not catch it."""


@contextmanager
def leave_on(*numbers: int) -> Iterator[list[int]]:
    """Leaves the ``with`` block at the first of these signals, and continues after the block.

    Yields a list to which the number of the signal is added. Further signals are ignored, because
    they would interrupt the cleanup, which has its own deadlines.
    """
    received: list[int] = []

    def unwind(number: int, _frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            raise _Signalled

    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield received
    except _Signalled:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
