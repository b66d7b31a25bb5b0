"""What a buffer asks of a storage beyond ``set``, ``get`` and ``len``: done here with these three.

A storage of the user's has all of it by that. Those that lie on a ring (`on_ring`) do it with the
ring: a batch is drawn, read and validated in one native call, and what changes in an item changes
where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.replay.checkpoints import Checkpoints
from shmbuffer.replay.storages.indexing import is_one

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shmbuffer.memory import Engine
    from shmbuffer.replay.storages.location import Location

Drawn = tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Items, as `Serving.collate` takes them; element indices int64 ``[n]``; tickets int64 ``[n]``;
weights float32 ``[n]`` or None."""


class Serving(Checkpoints):
    """The face of a storage that buffers look at."""

    _location: Location | None = None  # of its directory, where it can have one

    @property
    def open_engine(self) -> Engine | None:
        """The handle that counts, flushes and records what is done here.

        None: there is none, or it is not open yet.
        """
        return None

    @property
    def draws_natively(self) -> bool:
        """Whether `draw` chooses, reads, validates and weighs in one native call."""
        return False

    @property
    def writes_natively(self) -> bool:
        """Whether ``append`` writes a batch with its priorities, whole or not at all."""
        return False

    @property
    def tracks_generations(self) -> bool:
        """Whether the ticket of an item tells if it is still the same."""
        return False

    # -- reading -------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """The item at an int, the batch of items at a sequence."""
        raise NotImplementedError(f"{type(self).__name__} has no get()")

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """`get`, as a buffer asks for it.

        Args:
            index: see `get`.
            dim_extend: the dimension along which the user's batches are appended; the index counts
                in the user's order.
            views: False wants copies, True views; None is whatever is right here.

        Returns:
            The item at an int; else what `collate` and `uncollated` take.
        """
        return self.get(index)

    def fetch_held(self, index: Any, tickets: torch.Tensor) -> Any:
        """`fetch` of elements that a sampler has chosen, if they are still the items it chose.

        Args:
            index: element indices int64 ``[n]``, or a tuple of coordinates.
            tickets: int64 ``[n]``: of the items that are meant.

        Returns:
            None if one of them is another by now.
        """
        return self.get(index)

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """Choose and read in one native call; only where `draws_natively`.

        Args:
            count: elements.
            key: of the draw.
            beta: exponent of the weights; None draws uniformly, without weights.

        Raises:
            EmptyBufferError: nothing to draw from.
        """
        raise NotImplementedError(f"a sampler draws from a {type(self).__name__}, by index")

    def collate(self, data: Any) -> Any:
        """A batch from what `fetch` gives for several items, where a buffer has no ``collate_fn``.

        As it is, unless the storage gives a list.
        """
        return data

    def uncollated(self, data: Any) -> Any:
        """What a ``collate_fn`` is called with, from what `fetch` gives for several items.

        It is what `get` gives.
        """
        return data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """What `fetch` gives for all items in their order, at most ``chunk`` places at a time."""
        for start in range(0, len(self), chunk):
            yield self.fetch(slice(start, start + chunk))

    # -- writing -------------------------------------------------------------------------------

    def prepare(self, data: Any, single: bool) -> None:
        """Make everything that writing ``data`` needs, and write nothing.

        Where the first write makes the ring, priorities can go with that write then.

        Args:
            data: one item where ``single``, else a batch.
            single: see there.
        """

    def put(self, index: Any, data: Any, *, in_place: bool) -> None:
        """``set``; with ``in_place`` a change of items that are there, whose priorities stay."""
        self[index] = data

    def knows(self, path: tuple[str, ...]) -> bool:
        """Whether an entry is part of the items already; else it would be a new column."""
        return True

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """Change an entry of some items, and leave the rest of them as it is.

        Args:
            index: see `get`.
            value: as that entry of what `get` gives.
            path: of the entry; None: all of the items.
            dim_extend: see `fetch`.
        """
        if path is None:
            self[index] = value
            return
        single, found = is_one(index), self.get(index)
        places = [int(index)] if single else torch.arange(len(self))[index].tolist()
        for at, item in enumerate([found] if single else list(found)):
            changed = item.clone()
            changed.set_(path, value if single else value[at])
            self.put(places[at], changed, in_place=True)

    def change_if_present(self, index: Any, generation: Any, patch: Any) -> NDArray[np.bool_]:
        """Change entries of items that have not been written over since.

        Args:
            index: of a sample.
            generation: of the same sample.
            patch: the entries, each ``[n, ...]``.

        Returns:
            bool ``[n]``: what was changed.

        Raises:
            RuntimeError: the storage keeps no generations.
        """
        raise RuntimeError(
            f"a {type(self).__name__} keeps no generations; use a LazyTensorStorage or a "
            "LazyMemmapStorage"
        )

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item.

        Args:
            keep_write_count: go on counting what is written, where the storage counts it.
        """
        self._empty()

    # -- who uses it ---------------------------------------------------------------------------

    def add_reader(self, buffer: Any) -> None:
        """A buffer begins to use the storage: it is attached.

        A storage on a ring calls ``buffer.ring_is_there()`` instead, now or once there is one: the
        ring gives new items their priority by itself.
        """
        self.attach(buffer)

    def attach(self, buffer: Any) -> None:
        """Have ``buffer.mark_update(index)`` called for every write."""
        raise NotImplementedError

    def _empty(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be emptied")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no __len__()")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NotImplementedError
