"""Rows that come from several buffers, as one sample."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuffer.replay.form.batches import stack
from shmbuffer.replay.form.nodes import is_collection, unlocked
from shmbuffer.replay.keys import INDEX
from shmbuffer.replay.samplers.rows import BUFFER_IDS, stack_index, stack_rows


def stack_batches(batches: list[Any]) -> Any:
    """Batches of one form with a dimension in front.

    TensorDicts that differ in keys or shapes are stacked lazily.

    Raises:
        RuntimeError: tensors that differ in shape.
    """
    if is_collection(batches[0]):
        return LazyStackedTensorDict.maybe_dense_stack(batches, 0)
    try:
        return stack(batches)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(
            f"what the buffers gave cannot be stacked ({error}); give the ensemble a collate_fn, "
            "which is called with the list of them"
        ) from error


def stack_infos(
    buffer_ids: list[int], infos: list[dict[Any, Any]], fillings: dict[str, float]
) -> Any:
    """What is known about each row, as one TensorDict ``[rows]``.

    Args:
        buffer_ids: of each row.
        infos: of each row: ``"index"`` ``[n]``, and more with ``n`` in front.
        fillings: what a row has ``n`` times that lacks such an entry.
    """
    indices, rows = [], []
    for info in infos:
        index = info[INDEX]
        index = torch.stack(index, -1) if isinstance(index, tuple) else torch.as_tensor(index)
        row = {key: torch.as_tensor(value) for key, value in info.items() if key != INDEX}
        for key, value in fillings.items():
            if key not in row:
                row[key] = torch.full((len(index),), value)
        indices.append(index)
        rows.append(row)
    return stack_rows(rows).set(INDEX, stack_index(buffer_ids, indices))


def with_infos(data: TensorDictBase, info: TensorDictBase) -> tuple[Any, Any]:
    """A sample with what is known about it among its entries.

    Args:
        data: ``[rows, n, ...]``.
        info: ``[rows]``, from `stack_infos`.

    Returns:
        Both, with ``buffer_ids`` for each item.

    Raises:
        RuntimeError: the sample has another batch size than was drawn.
    """
    rows = len(info)
    items = [row.get(INDEX).get(INDEX).shape[0] for row in info.unbind(0)]
    if data.batch_dims < 2 or data.batch_size[0] != rows or data.batch_size[1] not in (-1, *items):
        raise RuntimeError(
            f"{rows} rows of {items[0]} items were drawn, but the sample has batch size "
            f"{list(data.batch_size)}: a transform or collate_fn has changed it; take index and "
            "weights from sample(return_info=True, include_info=False)"
        )
    if not isinstance(data, LazyStackedTensorDict) and _is_dense(info):
        return _merged(data, info, (rows, items[0]))
    pairs = [
        _merged(row, about, (count,))
        for row, about, count in zip(data.unbind(0), info.unbind(0), items, strict=True)
    ]
    rows_in, infos_in = zip(*pairs, strict=True)
    return stack_batches(list(rows_in)), stack_batches(list(infos_in))


def _is_dense(data: Any) -> bool:
    if isinstance(data, LazyStackedTensorDict):
        return False
    return all(_is_dense(value) for value in data.values() if isinstance(value, TensorDictBase))


def _merged(data: Any, info: Any, lead: tuple[int, ...]) -> tuple[Any, Any]:
    """``info`` with the batch size ``lead``, and ``data`` with its entries."""
    index = info.get(INDEX)
    ids = index.get(BUFFER_IDS)
    ids = ids.reshape(*ids.shape, *(1,) * (len(lead) - ids.dim())).expand(lead)
    index = TensorDict({BUFFER_IDS: ids.clone(), INDEX: index.get(INDEX)}, lead)
    about = TensorDict({INDEX: index}, lead)
    for key, value in info.items(True, True):
        if key != INDEX and key[0] != INDEX:
            about.set(key, value)
    dims = len(lead)
    item = tuple(data.batch_size[dims:])
    with unlocked(data):
        data.pop(INDEX, None)  # of whatever the items were before
        for key, value in about.items(True, True):
            tail = value.shape[dims:]
            if item and tail[: len(item)] != item:
                value = value.reshape(*lead, *(1,) * len(item), *tail).expand(*lead, *item, *tail)
            data.set(key, value if data.device is None else value.to(data.device))
    return data, about
