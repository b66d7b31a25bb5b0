"""Stacks rows from several buffers into a sample, and divides samples and data among buffers.

rows of buffers   ──▶ stack_batches ──▶ a sample, whose index has buffer_ids [rows]
index of a sample ──▶ routes        ──▶ the items of each buffer
data to write     ──▶ route_items   ──▶ the buffer of each item
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuffer.buffers.data_path.priority_entry import one_each
from shmbuffer.items.keys import INDEX
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_batches import stack
from shmbuffer.tensors.form.tensor_nodes import is_collection, unlocked

BUFFER_IDS = "buffer_ids"


def stack_index(buffer_ids: list[int], indices: list[torch.Tensor]) -> Any:
    """Returns the index of a sample: a TensorDict ``[rows]`` with "buffer_ids" and "index".

    Args:
        buffer_ids: number of the buffer of each row.
        indices: index of the items in each row.
    """
    ids = cpu.tensor(buffer_ids).unbind(0)
    return stack_rows([{BUFFER_IDS: at, INDEX: i} for at, i in zip(ids, indices, strict=True)])


def stack_rows(rows: list[dict[Any, torch.Tensor]]) -> Any:
    """Stacks the entries of rows into a TensorDict ``[rows]``, lazily if keys or shapes differ."""
    first = rows[0]
    if all(
        row.keys() == first.keys() and all(row[key].shape == first[key].shape for key in first)
        for row in rows[1:]
    ):
        return TensorDict(
            {key: torch.stack([row[key] for row in rows]) for key in first}, [len(rows)]
        )
    return LazyStackedTensorDict.lazy_stack([TensorDict(row) for row in rows], 0)


def stack_batches(batches: list[Any]) -> Any:
    """Stacks batches along a new first dimension. TensorDicts that differ are stacked lazily."""
    if is_collection(batches[0]):
        return LazyStackedTensorDict.maybe_dense_stack(batches, 0)
    try:
        return stack(batches)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(
            f"the rows of the buffers cannot be stacked ({error}); pass a collate_fn that combines "
            "a list of rows"
        ) from error


def stack_infos(
    buffer_ids: list[int], infos: list[dict[Any, Any]], defaults: dict[str, float]
) -> Any:
    """Returns the info of a sample, a TensorDict ``[rows]``.

    Args:
        buffer_ids: number of the buffer of each row.
        infos: info of each row.
        defaults: value of each entry for the rows that lack this entry.
    """
    indices, rows = [], []
    for info in infos:
        index = info[INDEX]
        index = torch.stack(index, -1) if isinstance(index, tuple) else cpu.as_tensor(index)
        row = {key: cpu.as_tensor(value) for key, value in info.items() if key != INDEX}
        for key, value in defaults.items():
            if key not in row:
                row[key] = full_tensor((len(index),), value)
        indices.append(index)
        rows.append(row)
    return stack_rows(rows).set(INDEX, stack_index(buffer_ids, indices))


def full_tensor(shape: Sequence[int], value: float) -> torch.Tensor:
    """Returns a tensor of weights (float32) or tickets (int64), all equal to ``value``."""
    dtype = torch.int64 if isinstance(value, int) else torch.float32
    return cpu.full(tuple(shape), value, dtype=dtype)


def with_infos(data: TensorDictBase, info: TensorDictBase) -> tuple[Any, Any]:
    """Adds the entries of the info to a sample, and gives each item its buffer's number.

    Returns:
        The sample and the info. Both have the batch size ``[rows, n]``, and so has the entry
        ``"buffer_ids"`` in both.

    Raises:
        RuntimeError: a transform or a ``collate_fn`` has changed the batch size of the sample.
    """
    rows = len(info)
    items = [row.get(INDEX).get(INDEX).shape[0] for row in info.unbind(0)]
    if data.batch_dims < 2 or data.batch_size[0] != rows or data.batch_size[1] not in (-1, *items):
        raise RuntimeError(
            f"{rows} rows of {items[0]} items were sampled, but a transform or collate_fn has "
            f"changed the batch size of the sample to {list(data.batch_size)}; use "
            "sample(return_info=True, include_info=False), and take the index and the weights "
            "from the info"
        )
    stacked = (data, info, info.get(INDEX))
    if not any(isinstance(one, LazyStackedTensorDict) for one in stacked):
        return _add_info(data, info, (rows, items[0]))
    pairs = [
        _add_info(row, about, (count,))
        for row, about, count in zip(data.unbind(0), info.unbind(0), items, strict=True)
    ]
    rows_in, infos_in = zip(*pairs, strict=True)
    return stack_batches(list(rows_in)), stack_batches(list(infos_in))


def storage_index(index: torch.Tensor, storage: Any) -> Any:
    """Returns the index of a row in the form that its storage expects.

    Args:
        index: int64 ``[n]``, or ``[n, ndim]`` if the storage has several dimensions.
        storage: storage of the row's buffer.

    Returns:
        int64 ``[n]``, or a tuple of ``ndim`` such tensors.
    """
    return tuple(index.unbind(-1)) if getattr(storage, "ndim", 1) > 1 else index


class Route(NamedTuple):
    """The items of a sample that belong to one buffer."""

    at: int  # number of the buffer
    storage: Any  # storage of the buffer
    where: torch.Tensor  # index in the storage: int64 ``[n]``, or ``[n, ndim]``
    # Entries of these items: each a tensor ``[n, ...]``, one number for all items, or None.
    entries: dict[Any, Any]
    rows: torch.Tensor  # positions of the items in the flattened sample, int64 ``[n]``


def routes(
    index: Any, storage: Any, entries: dict[Any, Any], *, several: bool = False
) -> Iterator[Route]:
    """Divides the items of a sample among the buffers.

    Args:
        index: index of the sample, or a part of it.
        storage: the `StorageEnsemble`.
        entries: entries of the sample to divide. Each has the leading shape of the index, or is one
            number for all items, or None.
        several: if True, an index that has been expanded to several elements per item is reduced to
            one element per item.

    Raises:
        TypeError: the index is not a TensorDict with ``"buffer_ids"``.
        RuntimeError: an entry does not have one value, or an equal number of values, per item.
    """
    if not isinstance(index, TensorDictBase) or BUFFER_IDS not in index.keys():  # noqa: SIM118
        raise TypeError(
            f"an index of an ensemble must be a TensorDict with {BUFFER_IDS!r} and {INDEX!r}, such "
            f"as the entry {INDEX!r} of a sample, got {type(index).__name__}"
        )
    values = {
        name: None if value is None else cpu.as_tensor(value) for name, value in entries.items()
    }
    if isinstance(index, LazyStackedTensorDict):  # rows can have different shapes
        before = 0
        for at, row in enumerate(index.unbind(0)):
            mine = {name: _select_rows(value, at) for name, value in values.items()}
            here = 0
            for part in routes(row, storage, mine, several=several):
                here += len(part.rows)
                yield part._replace(rows=part.rows + before)
            before += here
        return
    ids, where = index.get(BUFFER_IDS), index.get(INDEX)
    if not where.numel():
        return
    columns = 1 if getattr(storage._members[int(ids.reshape(-1)[0])], "ndim", 1) > 1 else 0
    lead = where.shape[: where.dim() - columns]
    ids = ids.reshape(*ids.shape, *(1,) * (len(lead) - ids.dim())).expand(lead)
    while several and ids.dim() > 1 and _is_constant(ids, -1) and _is_constant(where, -1 - columns):
        ids, where = ids[..., 0], where.select(-1 - columns, 0)
    divided = {name: _flatten_entry(name, value, ids.shape) for name, value in values.items()}
    where = where.reshape(ids.numel(), *where.shape[ids.dim() :])
    ids = ids.reshape(-1)
    for at in ids.unique().tolist():
        rows = torch.nonzero(ids == at).flatten()
        parts = {name: _select_rows(value, rows) for name, value in divided.items()}
        yield Route(at, storage._members[at], where[rows], parts, rows)


def known_tickets(tickets: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the tickets of items as int64 ``[n]``, or None if a ticket is unknown.

    Args:
        tickets: tickets ``[n, ...]``, where -1 stands for an unknown ticket, or None.
    """
    if tickets is None or bool((tickets < 0).any()):
        return None
    return one_each(tickets)


