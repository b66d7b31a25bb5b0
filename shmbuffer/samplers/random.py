"""Uniform sampling with replacement."""

from __future__ import annotations

from typing import Any

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.keys import GENERATION
from shmbuffer.items.mover import draw_from
from shmbuffer.samplers.sampler import (
    NOTHING_THERE,
    Sampler,
    WithOrWithout,
    ask_rank,
    draw_key,
    drawn_by,
    in_storage,
)
from shmbuffer.samplers.without_replacement import SamplerWithoutReplacement
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_kit import TENSORS


class RandomSampler(Sampler, metaclass=WithOrWithout):
    """Draws items uniformly with replacement.

    Args:
        replacement: if False, a `SamplerWithoutReplacement` is created instead.
        **options: arguments of `SamplerWithoutReplacement`, such as ``drop_last`` and ``shuffle``.

    Raises:
        TypeError: options were passed, but ``replacement`` is True.

    Cost: with a storage of this package, one native call draws and gathers the items.

    Example:
        >>> from shmbuffer import RandomSampler
        >>> RandomSampler(replacement=False, drop_last=True)
        SamplerWithoutReplacement( 0.0000% sampled)

    Source: ``torchrl.data.replay_buffers.RandomSampler``.
    """

    _without_replacement = SamplerWithoutReplacement

    def __init__(self, **options: Any) -> None:
        if options:
            raise TypeError(
                f"{type(self).__name__}() with replacement does not support {', '.join(options)}; "
                "pass replacement=False"
            )

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws items uniformly; see `Sampler.sample`."""
        ring = ring_of(storage)
        if ring is not None and (batch_size or ring.length):
            elements, tickets, _ = draw_from(
                TENSORS, ring, batch_size, draw_key(self, storage), None
            )
            info = {GENERATION: tickets} if storage.shared else {}
            return in_storage(storage, elements), info
        length = len(storage)
        if not length:
            raise EmptyBufferError(NOTHING_THERE)
        ask_rank(self, storage)
        index = drawn_by(self, cpu.randint, length, (batch_size,))
        return in_storage(storage, index), {}
