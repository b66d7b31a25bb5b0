"""The form of the data, as a tree over its leaves.

A tree is made once, from the first batch that anybody writes, and travels as JSON in the buffer's
schema, so that every process gives back the form in which the data came. Names within a node are
sorted: two processes that race to write first describe the same data in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, is_non_tensor, is_tensorclass

from shmbuffer.errors import FormatError
from shmbuffer.replay.keys import OWN_KEYS
from shmbuffer.replay.nodes import (
    LEAF,
    DictNode,
    Node,
    Path,
    SequenceNode,
    TensorClassNode,
    TensorDictNode,
    fields,
    is_collection,
    nest,
    register,
)


def stack(items: list[Any]) -> Any:
    """Items of one form as a batch of that form: every leaf gets a dimension in front.

    Raises:
        ValueError: there are none.
    """
    if not items:
        raise ValueError("an empty list has no form; write nothing, or a batch of size 0")
    first = items[0]
    if is_collection(first):
        return torch.stack(items)
    if isinstance(first, Mapping):
        return {key: stack([item[key] for item in items]) for key in first}
    if hasattr(first, "_fields"):
        return type(first)(*(stack(list(values)) for values in zip(*items, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(stack(list(values)) for values in zip(*items, strict=True))
    return torch.stack([torch.as_tensor(item) for item in items])


def describe(data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
    """The tree of a first batch.

    Args:
        data: the batch.
        dims: how many leading dimensions belong to the storage; they are no part of an element.
        mapping: what a plain dict is, ``"dict"`` (a PyTree) or ``"tensordict"``.
        root: leave out the keys that a sample adds.

    Raises:
        TypeError: something in there is not a tensor and cannot become one.
    """
    if is_non_tensor(data):
        raise TypeError(_not_a_tensor(data))
    if is_collection(data):
        batch = tuple(data.batch_size[dims:])
        items = {
            str(key): describe(value, dims, mapping=mapping, root=False)
            for key, value in sorted(fields(data).items())
            if not (root and key in OWN_KEYS)
        }
        if is_tensorclass(data):
            return TensorClassNode(items, batch, register(type(data)))
        return TensorDictNode(items, batch)
    if isinstance(data, Mapping):
        if mapping == "tensordict":
            data = nest(data)
        if len({str(key) for key in data}) < len(data):
            raise TypeError(
                f"keys of a dict in the data are the same when written out: {list(data)}"
            )
        entries: dict[Any, Node] = {
            _dict_key(key): describe(data[key], dims, mapping=mapping, root=False)
            for key in sorted(data, key=str)
            if not (root and key in OWN_KEYS)
        }
        return TensorDictNode(entries) if mapping == "tensordict" else DictNode(entries)
    if isinstance(data, (tuple, list)):
        parts = {
            at: describe(value, dims, mapping=mapping, root=False) for at, value in enumerate(data)
        }
        if hasattr(data, "_fields"):
            return SequenceNode(parts, "namedtuple", register(type(data)))
        return SequenceNode(parts, "tuple" if isinstance(data, tuple) else "list")
    if isinstance(data, (torch.Tensor, np.ndarray, np.generic, bool, int, float, complex)):
        return LEAF
    raise TypeError(_not_a_tensor(data))


def from_json(spec: dict[str, Any]) -> Node:
    """The tree that `Node.to_json` wrote.

    Raises:
        FormatError: a kind of node that this version does not know.
    """
    kind = spec.get("kind")
    if kind == "leaf":
        return LEAF
    items = {key: from_json(child) for key, child in spec.get("items", ())}
    batch = tuple(int(size) for size in spec.get("batch", ()))
    if kind == "tensordict":
        return TensorDictNode(items, batch)
    if kind == "tensorclass":
        return TensorClassNode(items, batch, str(spec["class"]))
    if kind == "dict":
        return DictNode(items)
    if kind in ("tuple", "list", "namedtuple"):
        return SequenceNode(items, kind, spec.get("class"))
    raise FormatError(
        f"the schema names a structure {kind!r} that this version of shmbuffer does not know; "
        "open the buffer with the version that wrote it"
    )


def from_paths(paths: list[Path]) -> Node:
    """The TensorDict with leaves at these places: for a schema without a structure."""
    items: dict[str, Any] = {}
    for path in paths:
        level = items
        for name in path[:-1]:
            level = level.setdefault(name, {})
        level[path[-1]] = LEAF

    def node(level: dict[str, Any]) -> Node:
        return TensorDictNode(
            {key: child if child is LEAF else node(child) for key, child in level.items()}
        )

    return node(items)


def _dict_key(key: Any) -> str | int:
    if not isinstance(key, (str, int)):
        raise TypeError(
            f"a dict in the data has the key {key!r}; keys are strings or integers, so that they "
            "can be written into the buffer's schema"
        )
    return key


def _not_a_tensor(data: Any) -> str:
    what = repr(data.data if isinstance(data, NonTensorData) else data)
    return (
        f"{what[:60]} in the data is not a tensor; tensor storages hold tensors, arrays and "
        "numbers. Leave it out, encode it as a tensor, or use a ListStorage"
    )
