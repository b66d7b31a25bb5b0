"""Reads by index: views of what is not shared, validated copies of what is."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.replay.storages.indexing import Selection, select
from shmbuffer.replay.storages.native_rows import NativeRows
from shmbuffer.replay.storages.rows import Rows

_ATTEMPTS = 16  # at reading what other processes keep writing over


def fetch(rows: Rows, index: Any, *, dim_extend: int = 0, as_views: bool) -> Any:
    """Items by index, in the form in which they were written.

    Args:
        rows: where from.
        index: see `select`.
        dim_extend: the dimension along which the user's batches are appended.
        as_views: give views where the index allows it; else validated copies.

    Raises:
        IndexError: a slot that holds no item. A slice leaves such slots out.
    """
    leaves = rows.leaves
    if not dim_extend and _is_drawn(rows, index):
        tensors, _, missing = rows.read(index)
        if not missing:
            return leaves.build(tensors, (len(index),))
    for _ in range(_ATTEMPTS):
        selection = select(index, rows.ring, leaves.lanes, dim_extend)
        if as_views and selection.view is not None:
            return leaves.build([selection.view(view) for view in rows.views()], selection.lead)
        copies = _copies(rows, selection)
        if copies is not None:
            return leaves.build(*copies)
    raise IndexError(
        f"what {index!r} names was written over each of the {_ATTEMPTS} times that it was read"
    )


def _is_drawn(rows: Rows, index: Any) -> bool:
    """Whether the index may go to the core as it is: what a sampler chose, as a rule."""
    return (
        type(index) is torch.Tensor
        and index.dtype is torch.int64
        and index.dim() == 1
        and index.is_cpu
        and index.is_contiguous()
        and type(rows) is NativeRows
        and not rows.leaves.lanes
        and len(index) > 0
        and int(index.min()) >= 0
        and int(index.max()) < rows.ring.capacity
    )


def everything(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Copies of all elements that are there: their indices, their tickets, and the leaves."""
    index = torch.from_numpy(rows.ring.committed())
    tensors, tickets, missing = rows.read(index)
    if missing:  # written over by another process since
        lanes = rows.ring.lanes
        kept = (tickets >= 0).view(-1, lanes).all(1).repeat_interleave(lanes)
        index, tickets = index[kept], tickets[kept]
        tensors = [tensor[kept.to(tensor.device)] for tensor in tensors]
    return index, tickets, tensors


def _copies(rows: Rows, selection: Selection) -> tuple[list[torch.Tensor], tuple[int, ...]] | None:
    """The leaves and their leading shape; None if what was selected has to be looked for again."""
    elements = torch.from_numpy(selection.elements)
    tensors, tickets, missing = rows.read(elements)
    lead = selection.lead
    if missing:  # written over or emptied since we looked
        if not selection.skips:
            return None
        kept = (tickets >= 0).view(lead[0], -1).all(1)
        tensors = [
            tensor.view(lead[0], -1, *tensor.shape[1:])[kept.to(tensor.device)]
            for tensor in tensors
        ]
        lead = (int(kept.sum()), *lead[1:])
    shapes = [leaf.shape for leaf in rows.leaves.leaves]
    return [t.view((*lead, *shape)) for t, shape in zip(tensors, shapes, strict=True)], lead
