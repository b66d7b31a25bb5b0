"""Splits containers into entries, and creates containers from entries.

Trees follow the grammar in `record_format.grammar`. A tree contains names of classes, but reading
it never imports a module. A namedtuple whose class is not loaded is created as a plain tuple.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmbuffer.memory.record_format.grammar import Container

Keys = tuple[Any, ...] | int | None
Taken = tuple[str, Sequence[int], tuple[Any, ...], Keys, Iterable[Any]]
"""A container that has been split: ``(kind, batch size, attributes, keys, values)``.

The batch size is empty if the container has none. The attributes are stored in the tree, in which
every device is replaced by ``"cpu"``. The keys are the keys of a mapping, the length of a sequence,
or None for a container with one value.
"""


Take = Callable[[Any], Taken]

# Classes by the names that trees contain: registered ones, and those that `class_of` has found.
_classes: dict[str, type] = {}


def take_of(kind: Any) -> Take | None:
    """Returns the function that splits containers of this class, or None for other classes."""
    found = TAKES.get(kind)
    return _namedtuple if found is None and is_namedtuple(kind) else found


def is_namedtuple(kind: Any) -> bool:
    """True if ``kind`` is a class of namedtuples."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _dict(item: Any) -> Taken:
    return "dict" if type(item) is dict else "ordered", (), (), tuple(item), item.values()


def _list(item: Any) -> Taken:
    return type(item).__name__, (), (), len(item), item


def _namedtuple(item: Any) -> Taken:
    return "namedtuple", (), (register(type(item)),), len(item), item


TAKES: dict[type, Take] = {dict: _dict, OrderedDict: _dict, list: _list, tuple: _list}


def names_of(keys: Keys) -> Sequence[Any]:
    """Returns the key or position of each entry of a container.

    The only entry of a container without keys has the name None.
    """
    if keys is None:
        return (None,)
    return range(keys) if isinstance(keys, int) else keys


def make_containers(node: Container, rows: Sequence[Any]) -> Sequence[Any]:
    """Creates one container per row of entries, without torch.

    The result has dicts instead of TensorDicts, and lists instead of lazy stacks. NonTensorData and
    tensorclasses are replaced by their single entry.
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
    """Returns the class with the name ``module:qualname``, without importing a module.

    Returns None if the class is not loaded, or if ``fits`` returns False for it.
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
    """Registers the class of an object in an item. Returns the name of the class for trees."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = cls
    return name
