"""Uniform drawing, with replacement."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.replay.keys import GENERATION
from shmbuffer.replay.samplers.sampler import Sampler, draw_key
from shmbuffer.replay.storages.indexing import unravel


class RandomSampler(Sampler):
    """Every item that is there is as likely as any other. With replacement.

    Args:
        replacement: False (each item once an epoch) is not there yet.

    Cost: with a storage of this package one native call for draw and gather.

    Source: ``torchrl.data.replay_buffers.RandomSampler``.
    """

    def __init__(self, replacement: bool = True) -> None:
        if not replacement:
            raise NotImplementedError("sampling without replacement comes in a later release")

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw; see `Sampler.sample`.

        Raises:
            EmptyBufferError: nothing to draw from.
        """
        ring = getattr(storage, "ring", None)
        if ring is not None:
            return draw_from(
                ring, storage.lanes, batch_size, draw_key(self._rng), None, storage.shared
            )
        length = len(storage)
        if not length:
            raise EmptyBufferError("the storage is empty: write something before sampling")
        return torch.randint(length, (batch_size,), generator=self._rng), {}


def draw_from(
    ring: Any, lanes: tuple[int, ...], count: int, key: int, beta: float | None, generation: bool
) -> tuple[Any, dict[str, Any]]:
    """Indices of a draw that somebody else gathers.

    Args:
        ring: where to draw from.
        lanes: the storage's dimensions after the first.
        count: how many.
        key: of the draw.
        beta: exponent of the weights; None draws uniformly.
        generation: whether tickets are wanted.

    Returns:
        int64 ``[count]``, or a tuple of coordinates where there are lanes; ``"weight"`` and
        ``"index_generation"``.
    """
    index = torch.empty(count, dtype=torch.int64)
    tickets = torch.empty_like(index)
    weights = torch.empty(count if beta is not None else 0, dtype=torch.float32)
    ring.draw(
        count,
        key,
        index.data_ptr(),
        tickets.data_ptr(),
        weights.data_ptr() if beta is not None else 0,
        beta=beta or 0.0,
        prioritized=beta is not None,
    )
    info: dict[str, Any] = {}
    if beta is not None:
        info["weight"] = weights
    if generation:
        info[GENERATION] = tickets
    return unravel(index, lanes) if lanes else index, info
