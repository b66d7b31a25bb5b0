"""Batches of items whose leaves differ in shape: padded, with a mask, or nested.

    records ─────┬─▶ columns ─┬─▶ pad       tokens [n, longest], mask [n, longest]
    TensorDicts ─┘            └─▶ densify   tokens [n, j]: torch's jagged tensor

A column is a leaf of all items, and one native call copies its rows to their places. torch copies
rows one by one if they have a gradient or are on another device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shmbuffer.items.records.decoding.decoder import writable
from shmbuffer.items.records.decoding.table import Table
from shmbuffer.memory.format.leaf import Key
from shmbuffer.tensors.records.joining import Nesting
from shmbuffer.tensors.records.layers import items_of, side_by_side
from shmbuffer.tensors.records.padding import Padding
from shmbuffer.tensors.records.tensor_building import is_layer
from shmbuffer.tensors.records.tensor_decoder import RawBatch, TensorDecoder, TensorReading


def pad(
    data: Any,
    value: float | Mapping[Key, float] = 0.0,
    mask_key: Key | Mapping[Key, Key] | None = "mask",
) -> Any:
    """Pads TensorDicts whose leaves differ in shape to one dense batch with a mask.

    Every leaf becomes a tensor ``[n, *longest]``, with ``value`` after the end of each item. The
    mask is bool and True for the elements of the item. Its dimensions are those of the batch and
    those in which the items differ (``[n, longest]`` for sequences).

    Args:
        data: a lazy stack (along dim 0) or a list of TensorDicts or tensorclasses. A missing leaf
            is treated as a leaf of length 0.
        value: the padding value, or a dict from leaves to padding values, with 0 for all other
            leaves.
        mask_key: key of the mask. Leaves that differ in the same dims and lengths share one mask
            under this key. Otherwise the key contains a TensorDict of masks, each under the key of
            its leaf. If all items of a batch happen to be equally long, every leaf with dims is
            masked.

            A dict from leaves to masks gives every batch the same keys: ``{"tokens": "mask",
            "logp": "mask", "prompt": "prompt_mask"}``. These leaves are always masked, and no other
            leaf may differ.

            None creates no mask.

    Returns:
        A TensorDict ``[n, *batch]``. Text and other objects are stored in a NonTensorStack, padded
        with None. If a mask is added to a tensorclass, the result is a TensorDict, because the
        tensorclass has no field for the mask.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item has another type, or a leaf is not a tensor in some items.
        KeyError: no item has a given leaf, or an item has an entry at the key of a mask.
        RuntimeError: a leaf differs in dtype or number of dims, a leaf that ``mask_key`` does not
            name differs in shape, or leaves of one mask differ in length.

    Cost: 1.5 µs per leaf of an item, and a copy. For records of one form 0.5 µs per record, 40 µs
        per leaf, and a copy or the decompression.

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
    return Padding(*_columns(data), value, mask_key).join()


def densify(data: Any, keys: Collection[Key] = ()) -> Any:
    """Joins TensorDicts whose leaves differ in shape to a batch of jagged nested tensors.

    The result is that of ``LazyStackedTensorDict.densify(layout=torch.jagged)``. Leaves of the same
    lengths share their offsets, so that torch can compute with them together.

    Args:
        data: a lazy stack (along dim 0) or a list of TensorDicts or tensorclasses. A missing leaf
            counts as a leaf of length 0.
        keys: leaves that are always nested along their first dim, even if all items are equally
            long.

    Returns:
        A TensorDict ``[n, *batch]``, with -1 for batch sizes that differ. A leaf of one shape is
            dense. Text and other objects are a NonTensorStack.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item has another type, or a leaf is not a tensor in some items.
        KeyError: no item has a given leaf.
        RuntimeError: a leaf differs in dtype, in number of dims, or in several dims.

    Cost: that of `pad`, and 70 µs for each nested tensor.
    """
    return Nesting(*_columns(data), keys).join()


def _columns(data: Any) -> tuple[Table, TensorReading]:
    """Returns the columns of items. Records with one tree are read without decoding the items."""
    decoder = TensorDecoder()
    if isinstance(data, RawBatch):
        decoder, batch = data.decoder, writable(data.batch)
        table = decoder.table(batch)
        if table is not None and is_layer(table.tree):
            return table, TensorReading(decoder, batch.data)
        data = decoder.items(batch)
    return side_by_side(items_of(data)), TensorReading(decoder)
