"""Combines the rows of an ensemble's sample into one TensorDict, and divides them again.

rows of buffers  ──▶ stacked  ──▶ a sample with its index: buffer_ids [rows], index [rows, n]
such an index    ──▶ routes   ──▶ the items of each buffer
data to write    ──▶ routed   ──▶ the buffer of each item
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
    """Makes the index of a sample: a TensorDict ``[rows]`` of ``"buffer_ids"`` and ``"index"``."""
    ids = cpu.tensor(buffer_ids).unbind(0)
    return stack_rows([{BUFFER_IDS: at, INDEX: i} for at, i in zip(ids, indices, strict=True)])


def stack_rows(rows: list[dict[Any, torch.Tensor]]) -> Any:
    """Stacks entries of rows to a TensorDict ``[rows]``, lazily if keys or shapes differ."""
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
    """Stacks batches along a new first dimension, lazily if their forms differ."""
    if is_collection(batches[0]):
        return LazyStackedTensorDict.maybe_dense_stack(batches, 0)
    try:
        return stack(batches)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(
            f"the rows of the buffers cannot be stacked ({error}); pass a collate_fn, which is "
            "called with the list of rows"
        ) from error


def stack_infos(
    buffer_ids: list[int], infos: list[dict[Any, Any]], fillings: dict[str, float]
) -> Any:
    """Returns the info of all rows as one TensorDict ``[rows]``."""
    indices, rows = [], []
    for info in infos:
        index = info[INDEX]
        index = torch.stack(index, -1) if isinstance(index, tuple) else cpu.as_tensor(index)
        row = {key: cpu.as_tensor(value) for key, value in info.items() if key != INDEX}
        for key, value in fillings.items():
            if key not in row:
                row[key] = filled((len(index),), value)
        indices.append(index)
        rows.append(row)
    return stack_rows(rows).set(INDEX, stack_index(buffer_ids, indices))


def filled(shape: Sequence[int], value: float) -> torch.Tensor:
    """Returns a tensor of weights (float32) or tickets (int64), all equal to ``value``."""
    dtype = torch.int64 if isinstance(value, int) else torch.float32
    return cpu.full(tuple(shape), value, dtype=dtype)


def with_infos(data: TensorDictBase, info: TensorDictBase) -> tuple[Any, Any]:
    """Adds the infos to the entries of a sample, and ``buffer_ids`` per item to both."""
    rows = len(info)
    items = [row.get(INDEX).get(INDEX).shape[0] for row in info.unbind(0)]
    if data.batch_dims < 2 or data.batch_size[0] != rows or data.batch_size[1] not in (-1, *items):
        raise RuntimeError(
            f"{rows} rows of {items[0]} items were sampled, but the sample has batch size "
            f"{list(data.batch_size)}, because a transform or collate_fn has changed it; take "
            "index and weights from sample(return_info=True, include_info=False)"
        )
    stacked = (data, info, info.get(INDEX))
    if not any(isinstance(one, LazyStackedTensorDict) for one in stacked):
        return _merged(data, info, (rows, items[0]))
    pairs = [
        _merged(row, about, (count,))
        for row, about, count in zip(data.unbind(0), info.unbind(0), items, strict=True)
    ]
    rows_in, infos_in = zip(*pairs, strict=True)
    return stack_batches(list(rows_in)), stack_batches(list(infos_in))


def local(index: torch.Tensor, storage: Any) -> Any:
    """Returns the index of a row for its storage: int64 ``[n]``, or a tuple of ``ndim`` of them."""
    return tuple(index.unbind(-1)) if getattr(storage, "ndim", 1) > 1 else index


class Route(NamedTuple):
    """The part of a sample that belongs to one buffer."""

    at: int  # number of the buffer
    storage: Any
    where: torch.Tensor  # index in the storage: int64 ``[n]``, or ``[n, ndim]`` with lanes
    # Entries of these items: tensors ``[n, ...]``, one number for all, or None.
    entries: dict[Any, Any]
    rows: torch.Tensor  # positions in the flat sample, int64 ``[n]``


def routes(
    index: Any, storage: Any, entries: dict[Any, Any], *, several: bool = False
) -> Iterator[Route]:
    """Divides the entries of a sample among its buffers."""
    if not isinstance(index, TensorDictBase) or BUFFER_IDS not in index.keys():  # noqa: SIM118
        raise TypeError(
            f"an index of an ensemble must be a TensorDict with {BUFFER_IDS!r} and {INDEX!r}, like "
            f"the entry {INDEX!r} of a sample; got {type(index).__name__}"
        )
    values = {
        name: None if value is None else cpu.as_tensor(value) for name, value in entries.items()
    }
    if isinstance(index, LazyStackedTensorDict):  # rows can have different shapes
        before = 0
        for at, row in enumerate(index.unbind(0)):
            mine = {name: _of(value, at) for name, value in values.items()}
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
    divided = {name: _divided(name, value, ids.shape) for name, value in values.items()}
    where = where.reshape(ids.numel(), *where.shape[ids.dim() :])
    ids = ids.reshape(-1)
    for at in ids.unique().tolist():
        rows = torch.nonzero(ids == at).flatten()
        parts = {name: _of(value, rows) for name, value in divided.items()}
        yield Route(at, storage._members[at], where[rows], parts, rows)


def known_tickets(tickets: torch.Tensor | None) -> torch.Tensor | None:
    """Returns tickets int64 ``[n]`` of items ``[n, ...]``; None if one is unknown (-1)."""
    if tickets is None or bool((tickets < 0).any()):
        return None
    return one_each(tickets)


def written_tickets(rb: Any, before: int, slots: torch.Tensor) -> torch.Tensor:
    """Returns tickets of a write, derived from the position of the ring's head before it.

    A ticket of -1 stands for no item. The tickets are too low if other processes wrote, too.
    """
    ring = ring_of(rb._storage)
    if ring is None or not len(slots):
        return cpu.full((len(slots),), -1, dtype=torch.int64)
    tickets = before + (slots[0] - before) % ring.capacity + cpu.arange(len(slots))
    if not torch.equal(tickets % ring.capacity, slots):  # the writer chooses the slots
        return rb._writer.generations_of(slots)  # type: ignore[no-any-return]
    return tickets


def routed(
    data: Any, count: int, key: str | tuple[str, ...] | None, dim: int | None
) -> tuple[TensorDictBase, torch.Tensor]:
    """Returns the flattened items of a batch, ``[n]``, and the buffer number of each item."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"only TensorDicts can be divided among the buffers, got {type(data).__name__}; write "
            "to one of the buffers with ensemble[i].extend(data)"
        )
    # tensordict 0.12 cannot infer the size of a dimension that has no items.
    items = data.reshape(data.batch_size.numel())
    if dim is not None:
        if not -data.batch_dims <= dim < data.batch_dims or data.batch_size[dim] != count:
            raise ValueError(
                f"routing_dim={dim} must have one entry for each of the {count} buffers, but the "
                f"data have batch size {list(data.batch_size)}"
            )
        shape = [1] * data.batch_dims
        shape[dim] = count
        numbers = cpu.arange(count).reshape(shape).expand(data.batch_size)
        return items, numbers.reshape(-1)
    numbers = data.get(key, None)
    if numbers is None:
        raise KeyError(
            f"the routing_key {key!r}, which selects the buffer of each item, is not an entry of "
            f"the data, which have {sorted(map(str, data.keys(True, True)))}"
        )
    if numbers.dtype is torch.bool or numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(f"buffers are selected by integers, got {numbers.dtype} in {key!r}")
    numbers = numbers.detach().cpu().long().reshape(-1)
    if len(numbers) != len(items):
        raise ValueError(f"{key!r} has {len(numbers)} buffer numbers for {len(items)} items")
    wrong = numbers[(numbers < 0) | (numbers >= count)]
    if len(wrong):
        raise ValueError(f"{key!r} contains buffer {int(wrong[0])}, but this ensemble has {count}")
    return items, numbers


