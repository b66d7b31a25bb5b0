"""Two buffers under one index: the places of the online part, and behind them the data set's.

    0 .. capacity - 1              places of the online part, as its writes return them
    capacity .. capacity + data    items of the data set

What an index names is read in its part, and priorities, generations and patches go there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils._pytree import tree_map

from shmbuffer.numpy.keys import INDEX
from shmbuffer.replay.buffers import ReplayBuffer
from shmbuffer.replay.buffers.access import ConditionalUpdateResult, _is_key
from shmbuffer.replay.buffers.priority_entry import no_index, one_each
from shmbuffer.replay.eager import eager
from shmbuffer.replay.ensembles.ensemble import ReplayBufferEnsemble
from shmbuffer.replay.ensembles.rows import BUFFER_IDS
from shmbuffer.replay.form.nodes import is_collection
from shmbuffer.replay.samplers import PriorityUpdate
from shmbuffer.replay.storages.indexing import as_array, is_one

ONLINE, OFFLINE = 0, 1


class TwoParts(ReplayBufferEnsemble):
    """An online part and a data set, as one buffer with flat indices."""

    @property
    def online_buffer(self) -> ReplayBuffer:
        """What is collected."""
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
        """Items by the index that samples and writes give; a slice leaves empty places out."""
        if isinstance(index, str) or _is_key(index):
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
            held = torch.ones(len(places), dtype=torch.bool)
            for at, rb in enumerate(self._members):
                rows = torch.nonzero((places >= start) == bool(at)).flatten()
                there: Any = rb._storage.contains
                held[rows] = there(places[rows] - at * start)
            places = places[held]
        order, parts = [], []
        for at, rb in enumerate(self._members):
            rows = torch.nonzero((places >= start) == bool(at)).flatten()
            if len(rows):
                order.append(rows)
                parts.append(rb[places[rows] - at * start])
        if not parts:
            return self._transformed(self.offline_buffer[:0])
        sorted_ = torch.argsort(torch.cat(order))
        data = tree_map(lambda leaf: leaf[sorted_], self._collate(parts), is_leaf=is_collection)
        return self._transformed(data)

    def _routable(self, index: Any) -> TensorDict:
        """An index as an ensemble has it."""
        places = torch.as_tensor(index)
        places = one_each(places) if places.dim() > 1 else places.reshape(-1)
        ids = (places >= self._start).long()
        return TensorDict({BUFFER_IDS: ids, INDEX: places - ids * self._start}, [len(places)])

    def update_priority(
        self, index: Any, priority: Any, *, generation: Any = None
    ) -> PriorityUpdate:
        """Change priorities, each in its part; see `ReplayBuffer.update_priority`."""
        index = self._routable(index)
        return super().update_priority(index, priority, generation=generation)  # type: ignore[no-any-return]

    def mark_update(self, index: Any) -> None:
        """Give the items at ``index`` the default priority of their part."""
        super().mark_update(self._routable(index))

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Set the priorities of a sample, each in its part.

        See `ReplayBufferEnsemble.update_tensordict_priority`.
        """
        index = data.get(INDEX, None)
        if index is None:
            raise no_index(data)
        routable = TensorDict(dict(data.items()), [])
        return super().update_tensordict_priority(routable.set(INDEX, self._routable(index)))

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
        """Change entries of the items of a sample that are in the online part still.

        Args:
            index: see `ReplayBuffer.update_if_present`; so are the others.
            generation: see there.
            patch: see there.
            version_key: see there.
            version: see there.
            require_newer: see there.

        Returns:
            `ConditionalUpdateResult` for the sample. Items of the data set are not updated.
        """
        patch = patch if isinstance(patch, TensorDictBase) else TensorDict(patch)
        places = torch.as_tensor(index).reshape(-1)
        updated = torch.zeros(len(places), dtype=torch.bool)
        rows = torch.nonzero(places < self._start).flatten()
        if isinstance(version, torch.Tensor) and version.numel() > 1:
            version = version.reshape(-1)[rows]
        found = self.online_buffer.update_if_present(
            index=places[rows],
            generation=torch.as_tensor(generation).reshape(-1)[rows],
            patch=TensorDict({key: value[rows] for key, value in patch.items(True, True)}),
            version_key=version_key,
            version=version,
            require_newer=require_newer,
        )
        updated[rows] = found.updated
        if found.version_rejected is None:
            return ConditionalUpdateResult(updated)
        rejected = torch.zeros_like(updated)
        rejected[rows] = found.version_rejected
        return ConditionalUpdateResult(updated, rejected)

    def _collate(self, data: Any) -> Any:
        """Rows of the parts behind each other."""
        if len(data) == 1:
            return data[0]
        try:
            return tree_map(lambda *leaves: torch.cat(leaves), *data, is_leaf=is_collection)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise RuntimeError(
                "the items of the data set and of the online part differ in form, so that they are "
                f"no batch together: {_differences(*data) or error}; write the same entries, or "
                "give one of the parts a transform"
            ) from error


def _differences(*parts: Any) -> str:
    """Which entries one part has and the other has not."""
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
