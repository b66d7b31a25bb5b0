"""Rows of an ensemble's sample, what is known about each of them, as one TensorDict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from shmbuffer.replay.keys import INDEX

BUFFER_IDS = "buffer_ids"


def stack_index(buffer_ids: list[int], indices: list[torch.Tensor]) -> Any:
    """The index of a sample.

    Args:
        buffer_ids: of each row.
        indices: of each row, int64 ``[n]`` or ``[n, ndim]``.

    Returns:
        A TensorDict ``[rows]`` with ``"buffer_ids"`` and ``"index"``.
    """
    ids = torch.tensor(buffer_ids).unbind(0)
    return stack_rows([{BUFFER_IDS: at, INDEX: i} for at, i in zip(ids, indices, strict=True)])


def stack_rows(rows: list[dict[Any, torch.Tensor]]) -> Any:
    """Entries of rows as a TensorDict ``[rows]``.

    Dense where keys and shapes agree, else stacked lazily.
    """
    first = rows[0]
    if all(
        row.keys() == first.keys() and all(row[key].shape == first[key].shape for key in first)
        for row in rows[1:]
    ):
        return TensorDict(
            {key: torch.stack([row[key] for row in rows]) for key in first}, [len(rows)]
        )
    return LazyStackedTensorDict.lazy_stack([TensorDict(row) for row in rows], 0)
