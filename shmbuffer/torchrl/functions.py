"""TorchRL's functions and constants that need no buffer."""

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
"""Flags that an environment of TorchRL's ends a trajectory with."""


def find_start_stop_traj(
    *,
    trajectory: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    at_capacity: bool,
    cursor: int | torch.Tensor | range | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where trajectories begin and end in the rows of a storage.

    It knows neither collectors nor streams: what is stored is one sequence. `SliceSampler` does,
    and asks the storage.

    Args:
        trajectory: ids ``[T, *B]``: a trajectory ends where the id changes.
        end: bool ``[T, *B]``, True at the last step. Exactly one of the two.
        at_capacity: the rows are a full circle: row 0 follows the last one, unless it ends there.
            Else the last row is an end.
        cursor: of a full circle the row that was written last (of several the last one): an end.
        device: where to compute; None: where the rows are.

    Returns:
        First and last step of each trajectory, int64 ``[N, 1 + len(B)]`` with the time in front,
        and their lengths ``[N]``. A start behind its stop goes round the end of the circle.

    Raises:
        TypeError: none, or both, of ``trajectory`` and ``end``.
        RuntimeError: no rows; or a ``cursor`` that names no row.

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
        raise RuntimeError(f"find_start_stop_traj: a tensor {list(rows.shape)} has no rows")
    there, rows = rows.device, rows.to(device)
    last = rows.bool().clone() if trajectory is None else rows != rows.roll(-1, 0)
    if not at_capacity:
        last[-1] = True
    elif cursor is not None:
        last[_row(cursor)] = True
    last[-1] |= ~last.any(0)  # a circle without an end is cut once
    stop = last.transpose(0, -1).nonzero()  # the steps of a column follow each other
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
    """The row that was written last."""
    try:
        return int(cursor if isinstance(cursor, int) else cpu.as_tensor(cursor).reshape(-1)[-1])
    except (IndexError, TypeError, ValueError) as error:
        raise RuntimeError(
            "find_start_stop_traj: cursor must be a row, or several rows of which the last is "
            f"used; got {cursor!r}"
        ) from error


def pin_memory_output(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose result is in pinned memory where the object's ``_pin_memory`` is true.

    Args:
        fun: the method.

    Source: ``torchrl.data.replay_buffers.utils.pin_memory_output``.
    """

    @functools.wraps(fun)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = fun(self, *args, **kwargs)
        return pin(output) if self._pin_memory else output

    return method


def tree_iter(pytree: Any) -> Iterator[Any]:
    """The leaves of a PyTree, one after the other.

    Source: ``torchrl.data.replay_buffers.utils.tree_iter``.
    """
    return iter(_pytree.tree_iter(pytree))


def unravel_index(indices: torch.Tensor, shape: Any) -> tuple[torch.Tensor, ...]:
    """Coordinates of flat indices, a tensor for each dimension of ``shape``.

    Source: ``torchrl.data.replay_buffers.utils.unravel_index``.
    """
    return torch.unravel_index(indices, shape)
