"""Patches that count only if they are newer than what an item says of itself.

An item is compared as it is under its ticket, and changed if it has that ticket still: in between
nothing has happened to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.replay.storages.indexing import ravel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.replay.storages import Storage


def compared(
    storage: Storage,
    index: Any,
    generation: Any,
    path: tuple[str, ...],
    version: Any,
    *,
    newer: bool,
) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.bool_]]:
    """Compare versions with those that the items of a sample have.

    Returns:
        The tickets of those that are to be changed, int64 ``[n]``, -1 for the rest; the versions in
        the form of the entry; and which of the items that are still there have lost, bool ``[n]``.
    """
    elements, column, now = storage.entry(index, path)
    tickets, stored = ravel(generation, ()), column.reshape(-1)
    if len(stored) != len(elements):
        raise ValueError(
            f"{'.'.join(path)!r} is {list(column.shape[1:])} an item; one number can be compared"
        )
    if len(tickets) != len(elements):
        raise RuntimeError(f"there are {len(tickets)} generations for {len(elements)} items")
    given = np.asarray(version.detach().cpu() if isinstance(version, torch.Tensor) else version)
    if not given.ndim:  # a plain number takes the dtype of the entry
        given = given.astype(stored.dtype)
    if given.size not in (1, len(elements)):
        raise ValueError(f"version is one number, or one for each of {len(elements)} items")
    given = np.broadcast_to(given.reshape(-1), elements.shape)
    live = (tickets >= 0) & (now == tickets)
    wins = live & (given > stored if newer else given >= stored)
    rows = np.flatnonzero(wins)
    order = rows[np.lexsort((given[rows], elements[rows]))]  # stable: of equal ones the last wins
    wins[order[:-1][elements[order[1:]] == elements[order[:-1]]]] = False
    found = torch.from_numpy(np.where(wins, tickets, -1))
    return found, torch.from_numpy(given.reshape(column.shape).copy()), live & ~wins
