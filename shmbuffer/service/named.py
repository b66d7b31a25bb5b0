"""A target by its name: the child imports its module alone, never the parent's main module.

    parent:  "package.module:function" ──▶ Named ──▶ pickled with the arguments ──▶ start
    child:   unpickle ──▶ import the module ──▶ has that imported torch? ──▶ the function

What the child runs before the function needs no torch, so that a collector needs none either.
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
    """A function that is imported where it is called.

    Args:
        text: ``"package.module:function"``.

    Raises:
        ValueError: it is no such name.
    """

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
        """Imports the module, and runs the function."""
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
        """The function, in its module.

        Raises:
            AttributeError: it is not there.
            TypeError: it cannot be called.
        """
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


def _without_main(name: str) -> dict[str, Any]:
    """What multiprocessing tells a child of its parent, but for the main module."""
    told = spawn.get_preparation_data(name)
    return {key: value for key, value in told.items() if not key.startswith("init_main_from")}


class Alone(popen_spawn_posix.Popen):
    """Starts a spawned process that does not import the main module.

    multiprocessing has no argument for that. So its own function is called, with another one in
    place of the one that it asks for what the child is told.
    """

    _launch = FunctionType(
        popen_spawn_posix.Popen._launch.__code__,  # type: ignore[attr-defined]
        vars(popen_spawn_posix)
        | {"spawn": SimpleNamespace(**vars(spawn) | {"get_preparation_data": _without_main})},
    )
