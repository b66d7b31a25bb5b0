"""Two buffers under one index: the places of the online part, then those of the data set.

    0 .. capacity - 1              places of the online part, as its writes return them
    capacity .. capacity + data    items of the data set

Items are read, and priorities and patches applied, in the part of their index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils._pytree import tree_map

from shmbuffer.buffers import ReplayBuffer
from shmbuffer.buffers.calls.access import is_key
from shmbuffer.buffers.data_path.priority_entry import no_index, one_each
from shmbuffer.ensembles.changes import together
from shmbuffer.ensembles.ensemble import ReplayBufferEnsemble
from shmbuffer.ensembles.stacked_rows import BUFFER_IDS
from shmbuffer.items.keys import INDEX
from shmbuffer.samplers import PriorityUpdate
from shmbuffer.storages.indexing import as_array, is_one
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.nodes import is_collection

ONLINE, OFFLINE = 0, 1


class TwoParts(ReplayBufferEnsemble):
    """An online part and a data set, as one buffer with flat indices."""

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The online part."""
        return self._members[ONLINE]

    @property
    def offline_buffer(self) -> ReplayBuffer:
        """The data set."""
        return self._members[OFFLINE]

    @property
    def _start(self) -> int:
        """The index of the data set's first item."""
        return self.online_buffer._storage.max_size

    # -- items by their index ------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Items by the index of samples and writes; a slice leaves empty places out."""
        if is_key(index):
            return self[:][index]
        start = self._start
        end = start + self.offline_buffer._storage.max_size
        if is_one(index):
            place = int(index[0] if isinstance(index, tuple) else index)
            place += end if place < 0 else 0
            at = int(place >= start)
            return self._transformed(self._members[at][place - at * start])
        sliced = isinstance(index, slice) or index is Ellipsis
        places = torch.from_numpy(np.arange(end)[index if sliced else as_array(index)].copy())
        if sliced:
            held = cpu.ones(len(places), dtype=torch.bool)
            for rb, rows, local in self._by_part(places):
                contains: Any = rb._storage.contains
                held[rows] = contains(local)
            places = places[held]
        parts = [(rows, rb[local]) for rb, rows, local in self._by_part(places) if len(rows)]
        if not parts:
            return self._transformed(self.offline_buffer[:0])
        order = torch.argsort(torch.cat([rows for rows, _ in parts]))
        data = self._collate([items for _, items in parts])
        return self._transformed(tree_map(lambda leaf: leaf[order], data, is_leaf=is_collection))

    def _by_part(
        self, places: torch.Tensor
    ) -> Iterator[tuple[ReplayBuffer, torch.Tensor, torch.Tensor]]:
        """Each part, its rows of ``places``, and the index there."""
        for at, rb in enumerate(self._members):
            rows = torch.nonzero((places >= self._start) == bool(at)).flatten()
            yield rb, rows, places[rows] - at * self._start

    def _routable(self, index: Any) -> TensorDict:
        """An index in the form of an ensemble's."""
        places = cpu.as_tensor(index)
        places = one_each(places) if places.dim() > 1 else places.reshape(-1)
        ids = (places >= self._start).long()
        return TensorDict({BUFFER_IDS: ids, INDEX: places - ids * self._start}, [len(places)])

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: Any = None
    ) -> PriorityUpdate:
        """Change priorities, each in its part; see `ReplayBuffer.update_priority`."""
        index = index if priority is None else self._routable(index)
        return super().update_priority(index, priority, generation=generation)  # type: ignore[no-any-return]

    def mark_update(self, index: Any) -> None:
        """Give the items at ``index`` the default priority of their part."""
        super().mark_update(self._routable(index))

    def _update_by_sample(self, data: Any) -> PriorityUpdate:
        """See `ReplayBufferEnsemble.update_tensordict_priority`."""
        index = data.get(INDEX, None)
        if index is None:
            raise no_index(data)
        routable = TensorDict(dict(data.items()), [])
        return super()._update_by_sample(routable.set(INDEX, self._routable(index)))

    @eager
    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> Any:
        """`ReplayBuffer.update_if_present` for items of the online part; others do not change."""
        patch = patch if isinstance(patch, TensorDictBase) else TensorDict(patch)
        places = cpu.as_tensor(index).reshape(-1)
        rows = torch.nonzero(places < self._start).flatten()
        if isinstance(version, torch.Tensor) and version.numel() > 1:
            version = version.reshape(-1)[rows]
        found = self.online_buffer.update_if_present(
            index=places[rows],
            generation=cpu.as_tensor(generation).reshape(-1)[rows],
            patch=TensorDict({key: value[rows] for key, value in patch.items(True, True)}),
            version_key=version_key,
            version=version,
            require_newer=require_newer,
        )
        return together(len(places), [(rows, found)], compared=version_key is not None)

    def _collate(self, data: Any) -> Any:
        """Concatenate the rows of the parts."""
        if len(data) == 1:
            return data[0]
        try:
            return tree_map(lambda *leaves: torch.cat(leaves), *data, is_leaf=is_collection)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise RuntimeError(
                "the items of the data set and of the online part differ in form and make no "
                f"batch: {_differences(*data) or error}; write the same entries, or give one of "
                "the parts a transform"
            ) from error


def _differences(*parts: Any) -> str:
    """The entries that only one of the parts has."""
    if not all(map(is_collection, parts)):
        return ""
    keys = [
        {".".join(key) if isinstance(key, tuple) else key for key in part.keys(True, True)}
        for part in parts
    ]
    said = [
        f"only the {name} has {sorted(mine - others)}"
        for name, mine, others in (
            ("data set", keys[0], keys[1]),
            ("online part", keys[1], keys[0]),
        )
        if mine - others
    ]
    return ", ".join(said)
