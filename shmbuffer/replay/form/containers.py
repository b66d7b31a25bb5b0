"""The containers that data are made of: taken apart and made, by the trees of `grammar`.

Nothing is imported on behalf of a tree: without its class here, a tensorclass is a TensorDict, and
a namedtuple a tuple.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from shmbuffer.memory.record_format.grammar import Container

new_tensordict = partial(TensorDict._new_unsafe, nested=False)
"""A TensorDict that is not checked, at a tenth of the cost."""


# Tensorclasses and namedtuples that this process has written or found, by name.
_classes: dict[str, type] = {}

Keys = tuple[Any, ...] | int | None
Taken = tuple[str, Sequence[int], tuple[Any, ...], Keys, Iterable[Any]]
"""A container, taken apart by one level: its kind; its batch size, empty where it has none of its
own; what its tree says between that and what is in it, with the device ``"cpu"`` where it has any;
the keys of a mapping, the length of a sequence, or None where it holds one thing; and what is in
it."""


Take = Callable[[Any], Taken]


def take_of(kind: Any) -> Take | None:
    """How things of this class are taken apart; None if they are no containers."""
    return TAKES.get(kind) or _take_of(kind)


@lru_cache(maxsize=1024)
def _take_of(kind: Any) -> Take | None:
    if issubclass(kind, LazyStackedTensorDict):
        return _lazy
    if issubclass(kind, TensorDictBase):
        return _tensordict
    if is_tensorclass(kind) and not is_non_tensor(kind):
        return _tensorclass
    return _namedtuple if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _tensordict(item: Any) -> Taken:
    if type(item) is TensorDict:  # its private parts cost a tenth of the public ones
        batch, names, entries = item._batch_size, item._td_dim_names, item._tensordict
        device = item._device
    else:
        batch, names, device = item.batch_size, item.names, item.device
        entries = {name: item.get(name) for name in item.keys()}  # noqa: SIM118
    if names is not None:
        names = tuple(names) if any(names) else None
    about = (None if device is None else "cpu", names)
    return "tensordict", batch, about, tuple(entries), entries.values()


def _tensorclass(item: Any) -> Taken:
    return "tensorclass", (), (register(type(item)),), None, (item._tensordict,)


def _lazy(item: Any) -> Taken:
    kind, parts = "objects" if isinstance(item, NonTensorStack) else "lazy", item.tensordicts
    return kind, (), (item.stack_dim,), len(parts), parts


def _object(item: Any) -> Taken:
    return "object", item.batch_size, (), None, (item.data,)


def _dict(item: Any) -> Taken:
    return "dict" if type(item) is dict else "ordered", (), (), tuple(item), item.values()


def _list(item: Any) -> Taken:
    return type(item).__name__, (), (), len(item), item


def _namedtuple(item: Any) -> Taken:
    return "namedtuple", (), (register(type(item)),), len(item), item


TAKES: dict[type, Take] = {
    TensorDict: _tensordict,
    NonTensorData: _object,
    dict: _dict,
    OrderedDict: _dict,
    list: _list,
    tuple: _list,
}


def names_of(keys: Keys) -> Sequence[Any]:
    """A name for each thing that is in a container: its key or position, None if it has neither."""
    if keys is None:
        return (None,)
    return range(keys) if isinstance(keys, int) else keys


def made(
    node: Container, rows: Sequence[Any], sizes: Sequence[torch.Size], new: Any = new_tensordict
) -> Sequence[Any]:
    """A container for each row of what is to be in them."""
    kind, _, about, keys, _ = node
    match kind:
        case "tensordict":
            return _tensordicts(keys, rows, sizes, about, new)
        case "object":
            return [_non_tensor(row[0], size) for row, size in zip(rows, sizes, strict=True)]
        case "tensorclass":
            cls: Any = class_of(about[0])
            return [row[0] if cls is None else cls.from_tensordict(row[0]) for row in rows]
        case "dict":
            return [dict(zip(keys, row, strict=True)) for row in rows]
        case "ordered":
            return [OrderedDict(zip(keys, row, strict=True)) for row in rows]
        case "list":
            return list(map(list, rows))
        case "namedtuple":
            cls = class_of(about[0])
            return rows if cls is None else [cls(*row) for row in rows]
        case "lazy":
            return [LazyStackedTensorDict(*row, stack_dim=about[0]) for row in rows]
        case "objects":
            return [NonTensorStack(*row, stack_dim=about[0]) for row in rows]
    return rows


def _tensordicts(
    keys: Any,
    rows: Sequence[Any],
    sizes: Sequence[torch.Size],
    about: list[Any],
    new: Any,
) -> list[Any]:
    device, names = about
    if new is not new_tensordict or names is not None or any(sizes[:1]):
        return [
            new(
                dict(zip(keys, row, strict=True)),
                batch_size=size,
                device=device,
                names=None if names is None else list(names),
            )
            for row, size in zip(rows, sizes, strict=True)
        ]
    # All have the attributes of a first one, but for their entries: half of what it costs to make
    # each.
    attributes = new_tensordict({}, torch.Size(()), device).__dict__
    entries_of = type(attributes["_tensordict"])
    found = []
    for row in rows:
        one = TensorDict.__new__(TensorDict)
        one.__dict__.update(attributes)
        one._tensordict = entries_of(zip(keys, row))  # noqa: B905 - they are as many
        found.append(one)
    return found


_attributes = NonTensorData(data=None, batch_size=[]).__dict__


def _non_tensor(value: Any, size: torch.Size) -> Any:
    """NonTensorData, a quarter as dear as its constructor: with the attributes of another one."""
    one = NonTensorData.__new__(NonTensorData)
    attributes = one.__dict__
    attributes.update(_attributes)
    attributes["_tensordict"] = new_tensordict({}, batch_size=size)
    attributes["_non_tensordict"] = {**_attributes["_non_tensordict"], "data": value}
    return one


def class_of(name: str) -> type | None:
    """The class of that name (``module:qualname``) if this process has it; imports nothing."""
    found = _classes.get(name)
    if found is None:
        module, _, qualname = name.partition(":")
        at: Any = sys.modules.get(module)
        for part in qualname.split("."):
            at = getattr(at, part, None)
        if isinstance(at, type) and (
            is_tensorclass(at) or (issubclass(at, tuple) and hasattr(at, "_fields"))
        ):
            found = _classes[name] = at
    return found


def register(cls: type) -> str:
    """Remember a class of the data; the name under which the schema has it."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes[name] = cls
    return name
