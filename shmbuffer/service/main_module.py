"""Checks that spawned processes can import the main module of the program and find their target.

    parent:  spawn ──▶ require_importable ──▶ pickle the target and its arguments ──▶ start
    child:   import the main module, as __mp_main__ ──▶ unpickle ──▶ call the target
                └── a coordinator that is created by the import: `refuse_while_imported`
    by name: require_named; the child imports only the target's module (process.py)

Without these checks, multiprocessing would report most of these errors only in the child.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import pickle
import re
import sys
from collections.abc import Sequence
from multiprocessing import process, spawn
from pathlib import Path
from types import FrameType

from shmbuffer.service.process import Named

UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""Exceptions that a pickler raises for an object that cannot be pickled."""

GUARD = 'if __name__ == "__main__":'
# A script may check current_process().name instead. During the import, multiprocessing has not set
# parent_process() yet.
_OTHER_GUARD = "current_process"


def refuse_while_imported(scratch_dir: object) -> None:
    """Raises RuntimeError if this is a spawned process that is importing its main module."""
    if getattr(process.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"{scratch_dir}: the spawned process {process.current_process().name} imports the main "
            "module of the program and the module of its target, and one of them creates a "
            "Coordinator when it is imported. Put the code that runs the program, including the "
            f"Coordinator and spawn, under `{GUARD}`"
        )


def require_importable(scratch_dir: object, target: object, args: Sequence[object]) -> None:
    """Raises RuntimeError if a spawned process could not import the main module of the program.

    Args:
        scratch_dir: directory of the buffer, for messages.
        target: the target, which the spawned process unpickles.
        args: arguments of the target.
    """
    refuse_while_imported(scratch_dir)
    imported = spawn.get_preparation_data("")
    name, path = imported.get("init_main_from_name"), imported.get("init_main_from_path")
    if path is not None and not os.path.isfile(path):
        raise RuntimeError(
            f"{scratch_dir}: the program was read from {os.path.basename(path)}, but this file "
            "does not exist, so a spawned process cannot import it. Nothing was started. Write the "
            "program to a file, and run that file"
        )
    if path is None and (name is None or name.split(".")[-1] == "__main__"):
        for found in filter(None, map(_defined_in_main, (target, *args))):
            raise RuntimeError(
                f"{scratch_dir}: {found} is defined in __main__, which a spawned process cannot "
                "import, because __main__ is a notebook, a prompt, a -c option, or the __main__ of "
                f"a package. Nothing was started. Write {found} to a module (in a notebook: "
                "%%writefile collect.py), and import it from there"
            )
    else:
        _require_guard(scratch_dir)


def _require_guard(scratch_dir: object) -> None:
    """Raises RuntimeError if an import of the main module would spawn processes."""
    if (line := _line_without_guard()) is not None:
        file = sys.modules["__main__"].__file__
        raise RuntimeError(
            f"{scratch_dir}: {file}, line {line}, spawns processes without checking __name__, so "
            "each spawned process would import that file and spawn processes, too. Nothing was "
            "started. Put the code that runs the program, including the Coordinator and spawn, "
            f"under `{GUARD}`"
        )


def require_named(scratch_dir: object, text: str, args: Sequence[object]) -> Named:
    """Checks a target that was given by name, without importing its module.

    Packages that contain the module are imported.

    Args:
        scratch_dir: directory of the buffer, for messages.
        text: name of the target, ``"package.module:function"``.
        args: arguments of the target.

    Returns:
        The target.

    Raises:
        ValueError: the name is invalid, or names a function in ``__main__``.
        ModuleNotFoundError, AttributeError, TypeError: the module or the function does not exist,
            or is not callable.
        RuntimeError: an argument is defined in ``__main__``, or an import of the main module would
            spawn processes.
    """
    refuse_while_imported(scratch_dir)
    target = Named(text)
    if target.module.split(".")[-1] == "__main__":
        raise ValueError(
            f"{scratch_dir}: a process whose target is given by name does not import __main__. "
            f"Nothing was started. Move {target.function} to a module"
        )
    for found in filter(None, map(_defined_in_main, args)):
        raise RuntimeError(
            f"{scratch_dir}: {found} is defined in __main__, which a process whose target is given "
            f"by name does not import. Nothing was started. Move {found} to a module, and import "
            "it from there"
        )
    module = sys.modules.get(target.module)
    if module is not None:
        target.find_function(module)
        return target
    try:
        spec = importlib.util.find_spec(target.module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_no_module(scratch_dir, target, str(error))) from None
    if spec is None:
        why = f"there is no {target.module} on sys.path"
        raise ModuleNotFoundError(_no_module(scratch_dir, target, why), name=target.module)
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is not None and spec.origin == os.path.abspath(main):
        _require_guard(scratch_dir)
    source = getattr(spec.loader, "get_source", lambda _: None)(target.module)
    first = target.function.split(".")[0]
    if source is not None and not re.search(rf"\b{first}\b|import \*|__getattr__", source):
        raise AttributeError(
            f"{scratch_dir}: {spec.origin} has no {first}. Nothing was started. Check the name "
            f"{target}"
        )
    return target


def _no_module(scratch_dir: object, target: Named, why: str) -> str:
    """Returns the message for a target whose module was not found."""
    return f"{scratch_dir}: the module of {target} was not found: {why}. Nothing was started"


def cannot_be_pickled(scratch_dir: object, target: object, error: Exception) -> TypeError:
    """Returns the TypeError for a target or arguments that cannot be pickled.

    Args:
        scratch_dir: directory of the buffer, for the message.
        target: the target.
        error: exception that the pickler raised.
    """
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    name = str(target) if isinstance(target, Named) else name
    return TypeError(
        f"{scratch_dir}: the target {name} and its arguments cannot be pickled for a spawned "
        f"process: {error}. Nothing was started. Pass a function that is defined at the top level "
        "of a module (no lambda or nested function), and arguments that can be pickled"
    )


def _defined_in_main(thing: object) -> str | None:
    """Returns the name of a function or class in the main module that unpickling must import.

    Returns None if the object can be unpickled without the main module.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = getattr(thing, "__self__", thing)  # the object of a bound method
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return named.__qualname__ if named.__module__ == "__main__" else None


def _line_without_guard() -> int | None:
    """Returns the line number in the main module that is running, if an import would run it, too.

    Returns None if the main module is not running at module level, or if it has a guard.
    """
    # A program that uses __name__ or current_process() anywhere is assumed to have a guard.
    main = sys.modules["__main__"]
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not main.__dict__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    file = getattr(main, "__file__", None)
    if frame is None or file is None or frame.f_code.co_filename != file:
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError):
        return None  # the file is not the source of the program
    return None if any(map(_is_guard, ast.walk(tree))) else frame.f_lineno


def _is_guard(node: ast.AST) -> bool:
    """True if a syntax node compares ``__name__`` or uses ``current_process``."""
    if isinstance(node, ast.Compare):
        parts = (node.left, *node.comparators)
        return any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)
    named = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
    return named == _OTHER_GUARD
