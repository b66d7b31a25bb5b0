"""Uniform drawing, with replacement."""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.replay.keys import GENERATION
from shmbuffer.replay.samplers.sampler import (
    NOTHING_THERE,
    Sampler,
    between_forks,
    draw_key,
    lanes_of,
)
from shmbuffer.replay.samplers.without_replacement import SamplerWithoutReplacement
from shmbuffer.replay.storages.indexing import unravel


class RandomSampler(Sampler):
    """Every item that is there is as likely as any other. With replacement.

    Args:
        replacement: False makes a `SamplerWithoutReplacement` instead.
        **options: its arguments, ``drop_last`` and ``shuffle``.

    Raises:
        TypeError: options together with replacement.

    Cost: with a storage of this package one native call for draw and gather.

    Example:
        >>> from shmbuffer import RandomSampler
        >>> RandomSampler(replacement=False, drop_last=True)
        SamplerWithoutReplacement( 0.0000% sampled)

    Source: ``torchrl.data.replay_buffers.RandomSampler``.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """See the class; one that is derived from it has arguments of its own."""
        if cls is not RandomSampler:
            return super().__new__(cls)
        return _made(*args, **options)

    def __init__(self, replacement: bool = True) -> None:
        """See the class."""
        if not replacement:
            raise TypeError(
                f"a {type(self).__name__} draws with replacement; derive from "
                "SamplerWithoutReplacement for the other"
            )

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw; see `Sampler.sample`.

        Raises:
            EmptyBufferError: nothing to draw from.
        """
        ring = getattr(storage, "ring", None)
        if ring is not None and (batch_size or ring.length):
            return draw_from(
                ring, storage.lanes, batch_size, draw_key(self._rng), None, storage.shared
            )
        length = len(storage)
        if not length:
            raise EmptyBufferError(NOTHING_THERE)
        index = between_forks(torch.randint, length, (batch_size,), generator=self._rng)
        lanes = lanes_of(storage)
        return unravel(index, lanes) if lanes else index, {}


def _made(replacement: bool = True, **options: Any) -> Sampler:
    if not replacement:
        return SamplerWithoutReplacement(**options)
    if options:
        raise TypeError(
            f"RandomSampler() with replacement takes no {', '.join(options)}; they belong to "
            "replacement=False"
        )
    return object.__new__(RandomSampler)


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
