"""One process that a coordinator has started: the handle on it, and its own first steps.

     running ──returns, or is stopped, or Ctrl-C──▶ ended
        └──any other end: a signal, an exception──▶ a death is noted ──restart──▶ running

It is a ``spawn`` process of multiprocessing, but no daemon: it survives a killed coordinator. The
next coordinator finds it by the roster (memory/directory/roster.py), and stops or adopts it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
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
from typing import Any, NoReturn

from shmbuffer.errors import ShmBufferError
from shmbuffer.memory.directory import roster
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.service.target import Named, WithoutMain

log = logging.getLogger("shmbuffer.service")

HASTY_S = 5.0
"""After two deaths in a row at a lower age, a process is restarted only after a pause."""

LONGEST_PAUSE_S = 30.0

_LONGEST_ERROR = 500  # characters of an exception's message that others are told

ASKED_TO_END = (0, -signal.SIGINT, 128 + signal.SIGINT)
"""Exit codes of a process that is not restarted: it returned, or got Ctrl-C."""

ON_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes after SIGTERM; during `shmbuffer stop` they are no death."""


class Spawned:
    """A running process and, after a restart, its successor with the same name and index."""

    _closing = ForkLock()  # a closed descriptor's number may be reused

    def __init__(
        self, start: Callable[[Spawned], SpawnProcess], *, name: str, index: int, restart: bool
    ) -> None:
        self._start = start
        self._process: SpawnProcess | None = None
        self._pidfd: int | None = None
        self._exitcode: int | None = None
        self._begun = False
        self._running = False
        self._young_deaths = 0
        self.file = ""  # in the roster
        self.failed = ""  # hash of the place of the last exception, for the next start
        self.times = 0  # how often in a row it has failed there
        self.name = name  # ``target-index``
        self.index = index
        self.pid = 0  # of the present process, or the last one
        self.restart = restart
        self.restarts = 0  # attempts included
        self.failure: Exception | None = None  # of the last start

    def begin(self) -> None:
        """Start the process, or its successor; sets ``failure``. For the supervisor."""
        self.restarts += self._begun
        self._begun = True
        try:
            self._process = self._start(self)
        except Exception as error:
            self.failure = error
            return
        self._started_s = time.monotonic()
        self._exitcode, self._running, self.failure = None, True, None
        self.pid = self._process.pid or 0
        # multiprocessing's sentinel is a pipe that grandchildren hold too; this is the process.
        with suppress(OSError):
            self._pidfd = os.pidfd_open(self.pid)

    def adopt(self, pid: int, pidfd: int, file: str) -> None:
        """Take over a running process, instead of `begin`. For the supervisor."""
        self.pid, self._pidfd, self.file = pid, pidfd, file
        self._started_s = time.monotonic()
        self._begun = self._running = True

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        if self._pidfd is not None:
            return self._pidfd
        assert self._process is not None
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs, or if it was adopted and then killed."""
        return self._exitcode

    def is_alive(self) -> bool:
        """True if it runs, as far as its supervisor has noticed."""
        return self._running

    def kill(self) -> None:
        """Send SIGKILL; with ``restart`` it is started again."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, which unwinds it; with ``restart`` it is started again."""
        self._send(signal.SIGTERM)

    def collect(self, words: roster.LastWords) -> int | None:
        """Take the exit code of a process that has ended, or None. For the supervisor."""
        code, failed = words.exitcode, words.failed
        if self._process is not None:
            self._process.join()
            while (code := self._process.exitcode) is None:
                time.sleep(0)  # another thread is reading the status for multiprocessing
            self._process = None
        self.times = self.times + 1 if failed and failed == self.failed else 1 if failed else 0
        self.failed = failed
        with self._closing:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        self._exitcode, self._running = code, False
        return code

    def _send(self, number: int) -> None:
        with self._closing:
            if self._pidfd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)
                return
        if self._process is not None:
            self._process.kill() if number == signal.SIGKILL else self._process.terminate()

    def pause_s(self) -> float:
        """Seconds before the next start: 0 unless it keeps dying young, or in the same place."""
        if time.monotonic() - self._started_s >= HASTY_S and self.times < 2:
            self._young_deaths = 0
            return 0.0
        self._young_deaths += 1
        if self._young_deaths == 1:
            return 0.0
        return min(0.25 * 2.0**self._young_deaths, LONGEST_PAUSE_S)

    def __repr__(self) -> str:
        state = "running" if self.is_alive() else f"exit code {self.exitcode}"
        return f"<Spawned {self.name} pid={self.pid} {state}>"


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


def names_of(target: Callable[..., object]) -> tuple[str, str]:
    """A short name for display, and the full one."""
    if isinstance(target, Named):
        return target.function.rpartition(".")[2], f"{target.module}.{target.function}"
    while isinstance(target, functools.partial):
        target = target.func
    kind = type(target)
    short = getattr(target, "__name__", kind.__name__)
    full = getattr(target, "__qualname__", kind.__qualname__)
    return short, f"{getattr(target, '__module__', kind.__module__)}.{full}"
