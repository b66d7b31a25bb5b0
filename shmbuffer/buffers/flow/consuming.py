"""Leases items to the learners of a consumer, and acknowledges them.

sample(lease=60.0) ──▶ items under a lease ──▶ train ──▶ ack(batch)
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
from shmbuffer.tensors.form.deferred import has_created_items, pending_entries

_KEYS = INDEX, GENERATION, LEASE
_BYTES = 8  # size of a number in these entries


def consumer_of(sampler: Any) -> Consumes:
    """Returns the sampler if it has a consumer.

    Raises TypeError for any other sampler.
    """
    if consumes(sampler):
        return sampler
    raise TypeError(
        f"nothing can be acknowledged, because the sampler is a {type(sampler).__name__} without a "
        "consumer; create the buffer with a ConsumingSampler, with consume_after_n_samples, or "
        "with a sampler that has a consumer"
    )


def delivering(
    sampler: Any, lease: float | None, draw: Callable[..., Batch]
) -> Callable[[int], Batch]:
    """Returns a function that samples a batch, and claims its items if there is a consumer.

    Args:
        sampler: the sampler.
        lease: seconds until the lease of the items expires. With None, the items are acknowledged
            immediately.
        draw: function that samples a batch. If the sampler has a consumer, it also receives the
            `Taking` that records the claimed items.

    Raises:
        TypeError: ``lease`` was passed, but the sampler has no consumer.
        ValueError: ``lease`` is not a valid number of seconds.
    """
    if not consumes(sampler):
        if lease is not None:
            consumer_of(sampler)  # raises TypeError
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
    """Acknowledges the items of a batch; `ReplayBuffer.ack` describes the arguments."""
    consumer = consumer_of(sampler)
    if (rows := _as_they_are(batch)) is not None:
        return consumer.ack_rows(storage, rows)
    rows = [_first_of_item(batch, key) for key in _KEYS]
    index, tickets, leases = (row.detach().cpu().numpy() for row in rows)
    return consumer.ack(storage, leases, index, tickets)


def held_items(sampler: Any, storage: Storage) -> dict[str, torch.Tensor]:
    """Returns the items that this handle has leased; see `ReplayBuffer.leased`."""
    held = consumer_of(sampler).opened(storage).held_items()
    found = (torch.from_numpy(one.astype("int64")) for one in held)
    return dict(zip(_KEYS, found, strict=True))


def _as_they_are(batch: Any) -> list[torch.Tensor] | None:
    """Returns index, tickets and leases of a batch if the core can read them in place.

    Returns None if they must be converted first.
    """
    entries: Any = None
    if type(batch) is TensorDict:
        entries = batch._tensordict
    elif isinstance(batch, LazyStackedTensorDict):
        entries = pending_entries(batch) or _next_to_each_other(batch)
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
    """Returns index, tickets and leases of a stack whose items are consecutive rows of a sample.

    Returns None for any other stack.
    """
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
    # If the stack is unchanged, the rows between the first and the last are also consecutive.
    # Checking them would take as long as copying them.
    if has_created_items(stack):
        return found
    begin = found[INDEX].data_ptr()
    try:  # the index stands for all three entries, because a row has all of them or none
        places = [item._tensordict[INDEX].data_ptr() for item in items]
    except (KeyError, AttributeError):
        return None
    return found if places == list(range(begin, begin + _BYTES * count, _BYTES)) else None


def _first_of_item(batch: Any, key: str) -> torch.Tensor:
    """Returns an entry of a batch with one number per item, ``[n]``.

    If items have their own dimensions, the entry was expanded to them, and the first number of each
    item is returned. Raises KeyError if the batch has no such entry.
    """
    try:
        found = batch[key]
    except (KeyError, TypeError, IndexError):
        raise KeyError(
            f"ack: the batch has no entry {key!r}; pass a batch from sample(lease=...), or the "
            "info from sample(lease=..., return_info=True)"
        ) from None
    rows = cpu.as_tensor(found)
    if rows.ndim < 2:
        return rows.reshape(-1)
    return rows.reshape(len(rows), -1)[:, 0]
