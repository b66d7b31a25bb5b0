"""Copies a data set into a buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.datasets.loading import opened
from shmbuffer.tensors.form.tensor_nodes import is_collection


def prefill_replay_buffer(
    rb: Any,
    dataset: str | os.PathLike[str] | Any,
    n_samples: int | None = None,
    chunk_size: int = 1000,
) -> Any:
    """Copies the items of a data set into a buffer, in order.

    Args:
        rb: buffer to fill. If it is smaller than the data set, it keeps the last items.
        dataset: a buffer of this package or of TorchRL, a directory, or a name, as for
            `OfflineToOnlineReplayBuffer`.
        n_samples: number of items to copy, starting with the first. If None, copies all items.
        chunk_size: number of items per write.

    Returns:
        The buffer ``rb``.

    Raises:
        ValueError: ``chunk_size`` is less than 1.
        SchemaMismatchError: the items do not match the schema of ``rb``. Items that were already
            copied remain in the buffer.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, ReplayBuffer
        >>> from shmbuffer import prefill_replay_buffer
        >>> data = ReplayBuffer(storage=LazyTensorStorage(5))
        >>> index = data.extend(torch.arange(5))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> prefill_replay_buffer(rb, data, n_samples=4)[:]
        tensor([0, 1, 2, 3])

    Source: ``torchrl.data.prefill_replay_buffer``.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if isinstance(dataset, (str, os.PathLike)):
        dataset = opened(dataset, chunk_size, {})
    left = len(dataset) if n_samples is None else min(n_samples, len(dataset))
    for chunk in _chunks(dataset, chunk_size):
        if left <= 0:
            break
        leaves = tree_leaves(chunk, is_leaf=is_collection)
        rb.extend(_first(left, chunk) if len(leaves[0]) > left else chunk)
        left -= len(leaves[0])
    return rb


def _first(count: int, chunk: Any) -> Any:
    return tree_map(lambda leaf: leaf[:count], chunk, is_leaf=is_collection)


def _chunks(dataset: Any, size: int) -> Iterator[Any]:
    """Yields the items of a data set in order, in batches ``[n, ...]``."""
    if not isinstance(dataset, ReplayBuffer):  # a buffer of TorchRL
        yield from (dataset[start : start + size] for start in range(0, len(dataset), size))
        return
    last = dataset._storage.ndim - 1
    for chunk in dataset.iter_in_order(size):
        yield (
            tree_map(lambda leaf: leaf.flatten(0, last), chunk, is_leaf=is_collection)
            if last
            else chunk
        )
