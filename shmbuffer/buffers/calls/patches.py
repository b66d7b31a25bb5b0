"""Patches that apply only to items with an older version.

An item is compared under its ticket, and changed only if it still has that ticket.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Flags
from shmbuffer.storages import Storage
from shmbuffer.storages.indexing import ravel
from shmbuffer.tensors.form.tensors import as_numbers


def compared(
    storage: Storage,
    index: Any,
    generation: Any,
    path: tuple[str, ...],
    version: Any,
    *,
    newer: bool,
) -> tuple[torch.Tensor, torch.Tensor, Flags]:
    """Tickets of items to change, else -1; versions to store; which present items are newer."""
    elements, column, now = storage.entry(index, path)
    tickets, stored = ravel(generation, ()), as_numbers(column).reshape(-1)
    if len(stored) != len(elements):
        raise ValueError(
            f"{'.'.join(path)!r} is {list(column.shape[1:])} an item; one number can be compared"
        )
    if len(tickets) != len(elements):
        raise RuntimeError(f"there are {len(tickets)} generations for {len(elements)} items")
    given = as_numbers(version) if isinstance(version, torch.Tensor) else np.asarray(version)
    versions = version if isinstance(version, torch.Tensor) else torch.from_numpy(given.copy())
    if not given.ndim:  # a plain number takes the dtype of the entry
        given, versions = given.astype(stored.dtype), versions.to(column.dtype)
    if given.size not in (1, len(elements)):
        raise ValueError(f"version is one number, or one for each of {len(elements)} items")
    given = np.broadcast_to(given.reshape(-1), elements.shape)
    live = (tickets >= 0) & (now == tickets)
    wins = live & (given > stored if newer else given >= stored)
    rows = np.flatnonzero(wins)
    order = rows[np.lexsort((given[rows], elements[rows]))]  # stable: of equal ones the last wins
    wins[order[:-1][elements[order[1:]] == elements[order[:-1]]]] = False
    found = torch.from_numpy(np.where(wins, tickets, -1))
    versions = versions.detach().cpu().reshape(-1).expand(len(elements))
    return found, versions.reshape(column.shape), live & ~wins
