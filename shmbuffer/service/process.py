"""The part of a spawned process that runs in that process: its first and last steps.

It is a ``spawn`` process of multiprocessing, but no daemon: it survives a killed coordinator. The
next coordinator finds it by its file (memory/directory/roster.py), and ends or adopts it.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from shmbuffer.errors import ShmBufferError
from shmbuffer.memory.directory import roster
from shmbuffer.service.target import Named, WithoutMain

if TYPE_CHECKING:
    from shmbuffer.service.children import Spawned

log = logging.getLogger("shmbuffer.service")

_LONGEST_ERROR = 500  # characters of an exception's message that others are told


class Process(SpawnProcess):
    """A spawned process: it runs the target, and exits without the teardown of Python."""

    # After the target: multiprocessing's own duties, the wait for threads that are no daemons, and
    # ``atexit`` functions, which close an attached buffer. Target and arguments are dropped, with
    # the files that they hold open; the streams of Python and C are flushed. The teardown of Python
    # would take seconds with torch, in which the process seems to ignore the signal.

    def __init__(
        self,
        scratch_dir: Path,
        spawned: Spawned,
        label: str,  # the name in the roster
        target: Callable[..., object],
        args: tuple[Any, ...],  # after the directory and the index
    ) -> None:
        super().__init__(target=target, args=(scratch_dir, spawned.index, *args), name=spawned.name)
        self._scratch_dir = scratch_dir
        self._entry = (spawned.file, label, spawned.index, time.time())  # in the roster
        self._before, self._times = spawned.failed, spawned.times
        self._is_checked_in = False
        self._failed = self._error = ""

    def run(self) -> None:
        """Run the target, unless its entry is gone; SIGTERM and Ctrl-C raise SystemExit in it."""
        from shmbuffer.memory import attaching

        attaching.role_of_this_process = "collector"
        for number in ENDING:
            signal.signal(number, _unwind)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `hold_ctrl_c_back`
        self._is_checked_in = roster.check_in(self._scratch_dir, *self._entry)
        if not self._is_checked_in:
            raise SystemExit(128 + signal.SIGTERM)
        try:
            super().run()
        except Exception as error:
            self._failed = _place_of(error)
            what = " ".join("".join(traceback.format_exception_only(error)).split())
            self._error = f"{what:.{_LONGEST_ERROR}}"
            if self._failed != self._before:
                raise  # multiprocessing prints it
            again = f"the same again, {self._times + 1} times in a row"
            print(f"Process {self.name}: {again}: {what}", file=sys.stderr)
            raise SystemExit(1) from None

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        start: Any = WithoutMain if isinstance(process_obj._target, Named) else SpawnProcess._Popen
        return start(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> NoReturn:
        try:
            code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        except SystemExit as asked:  # a signal came in the wait for threads
            code = asked.code if isinstance(asked.code, int) else 1
        _obey_no_more()
        atexit._run_exitfuncs()
        self._target = self._args = self._kwargs = None
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError, OSError):  # none, closed, or a broken pipe
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        try:
            if self._is_checked_in:
                words = roster.LastWords(code, self._failed, self._error)
                roster.check_out(self._scratch_dir, self._entry[0], words)
        except (OSError, ShmBufferError) as error:
            log.error("%s: how it ended could not be written down: %s", self.name, str(error))
        finally:
            os._exit(code)


ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that a target unwinds on."""


def _place_of(error: BaseException) -> str:
    """A hash of the exception's type and where it was raised, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [type(error).__qualname__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)]
    return hashlib.sha256("\n".join(place).encode()).hexdigest()[:16]


def hold_ctrl_c_back() -> None:
    """Block SIGINT in this thread, and in processes that it starts until `Process.run`."""
    # Otherwise Ctrl-C during their imports would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    _obey_no_more()
    raise SystemExit(128 + number)


def _obey_no_more() -> None:
    """Ignore further signals, which would interrupt the unwinding."""
    # Not by SIG_IGN: child programs inherit it, and Python complains if a signal is pending.
    for number in ENDING:
        signal.signal(number, lambda *_: None)
