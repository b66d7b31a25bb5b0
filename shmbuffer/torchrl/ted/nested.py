"""The nested form of episode data: nested tensors with one component per trajectory.

Their bytes are the same as those of the flat form.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor

from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.ted.entries import CUTS, dotted
from shmbuffer.torchrl.ted.episodes import Episodes, rows_of
from shmbuffer.torchrl.ted.flat import CompactEntry, TED2Flat
from shmbuffer.torchrl.ted.items import Flat2TED


class TED2Nested(TED2Flat):
    """Save hook that converts episode data to nested tensors with each observation stored once.

    The class takes the same arguments as `TED2Flat`. Entries are strided nested tensors
    ``[trajectories, -1, ...]``, and the batch size of the result is ``[trajectories]``. If a ring
    has not wrapped, the rows after its newest item form an additional trajectory. That trajectory
    has no observation after its last row.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import TED2Nested
        >>> data = TensorDict({
        ...     "observation": torch.tensor([0.0, 1.0, 10.0]),
        ...     "next": {
        ...         "observation": torch.tensor([1.0, 2.0, 11.0]),
        ...         "done": torch.tensor([[False], [True], [False]]),
        ...     },
        ... }, batch_size=[3])
        >>> [part.tolist() for part in TED2Nested()(data)["observation"].unbind(0)]
        [[0.0, 1.0, 2.0], [10.0, 11.0]]

    Source: ``torchrl.data.TED2Nested``.
    """

    def _batch(self, episodes: Episodes) -> tuple[int, ...]:
        return (len(episodes.trajectories[0]),)

    def _shape(
        self, entry: CompactEntry, episodes: Episodes, item: tuple[int, ...]
    ) -> torch.Tensor:
        if not entry.leaf.numel():
            raise ValueError(
                f"TED2Nested: items of entry {dotted(entry.path)!r} have shape {list(item)} and no "
                "bytes, so tensordict cannot save them in a nested tensor; leave the entry out, or "
                "use TED2Flat (FlatStorageCheckpointer)"
            )
        rows, closed = episodes.trajectories
        rows = rows if entry.after is None else rows + closed
        return torch.cat([rows[:, None], cpu.tensor(item).long().expand(len(rows), -1)], 1)

    def _objects(self, objects: list[Any], episodes: Episodes) -> NonTensorStack:
        rows = episodes.trajectories[0].tolist()
        left = iter(objects)
        return NonTensorStack(*(NonTensorData([next(left) for _ in range(one)]) for one in rows))

    def _cuts(self, cuts: torch.Tensor, episodes: Episodes) -> torch.Tensor:
        last = episodes.trajectories[0].cumsum(0) - 1
        # The additional dimension is needed for HDF5, where a single number has no dimensions.
        return cuts[last, None]


class Nested2TED(Flat2TED):
    """Load hook that restores the items that `TED2Nested` saved.

    The class takes the same arguments as `Flat2TED`.

    Source: ``torchrl.data.Nested2TED``.
    """

    def _rows(self, saved: dict[KeyPath, Any], episodes: Episodes) -> dict[KeyPath, Any]:
        rows: dict[KeyPath, Any] = {}
        for path, leaf in saved.items():
            if path in self._reserved_paths:
                rows[path] = leaf
            elif isinstance(leaf, NonTensorStack):
                objects = [NonTensorData(one) for part in leaf for one in part.data]
                rows[path] = NonTensorStack(*objects)
            elif is_non_tensor(leaf):
                rows[path] = leaf
            else:
                rows[path] = rows_of(leaf) if leaf.is_nested else leaf.flatten(0, 1)
        if CUTS in saved and self._end in saved:
            last = cpu.tensor([len(part) for part in saved[self._end].unbind(0)]).cumsum(0) - 1
            flags = rows_of(saved[CUTS]).as_subclass(torch.Tensor).reshape(len(last), -1)
            rows[CUTS] = last[flags[:, 0]]
        return super()._rows(rows, episodes)