def _merged(data: Any, info: Any, lead: tuple[int, ...]) -> tuple[Any, Any]:
    """Expands ``info`` to the batch size ``lead`` and adds its entries to ``data``."""
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
        data.pop(INDEX, None)  # the previous index of the items, of any form
        for key, value in about.items(True, True):
            tail = value.shape[dims:]
            if item and tail[: len(item)] != item:
                value = value.reshape(*lead, *(1,) * len(item), *tail).expand(*lead, *item, *tail)
            data.set(key, value if data.device is None else value.to(data.device))
    return data, about


def _of(value: torch.Tensor | None, rows: Any) -> torch.Tensor | None:
    """Returns the entries of the given rows; a single number applies to all rows."""
    return value if value is None or value.dim() == 0 else value[rows]


def _is_constant(numbers: torch.Tensor, dim: int) -> bool:
    return bool((numbers == numbers.narrow(dim, 0, 1)).all())


def _divided(name: object, value: torch.Tensor | None, lead: torch.Size) -> torch.Tensor | None:
    """Reshapes entries to ``[items, ...]``; a single number stays a single number."""
    count = lead.numel()
    if value is None or value.dim() == 0:
        return value
    if value.shape[: len(lead)] == lead:
        return value.reshape(count, *value.shape[len(lead) :])
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() % count or not value.numel():
        raise RuntimeError(f"got {value.numel()} numbers ({name}) for {count} items")
    return value.reshape(count, -1)
