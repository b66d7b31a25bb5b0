"""Base class of sample units, which build a batch from the drawn items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from shmbuffer.items.keys import GENERATION
from shmbuffer.memory.format.leaf import Key

Expanded = tuple[Any, dict[Any, Any]]
"""Index of the items to read, and a dict of additional entries."""


class SampleUnit(ABC):
    """Base class of units, which build the part of a batch that belongs to a drawn item.

    A sampler draws items, which are called anchors, and a unit expands each anchor. `Transition`
    returns the item itself, `Sequence` returns a window of steps, `NStep` returns one transition
    over n steps, and `FrameStack` returns the item with the preceding frames. Any sampler works
    with any unit: ``ReplayBuffer(sampler=..., sample_unit=...)``.

    A custom unit must define `expand`. In a shared buffer, each single item is read consistently.
    For a consistent read of all items together, return their tickets from
    ``storage.tickets(index)`` in the entry ``"index_generation"``.

    Source: ``torchrl.data.SampleUnit``.
    """

    @abstractmethod
    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded:
        """Returns the items of a batch.

        Args:
            index: indices of the anchors, int64 ``[n]`` or a tuple of ``ndim`` such tensors.
            info: the sampler's data on the anchors, ``[n]`` each, such as weights. Do not modify
                it.
            storage: storage of the items. Do not modify it.

        Returns:
            The index of the items to read, in the form of ``index``, and a dict with additional
                entries of the sample, which are tensors with one row per item.
        """

    def assemble(self, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Builds the batch from the items that were read. The default returns them unchanged.

        Args:
            data: the items, collated, before any transform.
            info: the info from `expand`, with ``"index"``.
        """
        return data, info

    def _expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded | None:
        """Calls `expand`, and adds tickets if the anchors have any.

        Returns None if other anchors must be drawn.
        """
        known = dict(info)
        tickets = known.pop(GENERATION, None)
        items, found = self.expand(index, known, storage)
        if tickets is None or GENERATION in found:
            return items, found
        now = storage.tickets(items)
        return None if (now < 0).any() else (items, {**found, GENERATION: now})

    def _reader(self, rows: Any) -> Any:
        """Returns a reader of complete samples from rows, such as a `StackReader`, or None.

        If the result is None, the items of `expand` are read, and `assemble` builds the sample.
        """
        return None

    def _by_anchor(self, data: Any, key: Key, reduction: str, lanes: tuple[int, ...]) -> Any:
        """Reduces a sample with priorities to one row per anchor."""
        return data


class Transition(SampleUnit):
    """Returns each sampled item unchanged, as if there were no unit.

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
