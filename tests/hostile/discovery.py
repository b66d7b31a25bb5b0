"""Finds every public parameter that is a path: of functions, methods, constructors and commands.

A parameter is a path if its annotation says so. If a parameter has the name of a path and the
annotation `Any`, or none, `unannotated` reports it, because no search could find it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import shmbuffer.torchrl
from shmbuffer.cli import VERBS

MODULES = ("shmbuffer", "shmbuffer.numpy", "shmbuffer.sb3")
#: Names of parameters that contain paths.
_NAMES = frozenset(
    (
        *("base", "dataset", "dir", "directory", "file", "filename", "folder", "offline_dataset"),
        *("path", "root", "run_dir", "scratch_dir"),
    )
)
_SPECIAL = ("__init__", "__call__")


@dataclass(frozen=True)
class PathParameter:
    """A parameter with its name: ``RandomSampler.dumps(path)`` or ``shmbuffer top(dir)``."""

    owner: str
    function: str
    parameter: str

    def __str__(self) -> str:
        return f"{self.owner}{self.function}({self.parameter})"


def path_parameters() -> list[PathParameter]:
    """Returns every parameter whose annotation is a path, and those of the command line."""
    found = [one for one, annotation, scope in _parameters() if _is_path(annotation, scope)]
    return [*found, *_of_verbs()]


def unannotated() -> list[PathParameter]:
    """Returns parameters with the name of a path and an annotation that does not say so."""
    return [
        one
        for one, annotation, scope in _parameters()
        if one.parameter in _NAMES
        and annotation in ("", "Any", "object", "str")
        and not _is_path(annotation, scope)
    ]


def _parameters() -> Iterator[tuple[PathParameter, str, dict[str, Any]]]:
    """Yields each parameter with its annotation and the names that the annotation may use."""
    seen = set()
    for owner, function, call in _functions():
        scope = getattr(inspect.unwrap(call), "__globals__", {})
        for parameter in inspect.signature(call).parameters.values():
            for name, annotation in _spread(parameter, scope):
                one = PathParameter(owner, function, name)
                if one not in seen:
                    seen.add(one)
                    yield one, annotation, scope


def _functions() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yields public functions and methods: the prefix of the name, the name, the function."""
    seen: list[object] = []
    for module in MODULES:
        try:
            home = importlib.import_module(module)
        except ModuleNotFoundError:  # the module needs an extra
            continue
        prefix = module.removeprefix("shmbuffer").removeprefix(".")
        before = f"{prefix}." if prefix else ""
        for name in shmbuffer.torchrl.__all__ if home is shmbuffer else home.__all__:
            found = getattr(home, name)
            if any(found is one for one in seen):
                continue
            seen.append(found)
            if inspect.isfunction(found):
                yield before, name, found
            elif inspect.isclass(found):
                yield from ((f"{before}{name}.", *method) for method in _methods(found))


def _methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the methods that users call. Constructors of results are left out."""
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        found = getattr(found, "__func__", found)
        # A descriptor of this package stands for a method that is defined elsewhere.
        if type(found).__module__.startswith("shmbuffer"):
            found = getattr(cls, name, None)
        is_public = not name.startswith("_") or name in _SPECIAL
        is_result = name == "__init__" and dataclasses.is_dataclass(cls)
        is_function = inspect.isfunction(found) and found.__module__.startswith("shmbuffer")
        if is_public and is_function and not is_result:
            yield name, found


def _spread(parameter: inspect.Parameter, scope: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and annotations; ``**options: Unpack[Options]`` is replaced by its fields."""
    annotation = parameter.annotation
    text = "" if annotation is inspect.Parameter.empty else _text(annotation)
    if parameter.kind is inspect.Parameter.VAR_KEYWORD and text.startswith("Unpack["):
        of = scope[text.removeprefix("Unpack[").removesuffix("]")]
        yield from ((name, _text(one)) for name, one in of.__annotations__.items())
    else:
        yield parameter.name, text


def _text(annotation: Any) -> str:
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _is_path(annotation: str, scope: dict[str, Any]) -> bool:
    """True if a value of this type may be a path, also as part of a union or by an alias."""
    # "*Types" is no expression by itself
    expression = ast.parse(f"_({annotation})", mode="eval").body
    assert isinstance(expression, ast.Call)
    return any(_holds_path(part, scope) for part in expression.args)


def _holds_path(node: ast.expr, scope: dict[str, Any]) -> bool:
    match node:
        case ast.BinOp(left, _, right):
            return _holds_path(left, scope) or _holds_path(right, scope)
        case ast.Subscript(ast.Name("Optional" | "Union" | "Annotated"), ast.Tuple(parts)):
            return any(_holds_path(part, scope) for part in parts)
        case ast.Subscript(ast.Name("Optional"), part):
            return _holds_path(part, scope)
        case ast.Subscript(value, _):
            return _holds_path(value, scope)
        case ast.Attribute(_, name):
            return name in ("PathLike", "Path", "PurePath")
        case ast.Name(name):
            alias = scope.get(name)
            if isinstance(alias, str) or typing.get_origin(alias) is not None:
                return _is_path(_text(alias), {})
            return name in ("PathLike", "Path", "PurePath")
    return False


def _of_verbs() -> Iterator[PathParameter]:
    """Yields arguments of commands that are a directory or a file."""
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"shmbuffer.cli.{verb}").add_arguments(parser)
        for action in parser._actions:
            if action.metavar in ("DIR", "FILE"):
                yield PathParameter("shmbuffer ", verb, action.dest)
