"""The form of the data, as a tree over its leaves.

A tree is made once, from the first batch that anybody writes, and travels as JSON in the buffer's
schema, so that every process gives back the form in which the data came, with its entries in the
order of that batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensorclass

from shmbuffer.errors import FormatError
from shmbuffer.replay.form import labels
from shmbuffer.replay.form.containers import register
from shmbuffer.replay.form.mismatch import no_names, not_a_tensor
from shmbuffer.replay.form.nodes import (
    LEAF,
    KeyPath,
    LazyStackNode,
    Node,
    ObjectNode,
    PyTreeNode,
    TensorClassNode,
    TensorDictNode,
    fields,
    is_collection,
    nest,
)
from shmbuffer.replay.form.tensors import Numbers, is_number
from shmbuffer.replay.keys import OWN_KEYS


def describe(data: Any, dims: int, *, mapping: str, root: bool = True) -> Node:
    """The tree of a first batch."""
    if is_non_tensor(data):
        if root:
            raise TypeError(not_a_tensor(data))
        return ObjectNode(tuple(data.batch_size[dims:]))
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim >= dims and _differ(data):
        stacked: dict[Any, Node] = {
            at: describe(part, dims, mapping=mapping, root=root)
            for at, part in enumerate(data.tensordicts)
        }
        return LazyStackNode(stacked, data.stack_dim - dims, data.batch_dims - dims)
    if is_collection(data):
        batch = tuple(data.batch_size[dims:])
        items = {
            str(key): describe(value, dims, mapping=mapping, root=False)
            for key, value in fields(data).items()
            if not (root and key in OWN_KEYS)
        }
        if is_tensorclass(data):
            return TensorClassNode(items, batch, register(type(data)))
        return TensorDictNode(items, batch)
    if isinstance(data, Mapping):
        if mapping == "tensordict":
            data = nest(data)
            for key in data:
                if not isinstance(key, str):
                    raise TypeError(
                        f"the key {key!r} in the data is no text, and a TensorDict has no other "
                        "keys; rename it, or use a ReplayBuffer, which keeps a dict as it is"
                    )
        entries: dict[Any, Node] = {
            key: describe(data[key], dims, mapping=mapping, root=False)
            for key in data
            if not (root and key in OWN_KEYS)
        }
        return TensorDictNode(entries) if mapping == "tensordict" else PyTreeNode("dict", entries)
    if isinstance(data, Numbers):
        return LEAF
    if isinstance(data, (tuple, list)) and mapping == "tensordict":
        if root:
            raise TypeError(no_names(data))
        return LEAF
    if isinstance(data, (tuple, list)):
        parts = {
            at: describe(value, dims, mapping=mapping, root=False) for at, value in enumerate(data)
        }
        if hasattr(data, "_fields"):
            return PyTreeNode("namedtuple", parts, **{"class": register(type(data))})
        return PyTreeNode("tuple" if isinstance(data, tuple) else "list", parts)
    if is_number(data):
        return LEAF
    raise TypeError(not_a_tensor(data))


def _differ(stack: LazyStackedTensorDict) -> bool:
    """Whether what is stacked cannot be one TensorDict."""
    first, *others = (
        {key: getattr(value, "shape", None) for key, value in part.items(True, True)}
        for part in stack.tensordicts
    )
    return any(form != first for form in others)


def without_own_keys(data: Any, keys: frozenset[str] = OWN_KEYS) -> Any:
    """``data`` without the root entries that a sample adds; a plain dict where there were any."""
    collection = is_collection(data)
    if not (collection or isinstance(data, dict)) or keys.isdisjoint(data.keys()):
        return data
    entries = fields(data) if collection else data
    return {key: value for key, value in entries.items() if key not in keys}


def from_json(spec: dict[str, Any]) -> Node:
    """The tree that `Node.to_json` wrote."""
    try:
        return _from_json(spec)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"the schema's structure cannot be read ({type(error).__name__}: {error}); open the "
            "buffer with the version that wrote it"
        ) from error


def _from_json(spec: dict[str, Any]) -> Node:
    kind = spec.get("kind")
    if kind == "leaf":
        return LEAF
    if kind == "object":
        return ObjectNode(tuple(int(size) for size in spec["shape"]))
    items = {labels.from_json(key): _from_json(child) for key, child in spec.get("items", ())}
    batch = tuple(int(size) for size in spec.get("batch", ()))
    if kind in ("tensordict", "tensorclass") and not all(isinstance(key, str) for key in items):
        raise ValueError(f"a key of {list(items)!r:.60} is no text")
    if kind == "tensordict":
        return TensorDictNode(items, batch)
    if kind == "tensorclass":
        return TensorClassNode(items, batch, str(spec["class"]))
    if kind == "lazy_stack":
        dim, batch_dims = int(spec["dim"]), int(spec["batch_dims"])
        if not 0 <= dim < batch_dims:
            raise FormatError(f"a lazy stack along dimension {dim} of {batch_dims} is not possible")
        return LazyStackNode(items, dim, batch_dims)
    if kind in ("dict", "tuple", "list", "namedtuple"):
        return PyTreeNode(kind, items, **{name: spec[name] for name in spec if name == "class"})
    raise FormatError(
        f"the schema names a structure {kind!r} that this version of shmbuffer does not know; "
        "open the buffer with the version that wrote it"
    )


def from_paths(paths: list[KeyPath]) -> Node:
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
