"""The base class of sample units, which make the items of a batch from drawn items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from shmbuffer.items.keys import GENERATION
from shmbuffer.memory.format.leaf import Key

Expanded = tuple[Any, dict[Any, Any]]
"""The index of the items to read, and the info about them."""


class SampleUnit(ABC):
    """Makes the part of a batch that belongs to a drawn item.

    A sampler decides which items are drawn: the anchors. A unit decides what each of them becomes.
    `Transition` is the item itself, `Sequence` a window of steps, `NStep` one transition over n
    steps, `FrameStack` the item with the frames before it. Any sampler goes with any unit:
    ``ReplayBuffer(sampler=..., sample_unit=...)``.

    A unit of your own needs `expand`. On a shared buffer each item that it names is read as one
    piece. That all of them are of one moment is known where it says their tickets, as
    ``storage.tickets(index)`` gives them, under ``"index_generation"``.

    Source: ``torchrl.data.SampleUnit``.
    """

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded:
        """Name the items of a batch.

        Args:
            index: the anchors: int64 ``[n]``, or a tuple of ``ndim`` of them.
            info: what the sampler says of them, ``[n]`` each, such as weights. It is not changed.
            storage: where the items are. It is not changed.

        Returns:
            The index of the items that are read, in the same form, and what the sample says beside
            them: tensors with a row for each.
        """

    def assemble(self, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Make the batch of the items that were read; here they are the batch.

        Args:
            data: the items, collated, before any transform.
            info: what `expand` gave, with ``"index"``.
        """
        return data, info

    def _expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded | None:
        """`expand`, with tickets where the anchors have some; None: draw other anchors."""
        known = dict(info)
        tickets = known.pop(GENERATION, None)
        items, found = self.expand(index, known, storage)
        if tickets is None or GENERATION in found:
            return items, found
        now = storage.tickets(items)
        return None if (now < 0).any() else (items, {**found, GENERATION: now})

    def _reader(self, rows: Any) -> Any:
        """Reads whole samples of this unit out of rows, see `StackReader`.

        None: the items that `expand` names are read, and `assemble` makes the sample.
        """
        return None

    def _by_anchor(self, data: Any, key: Key, reduction: str, lanes: tuple[int, ...]) -> Any:
        """A sample that comes back with priorities, as one row for each item that they are of."""
        return data


class Transition(SampleUnit):
    """Each item that is drawn is an item of the batch, as without a unit.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, ReplayBuffer, Transition
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(10),
        ...     sample_unit=Transition(),
        ...     batch_size=4,
        ... )
        >>> index = rb.extend(torch.arange(3))
        >>> rb.sample().shape
        torch.Size([4])

    Source: ``torchrl.data.Transition``.
    """

    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded:
        """See `SampleUnit.expand`."""
        return index, info
