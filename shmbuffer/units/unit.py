"""Base class for sample units, which build a batch from the drawn items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from shmbuffer.items.keys import GENERATION
from shmbuffer.memory.format.leaf import Key

Expanded = tuple[Any, dict[Any, Any]]
"""Index of the items to read, and a dict of additional entries of the sample."""


class SampleUnit(ABC):
    """Base class for sample units, which expand each drawn item into rows of a batch.

    A sampler draws items, which are called anchors, and a unit expands each anchor. `Transition`
    returns the item itself, `Sequence` returns a window of steps, `NStep` returns one transition
    over n steps, and `FrameStack` returns the item with the preceding frames. Any sampler works
    with any unit: ``ReplayBuffer(sampler=..., sample_unit=...)``.

    A custom unit must define `expand`. In a shared buffer, each single item is read consistently.
    To read all items of a batch consistently, return their tickets from ``storage.tickets(index)``
    in the entry ``"index_generation"``.

    Source: ``torchrl.data.SampleUnit``.
    """

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded:
        """Returns the items of a batch.

        Args:
            index: indices of the anchors, int64 ``[n]`` or a tuple of ``ndim`` such tensors.
            info: the sampler's entries for the anchors, such as weights, ``[n]`` each. Do not
                modify it.
            storage: storage of the items. Do not modify it.

        Returns:
            The index of the items to read, of the same form as ``index``, and a dict with
                additional entries of the sample, which are tensors with one row per item.
        """

    def assemble(self, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Builds the batch from the items that were read. The default returns them unchanged.

        Args:
            data: the collated items, before any transform.
            info: the dict from `expand`, with the additional entry ``"index"``.
        """
        return data, info

    def _expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded | None:
        """Calls `expand`, and adds the tickets of the items if the anchors have tickets.

        Returns None if an item is missing, so that other anchors must be drawn.
        """
        known = dict(info)
        tickets = known.pop(GENERATION, None)
        items, found = self.expand(index, known, storage)
        if tickets is None or GENERATION in found:
            return items, found
        now = storage.tickets(items)
        return None if (now < 0).any() else (items, {**found, GENERATION: now})

    def _reader(self, rows: Any) -> Any:
        """Returns a reader that reads complete samples from rows, such as a `StackReader`.

        If the result is None, the items that `expand` selects are read, and `assemble` builds the
        sample.
        """
        return None

    def _by_anchor(self, data: Any, key: Key, reduction: str, lanes: tuple[int, ...]) -> Any:
        """Reduces a sample with priorities to one row per anchor, for a priority update."""
        return data


class Transition(SampleUnit):
    """Sample unit that returns each sampled item unchanged, like a buffer without a unit.

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
        """Returns the anchors."""
        return index, info
