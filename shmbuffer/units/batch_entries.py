"""Accesses rows and entries of a batch that may be a TensorDict, a tensorclass or a dict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer.tensors.form.tensor_nodes import is_collection


def rows_of(data: Any, some: slice, but: str | None = None) -> Any:
    """Returns a slice of the rows of a batch, as views in new containers. Cost: 2 µs per leaf.

    If ``but`` is the key of an entry, this entry is left out.
    """
    if type(data) is TensorDict:
        entries = {key: rows_of(one, some) for key, one in data._tensordict.items() if key != but}
        size = torch.Size((len(range(*some.indices(len(data)))), *data.batch_size[1:]))
        return TensorDict._new_unsafe(entries, size, data.device, nested=False)
    if isinstance(data, dict):
        return {key: rows_of(one, some) for key, one in data.items() if key != but}
    return own_node(data[some])


def own_node(data: Any) -> Any:
    """Returns a shallow copy of a TensorDict or tensorclass, and any other data unchanged."""
    return data.copy() if is_collection(data) else data


def get_entry(data: Any, key: str) -> Any:
    """Returns the entry of a container at a key."""
    return data.get(key) if is_collection(data) else data[key]


def set_entry(data: Any, key: str, value: Any) -> Any:
    """Sets an entry of a container, and returns the value that the container stored."""
    if is_collection(data):
        data.set(key, value)
        return data.get(key)
    data[key] = value
    return value