def written_tickets(rb: Any, before: int, slots: torch.Tensor) -> torch.Tensor:
    """Returns the tickets of items that were just written to a buffer.

    The tickets are computed from the head of the ring before the write. They are too low if another
    process has written at the same time.

    Args:
        rb: the buffer.
        before: position of the ring's head before the write.
        slots: slots of the items, int64 ``[n]``.

    Returns:
        int64 ``[n]``. The ticket -1 means that the item was not stored.
    """
    ring = ring_of(rb._storage)
    if ring is None or not len(slots):
        return cpu.full((len(slots),), -1, dtype=torch.int64)
    tickets = before + (slots[0] - before) % ring.capacity + cpu.arange(len(slots))
    if not torch.equal(tickets % ring.capacity, slots):  # the writer chooses the slots
        return rb._writer.generations_of(slots)  # type: ignore[no-any-return]
    return tickets


def route_items(
    data: Any, count: int, key: str | tuple[str, ...] | None, dim: int | None
) -> tuple[TensorDictBase, torch.Tensor]:
    """Selects the buffer of each item in a batch.

    Args:
        data: a TensorDict.
        count: number of buffers.
        key: key of the entry that contains buffer numbers, or None.
        dim: dimension with one entry per buffer, or None to use ``key``.

    Returns:
        The flattened items ``[n]``, and the buffer number of each item, int64 ``[n]``.
    """
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            "data that an ensemble divides among its buffers must be a TensorDict, got "
            f"{type(data).__name__}; write other data to one of the buffers with "
            "ensemble[i].extend(data)"
        )
    # In tensordict 0.12, reshape(-1) fails for a batch without items.
    items = data.reshape(data.batch_size.numel())
    if dim is not None:
        if not -data.batch_dims <= dim < data.batch_dims or data.batch_size[dim] != count:
            raise ValueError(
                f"routing_dim={dim} must be a dimension with one entry for each of the {count} "
                f"buffers, got data with batch size {list(data.batch_size)}"
            )
        shape = [1] * data.batch_dims
        shape[dim] = count
        numbers = cpu.arange(count).reshape(shape).expand(data.batch_size)
        return items, numbers.reshape(-1)
    numbers = data.get(key, None)
    if numbers is None:
        raise KeyError(
            f"the data have no entry {key!r}, which is the routing_key that selects the buffer of "
            f"each item; they have {sorted(map(str, data.keys(True, True)))}"
        )
    if numbers.dtype is torch.bool or numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(f"buffer numbers must be integers, got {numbers.dtype} in {key!r}")
    numbers = numbers.detach().cpu().long().reshape(-1)
    if len(numbers) != len(items):
        raise ValueError(
            f"the entry {key!r} must have one buffer number per item, got {len(numbers)} numbers "
            f"for {len(items)} items"
        )
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise ValueError(
            f"buffer numbers in {key!r} must be between 0 and {count - 1}, got {int(wrong[0])}"
        )
    return items, numbers


