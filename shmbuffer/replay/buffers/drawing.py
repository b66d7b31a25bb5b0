"""The way out: indices from the sampler, rows from the storage, now or ahead of time.

native path:    draw, gather, validate and weigh are one call of the C core
by parts:       sampler.sample ──▶ storage.get, asked again where a row was written over meanwhile
both:           collate_fn ──▶ transform ──▶ pinned memory

Where a limiter is set, or a call asks for it, a sample is waited for first; out of a queue it is
taken by parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shmbuffer.memory import patience
from shmbuffer.memory.first_write import first_ring
from shmbuffer.replay import pinned
from shmbuffer.replay.buffers.parts import Parts
from shmbuffer.replay.buffers.prefetch import Batch, Order
from shmbuffer.replay.checkpoints import has_its_own
from shmbuffer.replay.eager import FRAMES
from shmbuffer.replay.form.tensors import reads_into
from shmbuffer.replay.keys import GENERATION, INDEX, WEIGHT_KEYS
from shmbuffer.replay.samplers import RandomSampler
from shmbuffer.replay.samplers.sampler import between_forks, draw_key, lanes_of
from shmbuffer.replay.storages.indexing import unravel
from shmbuffer.replay.storages.ring_backed import RingBacked

if TYPE_CHECKING:
    from shmbuffer.memory import Ring
    from shmbuffer.replay.storages import Storage
    from shmbuffer.replay.storages.mover import Drawn

_NOT_TAKEN = -1  # for a ticket: nothing came out of the queue
_ATTEMPTS = 16  # to read what a sampler of somebody else's chose, where other processes write


class Turn(NamedTuple):
    """A sample that may be made, and counts."""

    ring: Ring
    is_queue: bool
    version: int
    """Of the limiter that was asked."""
    counted: int
    """Elements; 0 where nothing counts them."""

    def give_back(self) -> None:
        """It was not made."""
        self.ring.flow.take_back(self.counted, self.version)


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

    @property
    def _limited(self) -> bool:
        """Whether samples may have to wait for writes; asked where `_limiter_version` is not 0."""
        ring = self._limited_ring
        if ring is not None:
            return ring.flow.limits != 0
        engine = getattr(self._storage, "open_engine", None)
        return engine is not None and not engine.closed and engine.limiter is not None

    def _admitted(self, count: int) -> bool:
        """Whether a draw may be made without waiting; it counts then."""
        ring = self._limited_ring
        return ring is not None and ring.flow.admit_now(count)

    def _not_drawn(self, count: int) -> None:
        """A draw that was admitted, where anything is limited, was not made."""
        ring = self._limited_ring
        if ring is not None and self._limiter_version[0]:
            ring.flow.take_back(count)

    def _in_turn(
        self,
        count: int,
        min_size: int | None,
        timeout: float | None,
        draw: Callable[[], Any],
        queued: Callable[[Batch], Any],
    ) -> Any:
        """A sample, once it may be made.

        Args:
            count: how many items.
            min_size: how many have to be there.
            timeout: seconds to wait for them; None: as long as it takes.
            draw: makes it.
            queued: makes it of what came out of a queue.
        """
        if min_size is not None and min_size < 0:
            raise ValueError(f"min_size has to be at least 0, got {min_size}")
        storage: Storage = self._storage
        if not isinstance(storage, RingBacked):
            raise TypeError(
                "min_size and timeout need a storage of this package; "
                f"{type(storage).__name__} is not one"
            )
        with patience.within(timeout):
            turn = self._turn(count, min_size)
            if turn is None:
                return draw()
            try:
                batch = self._taken(turn.ring, count) if turn.is_queue else None
                return draw() if batch is None else queued(self._finished(*batch))
            except BaseException:
                turn.give_back()
                raise

    def _turn(self, count: int, min_size: int | None = None) -> Turn | None:
        """Waits until so many items may be drawn, which count as drawn then; None: no limits."""
        storage = self._storage
        ring = self._first_ring(min_size) if isinstance(storage, RingBacked) else None
        if ring is None:
            return None
        is_queue, version = ring.flow.is_queue, int(ring.flow.version[0])
        if is_queue:
            self._require_no_choice()
        return Turn(ring, is_queue, version, ring.flow.admit(count, min_size or 0))

    def _first_ring(self, min_size: int | None) -> Ring | None:
        """The ring; waited for, where there has to be something in it and nobody has written."""
        storage = self._storage
        assert isinstance(storage, RingBacked)
        ring = storage.ring
        if ring is not None or not (min_size or self._limited):
            return ring
        least = max(1, min_size or 0, 1 if (found := self.rate_limiter) is None else found.min_size)
        first_ring(storage.engine, least)
        self._choose_path()
        return storage.ring

    def _require_no_choice(self) -> None:
        """Out of a queue the oldest items come, when they are asked for."""
        if self._prefetcher is not None or type(self._sampler).sample is not RandomSampler.sample:
            asked = (
                "prefetch" if self._prefetcher is not None else f"a {type(self._sampler).__name__}"
            )
            raise ValueError(
                "the buffer is a queue (max_times_sampled), which hands items out first in, first "
                f"out, when they are asked for; {asked} cannot be had with it"
            )

    def _taken(self, ring: Ring, count: int) -> Batch | None:
        """The oldest items of a queue, as the storage has them; None if it is none any more."""
        index = torch.empty(count, dtype=torch.int64)
        tickets = torch.full_like(index, _NOT_TAKEN)
        lanes = lanes_of(self._storage)
        while True:
            taken = False
            try:
                taken = ring.flow.take(index.numpy(), tickets.numpy())
                if not taken:
                    return None
                where = unravel(index, lanes) if lanes else index
                data = self._held(where, {GENERATION: tickets})
                if data is not None:
                    break  # else the buffer was emptied meanwhile
            finally:
                # An interrupt may come between the two: what was taken says its tickets.
                if taken or (count and int(tickets[0]) != _NOT_TAKEN):
                    ring.flow.release()
        info: dict[str, Any] = {INDEX: where}
        if self._track_generations or self.shared:
            info[GENERATION] = tickets
        return data, info

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
            state = None if generator is None else between_forks(generator.get_state)
            index, found = sampler.sample(self._storage, self._batch_size)
            ran_out = sampler.ran_out

        def undo() -> None:
            with self._choosing():
                sampler._rewind(position)
                if generator is not None and state is not None:
                    between_forks(generator.set_state, state)

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
        if self._limited_ring is not None:
            self._limited_ring.require_linked()
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
