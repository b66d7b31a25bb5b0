"""A target by its name: the child imports its module alone, never the parent's main module.

    parent:  "package.module:function" ──▶ Named ──▶ pickled with the arguments ──▶ start
    child:   unpickle ──▶ import the module ──▶ has that imported torch? ──▶ the function

The child needs no torch before the function runs, so that a collector may do without.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from multiprocessing import popen_spawn_posix, process, spawn
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

log = logging.getLogger("shmbuffer.service")

_LIGHT = "collect with shmbuffer.numpy, which needs no torch, or import it where it is needed"


class Named:
    """A function that is imported when it is called, ``"package.module:function"``."""

    def __init__(self, text: str) -> None:
        self.module, _, self.function = text.partition(":")
        parts = [*self.module.split("."), *self.function.split(".")]
        if not all(map(str.isidentifier, parts)):
            raise ValueError(
                f"{text!r} does not name a function; give it as 'package.module:function'"
            )

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"

    def __call__(self, scratch_dir: Path, index: int, *args: Any) -> object:
        """Import the module, and run the function."""
        given = "torch" in sys.modules
        me: Any = process.current_process()
        me._inheriting = True  # as while a main module is imported: see `refuse_while_imported`
        try:
            function = self.found(importlib.import_module(self.module))
        finally:
            del me._inheriting
        if index == 0 and "torch" in sys.modules:
            what = "its arguments have" if given else f"importing {self.module} has"
            log.warning(
                "%s: %s is spawned by name, and %s imported torch, for seconds and hundreds of MB "
                "in each process; %s",
                *(scratch_dir, self, what, _LIGHT),
            )
        return function(scratch_dir, index, *args)

    def found(self, module: object) -> Callable[..., object]:
        """The function in its module; AttributeError, TypeError: there is none."""
        try:
            function = functools.reduce(getattr, self.function.split("."), module)
        except AttributeError:
            raise AttributeError(
                f"{self}: the module {self.module} has no {self.function}; check the name"
            ) from None
        if not callable(function):
            kind = type(function).__name__
            raise TypeError(f"{self}: is of type {kind}, which cannot be called; name a function")
        return function


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


def _without_main(name: str) -> dict[str, Any]:
    """The data that multiprocessing sends to a child, without the main module."""
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
