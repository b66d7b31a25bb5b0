"""A spawned process that runs a target.

parent:  pickle the target and its arguments ──▶ start
child:   unpickle ──▶ check in (memory/clients/roster.py) ──▶ call the target ──▶ record the end

The process is a ``spawn`` process of multiprocessing. It is not a daemon, so it keeps running if
the coordinator is killed. If the target is given by name, as ``"package.module:function"``, it is
pickled as `Named`, and the process imports only that module and not the parent's main module. The
process does not import torch before it calls the target.
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

_LONGEST_ERROR = 500  # maximum number of characters that are recorded of an exception
_LIGHT = (
    "collect with shmbuffer.numpy, which does not need torch, or import torch only where it is "
    "needed"
)


class Named:
    """A function that is given by name, and imported when it is called.

    Args:
        text: the name, ``"package.module:function"``.

    Raises:
        ValueError: the name is invalid.
    """

    def __init__(self, text: str) -> None:
        self.module, _, self.function = text.partition(":")
        parts = [*self.module.split("."), *self.function.split(".")]
        if not all(map(str.isidentifier, parts)):
            raise ValueError(
                f"the name of a target must be 'package.module:function', got {text!r}"
            )

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"

    def __call__(self, scratch_dir: Path, index: int, *args: Any) -> object:
        """Imports the module and calls the function."""
        had_torch = "torch" in sys.modules
        me: Any = process.current_process()
        me._inheriting = True  # multiprocessing's flag during imports: see `refuse_while_imported`
        try:
            function = self.find_function(importlib.import_module(self.module))
        finally:
            del me._inheriting
        if index == 0 and "torch" in sys.modules:
            what = "its arguments" if had_torch else f"the module {self.module}"
            log.warning(
                "%s: the target %s was given by name, but %s imported torch, which takes seconds "
                "and hundreds of MB in each process; %s",
                *(scratch_dir, self, what, _LIGHT),
            )
        return function(scratch_dir, index, *args)

    def find_function(self, module: object) -> Callable[..., object]:
        """Returns the function from the imported module.

        Raises:
            AttributeError: the module does not have the function.
            TypeError: the object with this name is not callable.
        """
        try:
            function = functools.reduce(getattr, self.function.split("."), module)
        except AttributeError:
            raise AttributeError(
                f"{self}: the module {self.module} has no {self.function}; check the name"
            ) from None
        if not callable(function):
            kind = type(function).__name__
            raise TypeError(
                f"{self} is of type {kind}, which is not callable; pass the name of a function"
            )
        return function


def names_of(target: Callable[..., object]) -> tuple[str, str]:
    """Returns the name of a target, and its qualified name with the module."""
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
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main_from")}


class WithoutMain(popen_spawn_posix.Popen):
    """Starts a spawned process that does not import the main module."""

    # multiprocessing has no option for this. Therefore this class runs the code of its `_launch`,
    # with `_without_main` in place of `get_preparation_data`.

    _launch = FunctionType(
        popen_spawn_posix.Popen._launch.__code__,  # type: ignore[attr-defined]
        vars(popen_spawn_posix)
        | {"spawn": SimpleNamespace(**vars(spawn) | {"get_preparation_data": _without_main})},
    )


class Process(SpawnProcess):
    """A process that runs a target, and exits without finalizing the interpreter."""

    # After the target, multiprocessing runs its finalizers and waits for non-daemon threads. Then
    # the ``atexit`` functions close an attached buffer. The process releases the target and its
    # arguments, which closes their files, and flushes the streams of Python and C. Finalizing an
    # interpreter with torch takes seconds, during which the process would not react to SIGTERM.

    def __init__(
        self,
        scratch_dir: Path,
        spawned: Spawned,
        label: str,  # name of the process in the roster
        target: Callable[..., object],
        args: tuple[Any, ...],  # arguments of the target after the directory and the index
    ) -> None:
        super().__init__(target=target, args=(scratch_dir, spawned.index, *args), name=spawned.name)
        self._scratch_dir = scratch_dir
        self._entry = (spawned.file, label, spawned.index, time.time())  # for the roster
        self._before, self._times = spawned.failed, spawned.times
        self._is_checked_in = False
        self._failed = self._error = ""

    def run(self) -> None:
        """Checks in and calls the target, in which SIGTERM and SIGINT raise SystemExit.

        If the process's file in the roster was removed, exits without calling the target.
        """
        from shmbuffer.memory import attaching

        attaching.role_of_this_process = "collector"
        for number in ENDING:
            signal.signal(number, _exit_on_signal)
        # The parent has blocked SIGINT; see `hold_ctrl_c_back`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._is_checked_in = roster.record_start(self._scratch_dir, *self._entry)
        if not self._is_checked_in:
            raise SystemExit(128 + signal.SIGTERM)
        try:
            super().run()
        except Exception as error:
            self._failed = _hash_location(error)
            what = " ".join("".join(traceback.format_exception_only(error)).split())
            self._error = f"{what:.{_LONGEST_ERROR}}"
            if self._failed != self._before:
                raise  # multiprocessing prints the traceback
            again = f"the same error, {self._times + 1} times in a row"
            print(f"Process {self.name}: {again}: {what}", file=sys.stderr)
            raise SystemExit(1) from None

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        start: Any = WithoutMain if isinstance(process_obj._target, Named) else SpawnProcess._Popen
        return start(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> NoReturn:
        """Runs the process, records its end in the roster, and exits."""
        try:
            code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        except SystemExit as asked:  # a signal arrived while this process waited for its threads
            code = asked.code if isinstance(asked.code, int) else 1
        _ignore_signals()
        atexit._run_exitfuncs()
        self._target = self._args = self._kwargs = None
        for stream in (sys.stdout, sys.stderr):
            # The stream may be None, closed, or a broken pipe.
            with suppress(AttributeError, ValueError, OSError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        try:
            if self._is_checked_in:
                words = roster.ExitRecord(code, self._failed, self._error)
                roster.record_exit(self._scratch_dir, self._entry[0], words)
        except (OSError, ShmBufferError) as error:
            log.error("the end of process %s could not be recorded: %s", self.name, str(error))
        finally:
            os._exit(code)


ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that raise SystemExit in a target."""


def _hash_location(error: BaseException) -> str:
    """Returns a hash of an exception's type and the lines in its traceback, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [type(error).__qualname__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)]
    return hashlib.sha256("\n".join(place).encode()).hexdigest()[:16]


def hold_ctrl_c_back() -> None:
    """Blocks SIGINT in this thread, and in its child processes until they call `Process.run`."""
    # Otherwise Ctrl-C during the imports of a child would print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Handles a signal by raising SystemExit. Further signals are ignored."""
    _ignore_signals()
    raise SystemExit(128 + number)


def _ignore_signals() -> None:
    """Ignores SIGTERM and SIGINT from now on, so that they do not interrupt the cleanup."""
    # Programs that this process starts would inherit SIG_IGN, and Python reports a pending signal
    # if it finds SIG_IGN.
    for number in ENDING:
        signal.signal(number, lambda *_: None)
