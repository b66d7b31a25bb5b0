"""The way out: indices from the sampler, rows from the storage, now or ahead of time.

native path:    draw, gather, validate and weigh are one call of the C core
by parts:       sampler.sample ──▶ storage.get, asked again where a row was written over meanwhile
both:           collate_fn ──▶ transform ──▶ pinned memory
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.replay import pinned
from shmbuffer.replay.buffers.parts import Parts
from shmbuffer.replay.buffers.prefetch import Batch, Order
from shmbuffer.replay.checkpoints import has_its_own
from shmbuffer.replay.eager import FRAMES
from shmbuffer.replay.keys import GENERATION, INDEX, WEIGHT_KEYS
from shmbuffer.replay.leaves import reads_into
from shmbuffer.replay.samplers.sampler import draw_key, lanes_of
from shmbuffer.replay.storages.indexing import unravel

if TYPE_CHECKING:
    from shmbuffer.replay.storages.serving import Drawn

_ATTEMPTS = 16  # to read what a sampler of somebody else's chose, where other processes write


class Drawing(Parts):
    """The part of a buffer that makes batches."""

    def _count(self, batch_size: int | None) -> int:
        own = self._batch_size
        if batch_size is None:
            if own is None:
                raise RuntimeError(
                    "no batch size: give batch_size to sample() or to the constructor of the buffer"
                )
            return own
        if own is not None and batch_size != own:
            warnings.warn(
                f"sample(batch_size={batch_size}) differs from the buffer's batch_size={own}; "
                f"{batch_size} is taken",
                stacklevel=3 + FRAMES,  # over sample()
            )
        if batch_size < 0:
            raise ValueError(f"batch_size has to be at least 0, got {batch_size}")
        return batch_size

    def _draw(self, draw: Callable[[int, int, float | None], Drawn], count: int) -> Drawn:
        """One native call: draw, gather, validate, weigh.

        Args:
            draw: `Serving.draw` of the storage, or `Rows.sample`, which gives leaves.
            count: how many items.
        """
        sampler = self._by_priority
        if sampler is None:
            return draw(count, draw_key(self._sampler._rng), None)
        drawn = draw(count, draw_key(sampler._rng), sampler.beta)
        if sampler.dtype is torch.float32:
            return drawn
        data, index, tickets, weights = drawn
        assert weights is not None
        assert sampler.ring is not None
        return data, index, tickets, sampler._weights(sampler.ring, index, weights)

    def _next(self, count: int) -> Batch:
        """The next batch, made now or ahead."""
        if self._prefetcher is not None and count == self._batch_size:
            return self._prefetcher.next()
        return self._sample(count)

    def _sample(self, count: int) -> Batch:
        storage = self._storage
        if self._native_sample:
            if self._pin_memory:
                with reads_into(pinned.empty_like):
                    data, index, tickets, weights = self._draw(storage.draw, count)
            else:
                data, index, tickets, weights = self._draw(storage.draw, count)
            lanes = lanes_of(storage)
            info: dict[str, Any] = {INDEX: unravel(index, lanes) if lanes else index}
            if weights is not None:
                info.update(dict.fromkeys(self._weight_keys, weights))
            if self._track_generations or self.shared:
                info[GENERATION] = tickets
            return self._finished(data, info)
        return self._gathered(*self._sampler.sample(storage, count))

    def _order(self) -> Order:
        """Draw the next batch for the prefetcher: indices now, rows and transforms in a thread."""
        sampler, generator = self._sampler, self._generator
        assert self._batch_size is not None
        with self._choosing():
            position = sampler._position()
            state = None if generator is None else generator.get_state()
            index, found = sampler.sample(self._storage, self._batch_size)
            ran_out = sampler.ran_out

        def undo() -> None:
            with self._choosing():
                sampler._rewind(position)
                if generator is not None and state is not None:
                    generator.set_state(state)

        return Order(partial(self._gathered, index, found), ran_out, undo)

    def _choosing(self) -> AbstractContextManager[Any]:
        """Held while the sampler is asked, where threads make batches ahead."""
        return nullcontext() if self._prefetcher is None else self._prefetcher.choosing

    def _gathered(self, index: Any, found: dict[Any, Any]) -> Batch:
        """The items that a sampler has chosen, as a sample."""
        with reads_into(pinned.empty_like) if self._pin_memory else nullcontext():
            data, info = self._chosen(index, found)
        return self._finished(data, info)

    def _chosen(self, index: Any, found: dict[Any, Any]) -> Batch:
        """The items that a sampler has chosen, as the storage gives them.

        Where other processes write, it is asked again if one of them was written over meanwhile.
        """
        for _ in range(_ATTEMPTS):
            data = self._held(index, found)
            if data is not None:
                break
            with self._choosing():
                index, found = self._sampler._again(self._storage, index)
        else:
            raise IndexError(
                f"what the {type(self._sampler).__name__} chose was written over each of the "
                f"{_ATTEMPTS} times that it was read; make the buffer larger, or write slower"
            )
        info = {INDEX: index, **found}
        weights = [info.pop(key) for key in WEIGHT_KEYS if key in info]
        if weights:
            info.update(dict.fromkeys(self._weight_keys, weights[0]))
        if not (self._track_generations or self.shared):
            info.pop(GENERATION, None)
        return data, info

    def _held(self, index: Any, found: dict[Any, Any]) -> Any:
        """The items at ``index``; None if one of them is another by now, or gone."""
        storage = self._storage
        tickets = found.get(GENERATION)
        try:
            if tickets is None:
                return storage.get(index) if has_its_own(storage, "get") else storage.fetch(index)
            return storage.fetch_held(index, tickets)
        except IndexError:
            if not self.shared:
                raise
            return None

    def _finished(self, data: Any, info: dict[Any, Any]) -> Batch:
        data = self._collate(data)
        if len(self._transform):
            data = self._transform(data)
        if self._pin_memory:
            return pinned.pin(data), pinned.pin(info)
        return data, info

    def _drop_prefetched(self) -> None:
        """Forget the batches that were made ahead, as if they had never been drawn."""
        if self._prefetcher is not None:
            self._prefetcher.drop()
