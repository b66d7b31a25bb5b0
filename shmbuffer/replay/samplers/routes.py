"""Which items of an ensemble's sample are from which of its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from shmbuffer.replay.keys import INDEX
from shmbuffer.replay.samplers.rows import BUFFER_IDS


class Route(NamedTuple):
    """The part of a sample that is from one buffer."""

    at: int
    """Which buffer."""
    storage: Any
    """Its storage."""
    where: torch.Tensor
    """Index in there: int64 ``[n]``, or ``[n, ndim]`` where there are lanes."""
    entries: dict[Any, Any]
    """What belongs to these items: tensors ``[n, ...]``, or a number for all, or None."""
    rows: torch.Tensor
    """Which items of the sample they are, int64 ``[n]``: positions in the flat sample."""


def routes(
    index: Any, storage: Any, entries: dict[Any, Any], *, several: bool = False
) -> Iterator[Route]:
    """Divide what belongs to a sample among its buffers.

    Args:
        index: the entry ``"index"`` of a sample or of its info: ``"buffer_ids"`` ``[rows]`` or
            ``[rows, n]``, and ``"index"`` ``[rows, n]`` (``[rows, n, ndim]``); or a part of it.
        storage: the `StorageEnsemble`.
        entries: tensors with the shape of the items in front, a number for all, or None.
        several: an item may stand several times in a row, once for each step of a trajectory; the
            entries of all of them are the item's.

    Raises:
        TypeError: another kind of index.
        RuntimeError: an entry cannot be divided among the items.
    """
    if not isinstance(index, TensorDictBase) or BUFFER_IDS not in index.keys():  # noqa: SIM118
        raise TypeError(
            f"an index of an ensemble is a TensorDict with {BUFFER_IDS!r} and {INDEX!r}, as a "
            f"sample has it under {INDEX!r}; got {type(index).__name__}"
        )
    values = {name: _as_tensor(value) for name, value in entries.items()}
    if isinstance(index, LazyStackedTensorDict):  # rows need not have one shape
        before = 0
        for at, row in enumerate(index.unbind(0)):
            mine = {name: _row(value, at) for name, value in values.items()}
            here = 0
            for part in routes(row, storage, mine, several=several):
                here += len(part.rows)
                yield part._replace(rows=part.rows + before)
            before += here
        return
    ids, where = index.get(BUFFER_IDS), index.get(INDEX)
    if not where.numel():
        return
    columns = 1 if getattr(storage._storages[int(ids.reshape(-1)[0])], "ndim", 1) > 1 else 0
    lead = where.shape[: where.dim() - columns]
    ids = ids.reshape(*ids.shape, *(1,) * (len(lead) - ids.dim())).expand(lead)
    while several and ids.dim() > 1 and _is_constant(ids, -1) and _is_constant(where, -1 - columns):
        ids, where = ids[..., 0], where.select(-1 - columns, 0)
    divided = {name: _divided(name, value, ids.shape) for name, value in values.items()}
    where = where.reshape(ids.numel(), *where.shape[ids.dim() :])
    ids = ids.reshape(-1)
    for at in ids.unique().tolist():
        rows = torch.nonzero(ids == at).flatten()
        parts = {
            name: value if value is None or value.dim() == 0 else value[rows.to(value.device)]
            for name, value in divided.items()
        }
        yield Route(at, storage._storages[at], where[rows], parts, rows)


def known_tickets(tickets: torch.Tensor | None) -> torch.Tensor | None:
    """Tickets int64 ``[n]`` of items ``[n, ...]``; None where they are not known (-1)."""
    if tickets is None or bool((tickets < 0).any()):
        return None
    while tickets.dim() > 1:  # the same one for each step of a trajectory
        tickets = tickets[..., 0]
    return tickets


def _as_tensor(value: Any) -> torch.Tensor | None:
    return value if value is None or isinstance(value, torch.Tensor) else torch.as_tensor(value)


def _row(value: torch.Tensor | None, at: int) -> torch.Tensor | None:
    return value if value is None or value.dim() == 0 else value[at]


def _is_constant(numbers: torch.Tensor, dim: int) -> bool:
    return bool((numbers == numbers.narrow(dim, 0, 1)).all())


def _divided(name: object, value: torch.Tensor | None, lead: torch.Size) -> torch.Tensor | None:
    """``[items, ...]``; a single number stays one."""
    count = lead.numel()
    if value is None or value.dim() == 0:
        return value
    if value.shape[: len(lead)] == lead:
        return value.reshape(count, *value.shape[len(lead) :])
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() % count or not value.numel():
        raise RuntimeError(f"{value.numel()} numbers ({name}) cannot be divided by {count} items")
    return value.reshape(count, -1)
