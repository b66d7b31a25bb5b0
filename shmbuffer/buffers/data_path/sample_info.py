"""Entries of a sample in addition to its items: index, importance weights and generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuffer.items.keys import ANCHOR_GENERATION, GENERATION, INDEX, WEIGHT_KEYS
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.deferred import defer_change
from shmbuffer.tensors.form.tensor_nodes import unlocked

ANCHORS = "_anchors"  # key of the drawn items' index, until the items of the unit are read


class SampleInfo(NamedTuple):
    """Defines which entries the samples of a buffer have in addition to the items."""

    weight_keys: tuple[str, ...]  # keys of the weights, which share one tensor
    weight_dtype: torch.dtype | None  # None if samples have no weights
    generation: bool  # True if samples have ``index_generation``

    def entries(self, index: Any, weights: Any, tickets: Any) -> dict[str, Any]:
        """Returns the entries of a sample by key. Weights or tickets of None are omitted."""
        found = {INDEX: index}
        if weights is not None:
            for key in self.weight_keys:
                found[key] = weights
        if self.generation and tickets is not None:
            found[GENERATION] = tickets
        return found

    def of_choice(self, index: Any, known: Mapping[Any, Any]) -> dict[str, Any]:
        """Returns the entries of a sample for items that a sampler chose.

        Args:
            index: index of the items.
            known: the sampler's further entries.
        """
        others = dict(known)
        weights = [others.pop(key) for key in WEIGHT_KEYS if key in others]
        others.pop(ANCHORS, None)
        tickets = others.pop(GENERATION, None)
        if not self.generation:
            others.pop(ANCHOR_GENERATION, None)
        return {**self.entries(index, weights[0] if weights else None, tickets), **others}


def stack_dim_of(storage: Any) -> int | None:
    """Returns the dimension along which a batch from this storage can be a lazy stack of items.

    Returns None if batches are never stacks of items.
    """
    return None if isinstance(storage, TensorStorage) else getattr(storage, "stack_dim", 0)


def stacks_items(data: Any, stack_dim: int | None) -> bool:
    """True if ``data`` is a lazy stack along ``stack_dim``, so that its members are the items."""
    lazy = stack_dim is not None and isinstance(data, LazyStackedTensorDict)
    return lazy and bool(data.stack_dim == stack_dim % data.batch_dims)


def with_info(data: Any, info: dict[str, Any], *, stack_dim: int | None = None) -> Any:
    """Adds index and weights as entries to a TensorDict. Other data are returned unchanged.

    Args:
        data: the items of a sample.
        info: the entries to add.
        stack_dim: result of `stack_dim_of`.

    Raises:
        RuntimeError: the entries do not fit the batch size of ``data``.
    """
    if not isinstance(data, TensorDictBase):
        return data
    dims = data.batch_dims
    if type(data) is TensorDict and (places := _places(data, info)) is not None:
        for node, name, value in places:
            node._set_str(name, value, validated=True, inplace=False, non_blocking=False)
        return data
    try:
        if stacks_items(data, stack_dim):
            if not defer_change(data, partial(_set_by_item, info=info), info):
                with unlocked(data):
                    _set_by_item(data.tensordicts, info)
            return data
        if -1 in data.batch_size:  # a nested tensor, whose items have one index and weight each
            data.batch_size = data.batch_size[: list(data.batch_size).index(-1)]
            dims = data.batch_dims
        with unlocked(data):
            for key, value in info.items():
                entry = torch.stack(value, -1) if isinstance(value, tuple) else value
                if not isinstance(entry, torch.Tensor):
                    entry = cpu.as_tensor(entry)
                tail = 1 if isinstance(value, tuple) else 0
                while entry.dim() - tail < dims:
                    entry = entry.unsqueeze(entry.dim() - tail)
                entry = entry.expand(*data.batch_size, *entry.shape[dims:])
                data.set(key, entry.to(data.device) if data.device is not None else entry)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"index and weights have {len(info[INDEX])} rows, but the sample has batch size "
            f"{list(data.batch_size)}, because a transform or collate_fn has changed it; call "
            "sample(return_info=True, include_info=False) to get them separately"
        ) from error
    return data


def has_info(data: Any, info: dict[Any, Any]) -> bool:
    """True if one native call has already added index and weights to a sample."""
    return type(data) is TensorDict and data._tensordict.get(INDEX) is info[INDEX]


def without_info(data: Any, info: dict[Any, Any]) -> Any:
    """Returns the data of a sample without the entries in ``info``."""
    return data.exclude(*info) if has_info(data, info) else data


def _places(
    data: TensorDict, info: dict[Any, Any]
) -> list[tuple[TensorDict, str, torch.Tensor]] | None:
    """Returns where entries can be stored without conversion.

    Returns:
        The TensorDict, the key and the tensor of each entry. None if an entry must be expanded,
        copied to another device or stored in another way.
    """
    size, device = data._batch_size, data._device
    dims, found = len(size), []
    for key, value in info.items():
        if type(value) is not torch.Tensor or value.shape[:dims] != size:
            return None
        node: Any = data
        if type(key) is tuple:
            *above, key = key
            for name in above:
                node = node._tensordict.get(name)
                if type(node) is not TensorDict or node._batch_size != size:
                    return None
        if type(key) is not str or node._is_locked or node._device != device:
            return None
        if device is not None and value.device != device:
            return None
        found.append((node, key, value))
    return found


def _set_by_item(items: Sequence[Any], info: dict[Any, Any]) -> None:
    """Stores row ``i`` of each entry in item ``i``, expanded to the item's batch dimensions."""
    for key, values in info.items():
        rows = cpu.as_tensor(values).unbind(0)
        for item, row in zip(items, rows, strict=True):
            if type(item) is TensorDict and type(key) is str and not item._batch_size:
                entry = row if item._device is None else row.to(item._device)
                item._set_str(key, entry, validated=True, inplace=False, non_blocking=False)
                continue
            lead = (1,) * item.batch_dims
            entry = row.reshape((*lead, *row.shape)).expand((*item.batch_size, *row.shape))
            item.set(key, entry if item.device is None else entry.to(item.device))