def _add_info(data: Any, info: Any, lead: tuple[int, ...]) -> tuple[Any, Any]:
    """Expands the info to the batch size ``lead``, and adds its entries to the sample.

    Returns:
        The sample and the info.
    """
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
        data.pop(INDEX, None)  # replaces an index of any type
        for key, value in about.items(True, True):
            tail = value.shape[dims:]
            if item and tail[: len(item)] != item:
                value = value.reshape(*lead, *(1,) * len(item), *tail).expand(*lead, *item, *tail)
            data.set(key, value if data.device is None else value.to(data.device))
    return data, about


def _select_rows(value: torch.Tensor | None, rows: Any) -> torch.Tensor | None:
    """Selects rows of a value. One number for all rows, or None, is returned unchanged."""
    return value if value is None or value.dim() == 0 else value[rows]


def _is_constant(numbers: torch.Tensor, dim: int) -> bool:
    """True if the numbers do not change along a dimension."""
    return bool((numbers == numbers.narrow(dim, 0, 1)).all())


def _flatten_entry(
    name: object, value: torch.Tensor | None, lead: torch.Size
) -> torch.Tensor | None:
    """Flattens the leading shape of an entry, so that it has one row per item.

    Args:
        name: key of the entry, for the message.
        value: the entry, one number for all items, or None.
        lead: leading shape of the items.

    Returns:
        ``[items, ...]``, one number for all items, or None.
    """
    count = lead.numel()
    if value is None or value.dim() == 0:
        return value
    if value.shape[: len(lead)] == lead:
        return value.reshape(count, *value.shape[len(lead) :])
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() % count or not value.numel():
        raise RuntimeError(
            f"{name} must have one number, or one number per item, got {value.numel()} numbers for "
            f"{count} items"
        )
    return value.reshape(count, -1)
