"""Batches of items whose leaves differ in shape: padded, with a mask, or nested.

    records ─────┬─▶ columns ─┬─▶ pad       tokens [n, longest], mask [n, longest]
    TensorDicts ─┘            └─▶ densify   tokens [n, j]: torch's jagged tensor

A column contains the values of one leaf in all items. One native call copies all of them to the
batch. If they have a gradient or are on another device, torch copies them one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shmbuffer.items.records.decoding.decoder import writable
from shmbuffer.items.records.decoding.table import Table
from shmbuffer.memory.format.leaf import Key
from shmbuffer.tensors.records.joining import Nesting
from shmbuffer.tensors.records.layers import items_of, to_table
from shmbuffer.tensors.records.padding import Padding
from shmbuffer.tensors.records.tensor_building import is_layer
from shmbuffer.tensors.records.tensor_decoder import RawBatch, TensorDecoder, TensorReading


def pad(
    data: Any,
    value: float | Mapping[Key, float] = 0.0,
    mask_key: Key | Mapping[Key, Key] | None = "mask",
) -> Any:
    """Pads TensorDicts whose leaves differ in shape to one dense batch with a mask.

    Every leaf becomes a tensor ``[n, *longest]`` in which the elements after the end of an item are
    ``value``. The mask is bool, and True for the elements of the item. It has the dimensions of the
    batch and those in which the items differ (``[n, longest]`` for sequences).

    Args:
        data: a lazy stack (along dim 0) or a list of TensorDicts or tensorclasses. A missing leaf
            is treated as a leaf of length 0.
        value: the padding value, or a dict from leaves to padding values, with 0 for all other
            leaves.
        mask_key: key of the mask. Leaves that differ in the same dims and lengths share one mask
            under this key. Otherwise the entry is a TensorDict of masks, each under the key of its
            leaf. If all items of a batch happen to be equally long, every leaf with dims is masked.

            A dict from leaves to masks gives every batch the same keys: ``{"tokens": "mask",
            "logp": "mask", "prompt": "prompt_mask"}``. These leaves are always masked, and no other
            leaf may differ in shape.

            With None, no mask is created.

    Returns:
        A TensorDict ``[n, *batch]``. Text and other objects are in a NonTensorStack, padded with
        None. If a mask is added to tensorclasses, the result is a TensorDict, because a tensorclass
        has no field for the mask.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item has another type, or a leaf is not a tensor in some items.
        KeyError: no item has a leaf named in ``value`` or ``mask_key``, or an item already has an
            entry at the key of a mask.
        RuntimeError: a leaf differs in dtype or number of dims. Also raised if ``mask_key`` is a
            dict and another leaf differs in shape, or if leaves that share a mask differ in length.

    Cost: 1.5 µs per leaf of each item, and a copy. For records of one form: 0.5 µs per record,
        40 µs per leaf, and a copy or the decompression.

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

    The result is the same as that of ``LazyStackedTensorDict.densify(layout=torch.jagged)``. Leaves
    with the same lengths share their offsets, so that torch can combine them in one operation.

    Args:
        data: a lazy stack (along dim 0) or a list of TensorDicts or tensorclasses. A missing leaf
            is treated as a leaf of length 0.
        keys: leaves that are always nested along their first dim, even if all items are equally
            long.

    Returns:
        A TensorDict ``[n, *batch]``, with -1 for batch sizes that differ. A leaf that has the same
        shape in all items is dense. Text and other objects are in a NonTensorStack.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item has another type, or a leaf is not a tensor in some items.
        KeyError: no item has a leaf named in ``keys``.
        RuntimeError: a leaf differs in dtype, in number of dims, or in the size of several dims.

    Cost: the cost of `pad`, and 70 µs per nested tensor.
    """
    return Nesting(*_columns(data), keys).join()


def _columns(data: Any) -> tuple[Table, TensorReading]:
    """Returns the table of the items, and the reading with which its columns are read.

    Records that share one tree are read without decoding the items first.
    """
    decoder = TensorDecoder()
    if isinstance(data, RawBatch):
        decoder, batch = data.decoder, writable(data.batch)
        table = decoder.table(batch)
        if table is not None and is_layer(table.tree):
            return table, TensorReading(decoder, batch.data)
        data = decoder.items(batch)
    return to_table(items_of(data)), TensorReading(decoder)
