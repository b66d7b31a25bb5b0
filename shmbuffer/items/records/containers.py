"""The containers that items are made of: how each is taken apart, and how it is made.

Trees are in the grammar of `record_format.grammar`. A class is named, and nothing is imported on
behalf of a tree: without the class here, a namedtuple is a tuple.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmbuffer.memory.record_format.grammar import Container

Keys = tuple[Any, ...] | int | None
Taken = tuple[str, Sequence[int], tuple[Any, ...], Keys, Iterable[Any]]
"""A container, taken apart by one level: its kind; its batch size, empty where it has none of its
own; what its tree says between that and what is in it, with the device ``"cpu"`` where it has any;
the keys of a mapping, the length of a sequence, or None where it holds one thing; and what is in
it."""


Take = Callable[[Any], Taken]

# Namedtuples, and what else `class_of` is asked for, by name.
_classes: dict[str, type] = {}


def take_of(kind: Any) -> Take | None:
    """How things of this class are taken apart; None if they are no containers."""
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
    """A name for each thing that is in a container: its key or position, None if it has neither."""
    if keys is None:
        return (None,)
    return range(keys) if isinstance(keys, int) else keys


def made(node: Container, rows: Sequence[Any]) -> Sequence[Any]:
    """A container for each row of what is to be in them; of TensorDicts and what is in them dicts.

    A lazy stack is a list; text and objects of a TensorDict are themselves.
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
    """The class of that name (``module:qualname``) if this process has it already, and it fits.

    Imports nothing.
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
    """Remember a class of the data; the name under which trees have it."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = cls
    return name
