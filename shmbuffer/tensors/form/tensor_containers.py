"""Splits containers into entries and creates containers from entries, according to `grammar`.

Data from a file never cause the import of a module. If the class of a tensorclass has not been
imported, a TensorDict is created instead. A namedtuple becomes a tuple in that case.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from shmbuffer.items.records import containers
from shmbuffer.items.records.containers import Take, Taken, is_namedtuple, register
from shmbuffer.memory.record_format.grammar import Container

new_tensordict = partial(TensorDict._new_unsafe, nested=False)
"""Creates a TensorDict without checks, at a tenth of the constructor's cost."""


def take_of(kind: Any) -> Take | None:
    """Returns the function that splits containers of class ``kind``, or None for other classes."""
    return TAKES.get(kind) or _take_of(kind)


@lru_cache(maxsize=1024)
def _take_of(kind: Any) -> Take | None:
    if issubclass(kind, LazyStackedTensorDict):
        return _lazy
    if issubclass(kind, TensorDictBase):
        return _tensordict
    if is_tensorclass(kind) and not is_non_tensor(kind):
        return _tensorclass
    return containers.take_of(kind)


def _tensordict(item: Any) -> Taken:
    if type(item) is TensorDict:  # private attributes cost a tenth of the public ones
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


TAKES: dict[type, Take] = {
    TensorDict: _tensordict,
    NonTensorData: _object,
    **containers.TAKES,
}


def make_containers(
    node: Container, rows: Sequence[Any], sizes: Sequence[torch.Size], new: Any = new_tensordict
) -> Sequence[Any]:
    """Creates one container for each row of entries."""
    kind, _, about, keys, _ = node
    match kind:
        case "tensordict":
            return _tensordicts(keys, rows, sizes, about, new)
        case "object":
            return [_non_tensor(row[0], size) for row, size in zip(rows, sizes, strict=True)]
        case "tensorclass":
            cls: Any = class_of(about[0])
            return [row[0] if cls is None else cls.from_tensordict(row[0]) for row in rows]
        case "lazy":
            return [LazyStackedTensorDict(*row, stack_dim=about[0]) for row in rows]
        case "objects":
            return [NonTensorStack(*row, stack_dim=about[0]) for row in rows]
    return containers.make_containers(node, rows)


def _tensordicts(
    keys: Any, rows: Sequence[Any], sizes: Sequence[torch.Size], about: list[Any], new: Any
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
    # Copying the attributes of one TensorDict to all others halves the cost.
    attributes = new_tensordict({}, torch.Size(()), device).__dict__
    entries_of = type(attributes["_tensordict"])
    found = []
    for row in rows:
        one = TensorDict.__new__(TensorDict)
        one.__dict__.update(attributes)
        one._tensordict = entries_of(zip(keys, row))  # noqa: B905 - equally many
        found.append(one)
    return found


_attributes = NonTensorData(data=None, batch_size=[]).__dict__


def _non_tensor(value: Any, size: torch.Size) -> Any:
    """Creates NonTensorData with the attributes of a template.

    This takes a quarter of the time that the constructor needs.
    """
    one = NonTensorData.__new__(NonTensorData)
    attributes = one.__dict__
    attributes.update(_attributes)
    attributes["_tensordict"] = new_tensordict({}, batch_size=size)
    attributes["_non_tensordict"] = {**_attributes["_non_tensordict"], "data": value}
    return one


def class_of(name: str) -> type | None:
    """Returns the tensorclass or namedtuple of this name, or None if it has not been imported."""
    return containers.class_of(name, lambda cls: is_tensorclass(cls) or is_namedtuple(cls))
