"""A spawned process: its target, its start and its end.

parent:  target, arguments ──▶ pickled ──▶ start; a target by its name is pickled as `Named`
child:   unpickle ──▶ check in (memory/clients/roster.py) ──▶ the target ──▶ record the end

It is a ``spawn`` process of multiprocessing, but not a daemon: it survives a killed coordinator. If
the target is given by its name, ``"package.module:function"``, the process imports only that
module, not the parent's main module, and needs no torch before the function runs.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import popen_spawn_posix, process, spawn
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from shmbuffer.errors import ShmBufferError
from shmbuffer.memory.clients import roster

if TYPE_CHECKING:
    from shmbuffer.service.children import Spawned

log = logging.getLogger("shmbuffer.service")

_LONGEST_ERROR = 500  # characters of an exception's message that others are told
_LIGHT = (
    "collect with shmbuffer.numpy, which does not need torch, or import torch only where it is "
    "needed"
)


class Named:
    """A function given as ``"package.module:function"``, which is imported when it is called."""

    def __init__(self, text: str) -> None:
        self.module, _, self.function = text.partition(":")
        parts = [*self.module.split("."), *self.function.split(".")]
        if not all(map(str.isidentifier, parts)):
            raise ValueError(
                f"{text!r} is not the name of a function; pass it as 'package.module:function'"
            )

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"

    def __call__(self, scratch_dir: Path, index: int, *args: Any) -> object:
        """Imports the module, and runs the function."""
        given = "torch" in sys.modules
        me: Any = process.current_process()
        me._inheriting = True  # as while a main module is imported: see `refuse_while_imported`
        try:
            function = self.find_function(importlib.import_module(self.module))
        finally:
            del me._inheriting
        if index == 0 and "torch" in sys.modules:
            what = "its arguments" if given else f"the module {self.module}"
            log.warning(
                "%s: %s is spawned by name, but %s imported torch, which takes seconds and "
                "hundreds of MB in each process; %s",
                *(scratch_dir, self, what, _LIGHT),
            )
        return function(scratch_dir, index, *args)

    def find_function(self, module: object) -> Callable[..., object]:
        """Returns the function; AttributeError or TypeError if the module has none of this name."""
        try:
            function = functools.reduce(getattr, self.function.split("."), module)
        except AttributeError:
            raise AttributeError(
                f"{self}: the module {self.module} has no {self.function}; check the name"
            ) from None
        if not callable(function):
            kind = type(function).__name__
            raise TypeError(
                f"{self}: is of type {kind}, which is not callable; pass the name of a function"
            )
        return function


def names_of(target: Callable[..., object]) -> tuple[str, str]:
    """Returns a short name for display, and the full one."""
    if isinstance(target, Named):
        return target.function.rpartition(".")[2], f"{target.module}.{target.function}"
    while isinstance(target, functools.partial):
        target = target.func
    kind = type(target)
    short = getattr(target, "__name__", kind.__name__)
    full = getattr(target, "__qualname__", kind.__qualname__)
    return short, f"{getattr(target, '__module__', kind.__module__)}.{full}"


def _without_main(name: str) -> dict[str, Any]:
    """Returns the data that multiprocessing sends to a child, without the main module."""
    told = spawn.get_preparation_data(name)
    return {key: value for key, value in told.items() if not key.startswith("init_main_from")}


class WithoutMain(popen_spawn_posix.Popen):
    """Starts a spawned process that does not import the main module."""

    # multiprocessing has no option for that: this is its own function, with `_without_main` instead
    # of the function that prepares the data for the child.

    _launch = FunctionType(
        popen_spawn_posix.Popen._launch.__code__,  # type: ignore[attr-defined]
        vars(popen_spawn_posix)
        | {"spawn": SimpleNamespace(**vars(spawn) | {"get_preparation_data": _without_main})},
    )


class Process(SpawnProcess):
    """A spawned process: it runs the target, and exits without the teardown of Python."""

    # After the target come multiprocessing's own duties, the wait for non-daemon threads, and the
    # ``atexit`` functions, which close an attached buffer. Target and arguments are dropped with
    # the files that they hold open, and the streams of Python and C are flushed. The teardown of
    # Python with torch would take seconds, in which the process seems to ignore the signal.

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
        """Runs the target, unless its roster entry is gone; SIGTERM and Ctrl-C raise SystemExit."""
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
            again = f"the same error, {self._times + 1} times in a row"
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
            log.error("%s: the cause of its death could not be recorded: %s", self.name, str(error))
        finally:
            os._exit(code)


ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that raise SystemExit in a target."""


def _place_of(error: BaseException) -> str:
    """Returns a hash of the exception's type and where it was raised, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [type(error).__qualname__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)]
    return hashlib.sha256("\n".join(place).encode()).hexdigest()[:16]


def hold_ctrl_c_back() -> None:
    """Blocks SIGINT in this thread, and in processes that it starts until `Process.run`."""
    # Otherwise Ctrl-C during their imports would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    _obey_no_more()
    raise SystemExit(128 + number)


def _obey_no_more() -> None:
    """Ignores further signals, which would interrupt the unwinding."""
    # Not by SIG_IGN: child programs inherit it, and Python complains if a signal is pending.
    for number in ENDING:
        signal.signal(number, lambda *_: None)
