"""Single entries of the items of a storage, without the rest of them.

A slice sampler looks at one or two small entries (``done``, the id of a trajectory) of every item,
and at some flags of the items that it has drawn. Where the leaves are tensors only these are read;
objects are read whole, once, and only the entries are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.replay.form.nodes import LEAF, Path, is_collection

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.replay.storages.rows import Rows

Key = str | tuple[str, ...]


def path_of(key: Key) -> Path:
    """A key of a TensorDict, which may be nested, as a path."""
    return (key,) if isinstance(key, str) else tuple(key)


class Entries(ABC):
    """Entries of the items of a storage, by path."""

    @abstractmethod
    def has(self, path: Path) -> bool:
        """Whether the items have a tensor there."""

    @abstractmethod
    def column(self, path: Path) -> NDArray[Any]:
        """That entry of all slots, ``[slots, lanes, numbers]``, to look at: it may be live memory.

        What slots without an item have there means nothing.
        """

    @abstractmethod
    def take(self, path: Path, elements: NDArray[np.int64]) -> torch.Tensor:
        """A copy of that entry of some elements, ``[n, *shape]``."""


class LeafEntries(Entries):
    """Entries of tensors that lie in a storage: of a million flags, one megabyte is read."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        leaves = rows.leaves
        self._at: dict[Path, int] = {}
        if leaves.node is not LEAF:  # one tensor has no entries
            self._at = {leaf.path: at for at, leaf in enumerate(leaves.leaves)}

    def has(self, path: Path) -> bool:
        """See `Entries.has`."""
        return path in self._at

    def column(self, path: Path) -> NDArray[Any]:
        """See `Entries.column`."""
        view = self._rows.views()[self._at[path]].as_subclass(torch.Tensor)
        ring = self._rows.ring
        return as_numbers(view).reshape(ring.capacity, ring.width, -1)

    def take(self, path: Path, elements: NDArray[np.int64]) -> torch.Tensor:
        """See `Entries.take`."""
        view = self._rows.views()[self._at[path]].as_subclass(torch.Tensor)
        shape = self._rows.leaves.leaves[self._at[path]].shape
        flat = view.detach().reshape(self._rows.ring.elements, *shape)
        return flat.index_select(0, torch.from_numpy(elements).to(flat.device)).cpu()


class ObjectEntries(Entries):
    """Entries of items that are objects: TensorDicts in a list, or whatever a storage gives.

    Args:
        storage: needs ``get`` alone.
        slots: int64 ``[n]``: what to read.
        paths: the entries that are wanted; others are forgotten with the items.
    """

    def __init__(self, storage: Any, slots: NDArray[np.int64], paths: Sequence[Path]) -> None:
        items = storage.get(torch.from_numpy(slots))
        found = {path: pick(items, path) for path in paths}
        self._found = {path: entry for path, entry in found.items() if entry is not None}
        self._places = int(slots.max()) + 1 if len(slots) else 0
        self._slots = slots

    def has(self, path: Path) -> bool:
        """See `Entries.has`."""
        return path in self._found

    def column(self, path: Path) -> NDArray[Any]:
        """See `Entries.column`."""
        numbers = as_numbers(self._found[path]).reshape(len(self._slots), 1, -1)
        column = np.zeros((self._places, *numbers.shape[1:]), numbers.dtype)
        column[self._slots] = numbers
        return column

    def take(self, path: Path, elements: NDArray[np.int64]) -> torch.Tensor:
        """See `Entries.take`."""
        where = np.searchsorted(self._slots, elements)
        return self._found[path].index_select(0, torch.from_numpy(where))


def pick(data: Any, path: Path) -> torch.Tensor | None:
    """One entry of a batch, or of a list of items; None where it is not there, or is no tensor."""
    if isinstance(data, (list, tuple)):
        parts = [pick(item, path) for item in data]
        there = [part for part in parts if part is not None]
        return torch.stack(there) if there and len(there) == len(parts) else None
    if is_collection(data):
        found = data.get(path, None)
    else:
        found = data
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, (np.ndarray, np.generic, bool, int, float)):
        found = torch.as_tensor(found)
    return found.detach().cpu() if isinstance(found, torch.Tensor) else None


def as_numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's numbers for numpy: the same memory where that is possible."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.float()  # numpy does not know them
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
