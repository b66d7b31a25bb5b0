"""Splits the containers of items into entries, and creates containers from entries.

Trees follow the grammar of `record_format.grammar`. They contain names of classes, but no module is
imported because of a tree. A namedtuple of an unknown class is created as a tuple.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmbuffer.memory.record_format.grammar import Container

Keys = tuple[Any, ...] | int | None
Taken = tuple[str, Sequence[int], tuple[Any, ...], Keys, Iterable[Any]]
"""A container that was split by one level: (kind, batch size, attributes, keys, values).

The batch size is empty if the container has none. The attributes for its tree contain ``"cpu"`` for
any device. The keys are those of a mapping, the length of a sequence, or None for a container with
one value.
"""


Take = Callable[[Any], Taken]

# Namedtuples and other classes that `class_of` has found, by name.
_classes: dict[str, type] = {}


def take_of(kind: Any) -> Take | None:
    """Returns the function that splits objects of this class; None if they are not containers."""
    found = TAKES.get(kind)
    return _namedtuple if found is None and is_namedtuple(kind) else found


def is_namedtuple(kind: Any) -> bool:
    """True if a class is a namedtuple."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _dict(item: Any) -> Taken:
    return "dict" if type(item) is dict else "ordered", (), (), tuple(item), item.values()


def _list(item: Any) -> Taken:
    return type(item).__name__, (), (), len(item), item


def _namedtuple(item: Any) -> Taken:
    return "namedtuple", (), (register(type(item)),), len(item), item


TAKES: dict[type, Take] = {dict: _dict, OrderedDict: _dict, list: _list, tuple: _list}


def names_of(keys: Keys) -> Sequence[Any]:
    """Returns a name for each entry of a container: its key or position, or None."""
    if keys is None:
        return (None,)
    return range(keys) if isinstance(keys, int) else keys


def make_containers(node: Container, rows: Sequence[Any]) -> Sequence[Any]:
    """Creates one container for each row of entries, with dicts instead of TensorDicts.

    Lists replace lazy stacks, and plain objects replace the NonTensorData of a TensorDict.
    """
    kind, _, about, keys, _ = node
    match kind:
        case "tensordict" | "dict":
            return [dict(zip(keys, row, strict=True)) for row in rows]
        case "object" | "tensorclass":
            return [row[0] for row in rows]
        case "ordered":
            return [OrderedDict(zip(keys, row, strict=True)) for row in rows]
        case "list" | "lazy" | "objects":
            return list(map(list, rows))
        case "namedtuple":
            cls: Any = class_of(about[0])
            return rows if cls is None else [cls(*row) for row in rows]
    return rows


def class_of(name: str, fits: Callable[[type], bool] = is_namedtuple) -> type | None:
    """Returns the class of a name (``module:qualname``) if it is already loaded and fits.

    This function imports no module.
    """
    found = _classes.get(name)
    if found is None:
        module, _, qualname = name.partition(":")
        at: Any = sys.modules.get(module)
        for part in qualname.split("."):
            at = getattr(at, part, None)
        if isinstance(at, type) and fits(at):
            found = _classes[name] = at
    return found


def register(cls: type) -> str:
    """Registers a class of the data, and returns its name in trees."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = cls
    return name
