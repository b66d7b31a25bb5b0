"""Computes the ranks of items. The values of one entry are reduced to one number per item."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict

from shmbuffer.memory.format.leaf import Key
from shmbuffer.tensors.form.tensor_nodes import is_collection

Rank = int | float


def rank_of(item: Any, key: Key, reduction: str) -> Rank:
    """Returns the rank of one item, which is a TensorDict of any batch size.

    Raises the errors of `ranks_of`.
    """
    return _ranks(item, 1, key, reduction)[0]


def ranks_of(data: Any, key: Key, reduction: str) -> list[Rank]:
    """Returns the rank of each item in a batch, which is a TensorDict or a list of TensorDicts.

    Raises:
        RuntimeError: the data are not TensorDicts, or the batch has no batch dimension.
        KeyError: the entry ``key`` is missing.
        ValueError: a rank is NaN, or an item has no values.
    """
    if isinstance(data, LazyStackedTensorDict):
        data = list(data.unbind(0))  # the entries of its items can differ in shape
    if isinstance(data, list):
        return [rank_of(item, key, reduction) for item in data]
    if is_collection(data) and not data.batch_size:
        raise RuntimeError(
            "extend() takes a batch of shape [n, ...], got batch size []; to write a single "
            "item, use add()"
        )
    return _ranks(data, None, key, reduction)


def _ranks(data: Any, count: int | None, key: Key, reduction: str) -> list[Rank]:
    if not is_collection(data):
        raise RuntimeError(
            "TensorDictMaxValueWriter expects data to be a tensor collection with the entry "
            f"{key!r}, got {type(data).__name__}; put the data in a TensorDict, or use a "
            "RoundRobinWriter"
        )
    values = data.get(key, None)
    if values is None:
        raise KeyError(
            f"rank_key is {key!r}, but the data have no such entry; their entries are "
            f"{sorted(map(str, data.keys(True, True)))}"
        )
    count = data.batch_size[0] if count is None else count
    if not count:
        return []
    ranks = _reduced(values.detach().reshape(count, -1), reduction)
    for at, rank in enumerate(ranks):
        if rank != rank:
            raise ValueError(
                f"the rank of item {at} ({key!r}) is NaN, so it cannot be compared; nothing was "
                "changed"
            )
    return ranks


def _reduced(values: torch.Tensor, how: str) -> list[Rank]:
    if values.shape[1] == 1:
        return values[:, 0].tolist()
    if not values.shape[1]:
        raise ValueError(
            f"an item has no values to reduce to a rank ({how!r}); nothing was changed. Leave it "
            "out, or choose another rank_key"
        )
    if how in ("max", "min"):
        found: torch.Tensor = getattr(values, f"a{how}")(1)
    elif how == "sum":
        found = values.sum(1)
    else:
        numbers = values if values.is_floating_point() else values.double()
        found = numbers.mean(1) if how == "mean" else numbers.median(1).values
    return found.tolist()
