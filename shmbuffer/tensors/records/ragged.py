"""Batches of items whose leaves differ in shape: padded, with a mask, or nested.

    records ─────┬─▶ columns ─┬─▶ pad       tokens [n, longest], mask [n, longest]
    TensorDicts ─┘            └─▶ densify   tokens [n, j]: torch's jagged tensor

A column is a leaf of all items, and its rows go to their places by one native call. What torch must
move itself, because a gradient goes through it or it is on another device, goes there one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shmbuffer.items.records.decoder import writable
from shmbuffer.items.records.table import Table
from shmbuffer.memory.format.leaf import Key
from shmbuffer.tensors.records.building import is_layer
from shmbuffer.tensors.records.decoder import RawBatch, TensorDecoder, TensorReading
from shmbuffer.tensors.records.joining import Nesting
from shmbuffer.tensors.records.layers import items_of, side_by_side
from shmbuffer.tensors.records.padding import Padding


def pad(
    data: Any,
    value: float | Mapping[Key, float] = 0.0,
    mask_key: Key | Mapping[Key, Key] | None = "mask",
) -> Any:
    """TensorDicts whose leaves differ in shape as one dense batch, with a mask.

    Every leaf becomes a tensor ``[n, *longest]``: behind the end of an item stands ``value``. The
    mask says what is an item's own: bool, True there. It has the dims of the leaf as far as they
    differ between items (``[n, longest]`` for sequences), and those of the batch.

    Args:
        data: a lazy stack (along dim 0) or a list of TensorDicts or tensorclasses. What an item
            does not have is a leaf of length 0.
        value: behind the end; or one for each leaf, by its key, and 0 for the others.
        mask_key: where the mask is. Leaves that all differ in the same dims and lengths have one
            mask, under this key. Otherwise there is a TensorDict of masks under it, each under the
            key of its leaf. Where all items of a batch happen to be equally long, every leaf that
            has dims counts as one that differs.

            A dict from leaves to masks says it beforehand, and gives every batch the same keys:
            ``{"tokens": "mask", "logp": "mask", "prompt": "prompt_mask"}``. These leaves are
            masked, also where they happen to be equally long; no other leaf may differ.

            None is without a mask.

    Returns:
        A TensorDict ``[n, *batch]``. Text and other objects are a NonTensorStack; where they are
        fewer in some items, None follows them. A tensorclass comes out as a TensorDict if a mask
        is added, for which it has no field.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item is something else; a leaf is no tensor in some items.
        KeyError: a key that no item has; a mask under a key that they have.
        RuntimeError: a leaf differs in dtype or in how many dims it has, or differs and is not
            among those that ``mask_key`` names; leaves of one mask differ in length.

    Cost: 1.5 µs a leaf of an item, and a copy; of records of one form 0.5 µs a record, 40 µs a
    leaf, and a copy or the decompression.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer.tensors.records.ragged import pad
        >>> batch = pad([TensorDict(a=torch.ones(n), text=str(n)) for n in (1, 3)])
        >>> batch["a"]
        tensor([[1., 0., 0.],
                [1., 1., 1.]])
        >>> batch["mask"]
        tensor([[ True, False, False],
                [ True,  True,  True]])
    """
    return Padding(*_columns(data), value, mask_key).joined()


def densify(data: Any, keys: Collection[Key] = ()) -> Any:
    """TensorDicts whose leaves differ in shape as one batch of nested tensors (``torch.jagged``).

    It is what ``LazyStackedTensorDict.densify(layout=torch.jagged)`` gives. Leaves of the same
    lengths share their offsets, so that torch can compute with them together.

    Args:
        data: a lazy stack (along dim 0) or a list of TensorDicts or tensorclasses. What an item
            does not have is a leaf of length 0.
        keys: of leaves that are nested along their first dim also where all items of a batch happen
            to be equally long.

    Returns:
        A TensorDict ``[n, *batch]``, -1 where batch sizes differ. A leaf that differs in no dim is
        dense. Text and other objects are a NonTensorStack.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item is something else; a leaf is no tensor in some items.
        KeyError: a key that no item has.
        RuntimeError: a leaf differs in dtype, in how many dims it has, or in several dims.

    Cost: that of `pad`, and 70 µs for each nested tensor.
    """
    return Nesting(*_columns(data), keys).joined()


def _columns(data: Any) -> tuple[Table, TensorReading]:
    """Items as columns; records as they lie, where they are TensorDicts of one tree."""
    decoder = TensorDecoder()
    if isinstance(data, RawBatch):
        decoder, batch = data.decoder, writable(data.batch)
        table = decoder.table(batch)
        if table is not None and is_layer(table.tree):
            return table, TensorReading(decoder, batch.data)
        data = decoder.items(batch)
    return side_by_side(items_of(data)), TensorReading(decoder)
