"""Converts the contents of a storage to a dict of tensors and back, for ``state_dict``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.items.form.nodes import Node
from shmbuffer.saves.checkpointers.restoring import (
    sources_from_state,
    sources_in_state,
    sources_of_state,
)
from shmbuffer.saves.checkpointers.saved import blank
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.tensors.form import cpu, tensor_structure
from shmbuffer.tensors.form.objects import Objects
from shmbuffer.tensors.form.tensor_kit import values_of


def state_of(rows: Rows | None) -> dict[str, Any]:
    """Returns a dict with all items of a storage.

    ``_index`` contains the element numbers of the items, ``_structure`` the structure of an item,
    and ``_sources`` the writers. ``_storage`` contains one tensor ``[n, *shape]`` per leaf under
    the leaf's dotted name, or a list of objects and their shape.
    """
    if rows is None:
        return {"initialized": False, "_len": 0}
    index, tensors, tickets = rows.everything()
    slots = index.numpy()[:: rows.ring.width] // rows.ring.width
    sources = rows.ring.live.sources[slots]
    overwritten = tickets_at(rows.ring, slots) != tickets.numpy()[:: rows.ring.width]
    sources[overwritten] = 0  # the writers of overwritten items are unknown
    leaves = rows.leaves
    return {
        "initialized": True,
        "_len": len(index),
        "_cursor": rows.ring.head % rows.ring.capacity,
        "_index": index,
        "_storage": {
            _dotted(leaf.path): _plain(column)
            for leaf, column in zip(leaves.leaves, tensors, strict=True)
        },
        "_structure": {
            "node": leaves.node.to_json(),
            "lanes": list(leaves.lanes),
            "capacity": rows.ring.capacity,
        },
        **sources_in_state(sources),
    }


def example_of(state: dict[str, Any]) -> Any:
    """Returns a batch of one item of zeros, from which a storage for the state can be defined."""
    node, lanes, columns = _form_of(state)
    return node.build(map(blank, columns), (1, *lanes), cpu.DEVICE)


def load_state(rows: Rows, state: dict[str, Any]) -> None:
    """Replaces the contents of a storage with a result of `state_of`.

    Raises ValueError if the storage has a different size.
    """
    ring, leaves = rows.ring, rows.leaves
    lanes, capacity = tuple(state["_structure"]["lanes"]), state["_structure"]["capacity"]
    if (ring.capacity, leaves.lanes) != (capacity, lanes):
        raise ValueError(
            f"the state belongs to a storage of shape {[capacity, *lanes]}, but this storage has "
            f"shape {[ring.capacity, *leaves.lanes]}; load it into a storage of the same shape"
        )
    node, _, columns = _form_of(state)
    data = node.build(iter(columns), (len(columns[0]), *lanes), cpu.DEVICE)
    values_of(leaves, data)  # checks the leaves before anything is emptied
    slots = state["_index"].numpy()[:: ring.width] // ring.width
    rows.copy_in(
        columns,
        np.arange(len(slots)),
        slots,
        cursor=int(state["_cursor"]),
        write_count=len(state["_index"]),
        sources=sources_of_state(state),
    )
    if not ring.schema.sharing:  # with sharing, the core has already recorded the sources
        sources_from_state(ring, state)


def _form_of(state: dict[str, Any]) -> tuple[Node, tuple[int, ...], list[Any]]:
    """Returns the structure and the lanes in a state, and its columns ``[n, *lanes, *shape]``."""
    lanes = tuple(state["_structure"]["lanes"])
    columns = []
    for column in state["_storage"].values():
        if isinstance(column, dict):
            column = Objects.of(column["objects"], column["shape"])
        columns.append(column.reshape(-1, *lanes, *column.shape[1:]))
    return tensor_structure.from_json(state["_structure"]["node"]), lanes, columns


def _dotted(path: tuple[str, ...]) -> str:
    """Joins a nested key with dots. Dots and backslashes in a key are escaped with a backslash."""
    return ".".join(key.replace("\\", "\\\\").replace(".", "\\.") for key in path)


def _plain(column: Any) -> Any:
    """Converts a column to the form that `state_of` stores: a tensor, or a dict with a list."""
    if isinstance(column, torch.Tensor):
        return column
    return {"objects": column.tolist(), "shape": list(column.shape)}
