"""Rows and entries of a batch, whatever classes its nodes are of."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.tensors.form.nodes import is_collection


def rows_of(data: Any, some: slice, but: str | None = None) -> Any:
    """Some rows of a batch in nodes of their own (2 µs a leaf), without one entry."""
    if type(data) is TensorDict:
        kept = {key: rows_of(one, some) for key, one in data._tensordict.items() if key != but}
        size = torch.Size((len(range(*some.indices(len(data)))), *data.batch_size[1:]))
        return TensorDict._new_unsafe(kept, size, data.device, nested=False)
    if isinstance(data, dict):
        return {key: rows_of(one, some) for key, one in data.items() if key != but}
    return own_node(data[some])


def own_node(data: Any) -> Any:
    """A node of its own with the same tensors."""
    return data.copy() if is_collection(data) else data


def get_entry(data: Any, key: str) -> Any:
    """An entry of a node."""
    return data.get(key) if is_collection(data) else data[key]


def set_entry(data: Any, key: str, value: Any) -> Any:
    """Set an entry and return it as it is there."""
    if is_collection(data):
        data.set(key, value)
        return data.get(key)
    data[key] = value
    return value
