"""Samples that are consumed: items are leased and then acknowledged.

sample(lease=60.0) ──▶ items, with their lease ──▶ train ──▶ ack(batch)
sample()           ──▶ items, acknowledged before they are returned
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.items.keys import GENERATION, INDEX, LEASE
from shmbuffer.memory.format.ledger import Acknowledged
from shmbuffer.memory.system.deadline import nanoseconds
from shmbuffer.samplers.taking import Consumes, consumes
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.deferred import is_as_made, to_come

_KEYS = INDEX, GENERATION, LEASE
_BYTES = 8  # of each entry


def consumer_of(sampler: Any) -> Consumes:
    """Returns the sampler if it has a consumer; TypeError for others."""
    if consumes(sampler):
        return sampler
    raise TypeError(
        f"nothing can be acknowledged, because the sampler is a {type(sampler).__name__}; give the "
        "buffer a ConsumingSampler or consume_after_n_samples, or give its sampler a consumer"
    )


def delivering(
    sampler: Any, lease: float | None, draw: Callable[..., Batch]
) -> Callable[[int], Batch]:
    """Returns a function that samples and passes on `Taking` if the sampler has a consumer."""
    if not consumes(sampler):
        if lease is not None:
            consumer_of(sampler)  # raises the error
        return draw
    if lease is not None:
        nanoseconds(lease)  # raises ValueError before any item is claimed
    return partial(_delivered, sampler, lease, draw)


def _delivered(
    consumer: Consumes, lease: float | None, draw: Callable[..., Batch], count: int
) -> Batch:
    with consumer.taking(lease) as taking:
        batch = draw(count, taking)
        if lease is None:
            taking.acknowledge()
    return batch


def acknowledge(sampler: Any, storage: Storage, batch: Any) -> Acknowledged:
    """Acknowledges items; `ReplayBuffer.ack` describes the arguments."""
    consumer = consumer_of(sampler)
    if (rows := _as_they_are(batch)) is not None:
        return consumer.ack_rows(storage, rows)
    rows = [_first_of_item(batch, key) for key in _KEYS]
    index, tickets, leases = (row.detach().cpu().numpy() for row in rows)
    return consumer.ack(storage, leases, index, tickets)


def held_items(sampler: Any, storage: Storage) -> dict[str, torch.Tensor]:
    """Returns the items under a lease, as `ReplayBuffer.leased` describes them."""
    held = consumer_of(sampler).opened(storage).held_items()
    found = (torch.from_numpy(one.astype("int64")) for one in held)
    return dict(zip(_KEYS, found, strict=True))


def _as_they_are(batch: Any) -> list[torch.Tensor] | None:
    """Returns the entries of a sample if the core can read them in place, otherwise None."""
    entries: Any = None
    if type(batch) is TensorDict:
        entries = batch._tensordict
    elif isinstance(batch, LazyStackedTensorDict):
        entries = to_come(batch) or _next_to_each_other(batch)
    if entries is None:
        return None
    rows: list[Any] = [entries.get(key) for key in _KEYS]
    for row in rows:
        if type(row) is not torch.Tensor or row.dtype is not torch.int64 or row.dim() != 1:
            return None
        if not row.is_cpu or not row.is_contiguous() or row.numel() != rows[0].numel():
            return None
    return rows


def _next_to_each_other(stack: LazyStackedTensorDict) -> dict[str, torch.Tensor] | None:
    """Returns the entries of a stack whose items are consecutive rows of a sample, else None."""
    items = stack.tensordicts
    if not items or any(type(item) is not TensorDict for item in (items[0], items[-1])):
        return None
    found, count = {}, len(items)
    for key in _KEYS:
        first, last = (one._tensordict.get(key) for one in (items[0], items[-1]))
        if not all(type(one) is torch.Tensor and not one.dim() for one in (first, last)):
            return None
        if last.data_ptr() - first.data_ptr() != _BYTES * (count - 1):
            return None
        found[key] = first.as_strided((count,), (1,), first.storage_offset())
    # Then the items between are consecutive too, and checking them would take as long.
    if is_as_made(stack):
        return found
    begin = found[INDEX].data_ptr()
    try:  # an entry that the row of one item has exists in the rows of all items
        places = [item._tensordict[INDEX].data_ptr() for item in items]
    except (KeyError, AttributeError):
        return None
    return found if places == list(range(begin, begin + _BYTES * count, _BYTES)) else None


def _first_of_item(batch: Any, key: str) -> torch.Tensor:
    """Returns the first row of each item, for items with dimensions."""
    try:
        found = batch[key]
    except (KeyError, TypeError, IndexError):
        raise KeyError(
            f"ack: there is no entry {key!r}; pass a batch of sample(lease=...), or the info of "
            "sample(lease=..., return_info=True)"
        ) from None
    rows = cpu.as_tensor(found)
    if rows.ndim < 2:
        return rows.reshape(-1)
    return rows.reshape(len(rows), -1)[:, 0]
