"""Functions and constants of TorchRL's API that do not need a buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.pinned import pin

__all__ = [
    "DEFAULT_DONE_KEYS",
    "find_start_stop_traj",
    "pin_memory_output",
    "tree_iter",
    "unravel_index",
]

DEFAULT_DONE_KEYS = ("done", "truncated", "terminated")
"""Flags with which TorchRL's environments end a trajectory."""


def find_start_stop_traj(
    *,
    trajectory: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    at_capacity: bool,
    cursor: int | torch.Tensor | range | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the first and last step of each trajectory in the rows of a storage.

    The function treats the rows as one sequence, regardless of collectors and streams.
    `SliceSampler` takes these into account, because it reads them from the storage.

    Args:
        trajectory: trajectory IDs ``[T, *B]``. A trajectory ends where the ID changes.
        end: bool ``[T, *B]``, True at the last step of each trajectory. Pass exactly one of
            ``trajectory`` and ``end``.
        at_capacity: True if the ring is full, so that row 0 follows the last row, unless a
            trajectory ends there. If False, the last row ends a trajectory.
        cursor: for a full ring, the row that was written last, which ends a trajectory. If several
            rows are passed, the last one is used.
        device: device for the computation. If None, uses the device of the rows.

    Returns:
        First and last step of each trajectory, both int64 ``[N, 1 + len(B)]`` with the time in the
        first column, and the lengths ``[N]``. If the start is greater than the stop, the trajectory
        crosses the end of the ring.

    Raises:
        TypeError: neither or both of ``trajectory`` and ``end`` were passed.
        RuntimeError: there are no rows, or ``cursor`` is not a row.

    Example:
        >>> import torch
        >>> from shmbuffer import find_start_stop_traj
        >>> ids = torch.tensor([5, 5, 7, 7, 7, 5])
        >>> start, stop, lengths = find_start_stop_traj(
        ...     trajectory=ids, at_capacity=True
        ... )
        >>> start.flatten().tolist(), stop.flatten().tolist(), lengths.tolist()
        ([5, 2], [1, 4], [3, 3])

    Source: ``torchrl.data.find_start_stop_traj``.
    """
    rows = end if trajectory is None else trajectory
    if rows is None or (end is not None and trajectory is not None):
        raise TypeError("find_start_stop_traj: pass either trajectory or end")
    if not rows.dim() or not len(rows):
        raise RuntimeError(
            "find_start_stop_traj: trajectory or end must have at least one row, but its shape is "
            f"{list(rows.shape)}"
        )
    there, rows = rows.device, rows.to(device)
    last = rows.bool().clone() if trajectory is None else rows != rows.roll(-1, 0)
    if not at_capacity:
        last[-1] = True
    elif cursor is not None:
        last[_row(cursor)] = True
    last[-1] |= ~last.any(0)  # a column without an end becomes one trajectory
    stop = last.transpose(0, -1).nonzero()  # makes the steps of a column consecutive
    ends, count = stop[:, -1].clone(), len(stop)
    first = torch.ones(count, dtype=torch.bool, device=stop.device)
    first[1:] = (stop[1:, :-1] != stop[:-1, :-1]).any(-1)
    heads = first.nonzero().flatten()
    before = torch.arange(-1, count - 1, device=stop.device)
    before[heads] = torch.cat((heads[1:], heads.new_tensor([count])))[: len(heads)] - 1
    stop[:, -1] = stop[:, 0].clone()
    stop[:, 0] = ends
    start = stop.clone()
    start[:, 0] = (ends[before] + 1) % len(rows)
    lengths = (ends - start[:, 0]) % len(rows) + 1
    return start.to(there), stop.to(there), lengths.to(there)


def _row(cursor: Any) -> int:
    """Returns the row that was written last, from the argument ``cursor``."""
    try:
        return int(cursor if isinstance(cursor, int) else cpu.as_tensor(cursor).reshape(-1)[-1])
    except (IndexError, TypeError, ValueError) as error:
        raise RuntimeError(
            "find_start_stop_traj: cursor must be a row, or several rows of which the last is "
            f"used; got {cursor!r}"
        ) from error


def pin_memory_output(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method so that it returns pinned memory if ``self._pin_memory`` is True.

    Args:
        fun: the method to decorate.

    Source: ``torchrl.data.replay_buffers.utils.pin_memory_output``.
    """

    @functools.wraps(fun)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = fun(self, *args, **kwargs)
        return pin(output) if self._pin_memory else output

    return method


def tree_iter(pytree: Any) -> Iterator[Any]:
    """Yields the leaves of a PyTree in order.

    Source: ``torchrl.data.replay_buffers.utils.tree_iter``.
    """
    return iter(_pytree.tree_iter(pytree))


def unravel_index(indices: torch.Tensor, shape: Any) -> tuple[torch.Tensor, ...]:
    """Returns the coordinates of flat indices, one tensor per dimension of ``shape``.

    Source: ``torchrl.data.replay_buffers.utils.unravel_index``.
    """
    return torch.unravel_index(indices, shape)
