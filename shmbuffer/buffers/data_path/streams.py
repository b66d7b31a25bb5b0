"""Streams of a write, given for each item or as a dimension of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.items.streams import require_rows, steps_and_streams
from shmbuffer.memory.format.streams import Streams, checked
from shmbuffer.storages import Storage
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.writers import Writer


def taken_in(streams: Any, plan: Plan, storage: Storage, writer: Writer) -> int | Streams:
    """The user's ``streams``, checked; TypeError if the items of this buffer have none."""
    found = checked(streams)
    if not plan.appends or not isinstance(storage, RingBacked):
        raise TypeError(
            f"streams: a {type(storage).__name__} with a {type(writer).__name__} keeps no streams; "
            "they belong to items that a RoundRobinWriter appends to a storage of this package. "
            "Nothing was written"
        )
    require_rows(found, storage.ndim)
    return found


def in_time_order(data: Any, dim: int, ndim: int) -> tuple[Any, Streams, tuple[int, int]]:
    """Items ``[T * streams, ...]`` step by step, their streams, and both sizes, from a PyTree."""
    leaves, form = tree_flatten(data, is_leaf=is_collection)
    lead, streams = steps_and_streams([tuple(_lead(leaf)) for leaf in leaves], dim, ndim)
    if dim == 0:
        leaves = [
            leaf.transpose(0, 1) if _is_torch(leaf) else leaf.swapaxes(0, 1) for leaf in leaves
        ]
    items = [_flat(leaf) for leaf in leaves]
    return tree_unflatten(items, form), streams, lead


def as_given(index: torch.Tensor, lead: tuple[int, int], dim: int) -> torch.Tensor:
    """The index of `in_time_order`'s items in the form of the data."""
    if index.numel() != lead[0] * lead[1]:
        return index  # a transform has kept some back
    shaped = index.view(lead)
    return shaped.t() if dim == 0 else shaped


def _is_torch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or is_collection(leaf)


def _lead(leaf: Any) -> Any:
    return (leaf.batch_size if is_collection(leaf) else np.shape(leaf))[:2]


def _flat(leaf: Any) -> Any:
    if is_collection(leaf):
        return leaf.reshape(leaf.batch_size[:2].numel(), *leaf.batch_size[2:])
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
