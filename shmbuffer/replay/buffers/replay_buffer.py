"""The buffer: a storage, a sampler and a writer, and what goes in and out of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.errors import EmptyBufferError
from shmbuffer.replay.buffers.access import StorageOrder, swap_dims
from shmbuffer.replay.buffers.arguments import refuse
from shmbuffer.replay.buffers.whole import Whole
from shmbuffer.replay.keys import GENERATION, INDEX, WEIGHT_KEYS
from shmbuffer.replay.samplers import PrioritizedSampler, RandomSampler, Sampler
from shmbuffer.replay.samplers.sampler import draw_key
from shmbuffer.replay.storages import ListStorage, Storage
from shmbuffer.replay.storages.indexing import unravel
from shmbuffer.replay.storages.ring_storage import RingStorage
from shmbuffer.replay.storages.rows import Drawn, Rows
from shmbuffer.replay.structure import stack
from shmbuffer.replay.transforms import Transform, compose
from shmbuffer.replay.writers import RoundRobinWriter, Writer

DEFAULT_CAPACITY = 1000  # of the ListStorage that a buffer without a storage gets, as in TorchRL
_ATTEMPTS = 16  # to read what a sampler of somebody else's chose, where other processes write


class ReplayBuffer(StorageOrder, Whole):
    """A replay buffer made of three parts.

    Where all parts are of this package, a batch is one native call: ``extend`` is claim, copy,
    commit; ``sample`` is draw, gather and validate. Parts of your own work through `Storage`,
    `Sampler` and `Writer`.

    Args:
        storage: where the items are; None is a ``ListStorage(1000)``. Or something to call that
            makes one.
        sampler: who draws; None is a `RandomSampler`.
        writer: who decides where the next item goes; None is a `RoundRobinWriter`.
        collate_fn: called with what the storage gives for a batch; None takes it as it is (a list
            is stacked).
        pin_memory: have samples in pinned memory.
        transform: called with every sample and every ``rb[i]``; one, several, or a `Compose`. See
            `append_transform`.
        transform_factory: called without arguments for the transform, in place of ``transform``.
        batch_size: of ``sample()`` and of iteration.
        dim_extend: dimension of the data along which ``extend`` appends; None is
            ``storage.ndim - 1``.
        generator: of the draws; None is torch's default one.
        shared: treat the buffer as shared also where its storage is in anonymous memory: samples
            carry ``index_generation``, reads are validated copies. A storage in a directory is
            shared by itself.
        weight_key: name of the importance weights in a sample; None is ``"_weight"`` and
            ``"priority_weight"``, one tensor under both.
        **later: ``prefetch``, ``checkpointer``, ``sample_unit``, ``consume_after_n_samples``,
            ``delayed_init``, ``service_backend``, ``service_backend_options``, ``transport``,
            ``transport_options``, ``compilable``: known from TorchRL, not there yet.

    Raises:
        NotImplementedError: one of ``later`` asks for something.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
        >>> rb.extend(torch.arange(3))
        tensor([0, 1, 2])
        >>> rb.sample().shape
        torch.Size([4])

    Source: ``torchrl.data.ReplayBuffer``.
    """

    family: ClassVar[str] = "ReplayBuffer"
    """The name under which a directory remembers this class and those derived from it."""
    default_writer: ClassVar[type[RoundRobinWriter]] = RoundRobinWriter
    _mapping = "dict"  # what a plain dict is in the data

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        transform: Transform | Iterable[Transform] | None = None,
        transform_factory: Callable[[], Transform] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        weight_key: str | None = None,
        **later: Any,
    ) -> None:
        refuse(type(self).__name__, later)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size has to be at least 1, got {batch_size}")
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._transform = compose(transform, transform_factory)
        self._batch_size = batch_size
        self._dim_extend = dim_extend
        self._generator = generator
        self._shared = shared
        self._weight_key = weight_key
        self._weight_keys = WEIGHT_KEYS if weight_key is None else (weight_key,)
        self._storage: Storage = (
            ListStorage(DEFAULT_CAPACITY) if storage is None else _made(storage)
        )
        self._sampler: Sampler = RandomSampler() if sampler is None else _made(sampler)
        self._writer: Writer = self.default_writer() if writer is None else _made(writer)
        if self.dim_extend < 0 or (
            dim_extend and self._storage.ndim <= dim_extend and self._storage.ndim > 1
        ):
            raise ValueError(
                f"dim_extend has to be from 0 to ndim - 1 = {self._storage.ndim - 1}, "
                f"got {dim_extend}"
            )
        self._join()

    # -- writing -------------------------------------------------------------------------------

    def add(self, data: Any) -> int | torch.Tensor:
        """Write one item ``[*lanes, ...]``.

        Returns:
            Its index, an int; where the storage has lanes, int64 ``[lanes, ndim]``.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed.
            RingOverrunError: the ring came round to a slot that a living writer is filling.

        Cost: one native call.
        """
        if len(self._transform):
            data = self._transform.inv(data)
        return self._write(data, True, None)

    def extend(self, data: Any) -> torch.Tensor:
        """Write a batch: whole or not at all, also if the process is killed in the middle.

        Args:
            data: ``[n, *lanes, ...]`` (with ``dim_extend`` d, n is dimension d of the data). A list
                is a stack of items; a tuple or dict is a PyTree.

        Returns:
            Indices, int64 ``[n]``; where the storage has lanes, ``[n * lanes, ndim]``. Of more
            items than the capacity the last ones stay.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed.
            RingOverrunError: the ring came round to a slot that a living writer is filling.

        Cost: one native call, and 0.25 µs a leaf.
        """
        index = self._write(self._batch_of(data), False, None)
        assert isinstance(index, torch.Tensor)
        return index

    # -- sampling ------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch.

        Args:
            batch_size: how many items; None is the constructor's. Where both are given and differ,
                this one wins and a warning says so.
            return_info: return ``(data, info)``; info has ``"index"``, and, where there are any,
                the weights and ``"index_generation"``.

        Returns:
            The data ``[batch_size, ...]`` in the form in which they were written.

        Raises:
            EmptyBufferError: nothing to draw from.
            RuntimeError: no batch size anywhere.

        Cost: one native call; 0.7 µs a leaf for the tensors that it fills.
        """
        data, info = self._sample(self._count(batch_size))
        return (data, info) if return_info else data

    def __iter__(self) -> Iterator[Any]:
        """Samples, until the sampler has run out; a `RandomSampler` never does.

        Raises:
            RuntimeError: the constructor was given no batch size.
        """
        if self._batch_size is None:
            raise RuntimeError("iteration needs a batch size: give batch_size to the constructor")
        while not self._sampler.ran_out:
            yield self.sample()

    def update_priority(self, index: Any, priority: Any, *, generation: Any = None) -> Any:
        """Change priorities.

        Args:
            index: what a sample or a write gave: ``[n]``, ``[n, ndim]``, an int.
            priority: ``[n]`` or one number; finite and not negative.
            generation: ``index_generation`` of the sample, ``[n]``: an item that was written over
                since is left alone, and counted as stale. None sets whatever is there.

        Returns:
            `PriorityUpdate`: how many were applied, and how many were stale.

        Raises:
            ValueError: NaN, infinite or negative; nothing was changed.
            IndexError: out of range; nothing was changed.

        Cost: one native call.
        """
        if generation is None:
            return self._sampler.update_priority(index, priority, storage=self._storage)
        return self._sampler.update_priority(
            index, priority, storage=self._storage, generation=generation
        )

    def mark_update(self, index: Any) -> None:
        """Give the items at ``index`` the default priority."""
        self._sampler.mark_update(index, storage=self._storage)

    # -- inside --------------------------------------------------------------------------------

    def _batch_of(self, data: Any) -> Any:
        """A batch as the storage takes it: stacked, transformed, the right dimension first."""
        if type(data) is list and isinstance(self._storage, RingStorage):
            data = stack(data)
        if len(self._transform):
            data = self._transform.inv(data)
        if self.dim_extend:
            data = swap_dims(data, self.dim_extend)
        return data

    def _write(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> int | torch.Tensor:
        writer, storage = self._writer, self._storage
        if self._native_write and isinstance(storage, RingStorage):
            given = priorities if self._ring_priorities else None
            first, count = storage.append(data, single, given)
            index = storage.written(first, count, single=single)
            if self._tell_sampler:
                (self._sampler.add if single else self._sampler.extend)(index)
            if given is not priorities:
                self._sampler.update_priority(index, priorities, storage=storage)
            return index
        index = writer.add(data) if single else writer.extend(data)
        if index is not None:
            if single:
                self._sampler.add(index)
            else:
                self._sampler.extend(index)
            if priorities is not None:
                self._sampler.update_priority(index, priorities, storage=storage)
        return index  # type: ignore[no-any-return]

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
                stacklevel=3,
            )
        if batch_size < 0:
            raise ValueError(f"batch_size has to be at least 0, got {batch_size}")
        return batch_size

    def _draw(self, rows: Rows, count: int) -> Drawn:
        """One native call: draw, gather, validate, weigh."""
        sampler = self._sampler
        beta = sampler.beta if isinstance(sampler, PrioritizedSampler) else None
        drawn = rows.sample(count, draw_key(sampler._rng), beta)
        if beta is not None and sampler.dtype is not torch.float32:  # type: ignore[attr-defined]
            tensors, index, tickets, weights = drawn
            return tensors, index, tickets, weights.to(sampler.dtype)  # type: ignore[union-attr, attr-defined]
        return drawn

    def _sample(self, count: int) -> tuple[Any, dict[str, Any]]:
        rows = self._rows()
        storage = self._storage
        if self._native_sample and isinstance(storage, RingStorage):
            if rows is None:
                raise EmptyBufferError("the buffer is empty: write something before sampling")
            tensors, index, tickets, weights = self._draw(rows, count)
            lanes = rows.leaves.lanes
            info: dict[str, Any] = {INDEX: unravel(index, lanes) if lanes else index}
            if weights is not None:
                info.update(dict.fromkeys(self._weight_keys, weights))
            if self._track_generations or self.shared:
                info[GENERATION] = tickets
            data = storage.to_device(rows.leaves.build(tensors, (count,)))
        else:
            data, info = self._sample_by_parts(count)
        data = self._collate(data)
        if len(self._transform):
            data = self._transform(data)
        return (pin(data) if self._pin_memory else data), info

    def _sample_by_parts(self, count: int) -> tuple[Any, dict[str, Any]]:
        """Ask the sampler, then the storage: for parts that are somebody else's."""
        for attempt in range(_ATTEMPTS):
            index, found = self._sampler.sample(self._storage, count)
            try:
                data = self._storage.get(index)
                break
            except IndexError:  # written over between the two, where others write
                if not self.shared or attempt == _ATTEMPTS - 1:
                    raise
        info = {INDEX: index, **found}
        weights = [info.pop(key) for key in WEIGHT_KEYS if key in info]
        if weights:
            info.update(dict.fromkeys(self._weight_keys, weights[0]))
        return data, info


def pin(data: Any) -> Any:
    """``data`` in pinned memory."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, dict):
        return {key: pin(value) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return type(data)(pin(value) for value in data)
    return data


def _made(part: Any) -> Any:
    """A part, or what makes one."""
    return part() if callable(part) and not isinstance(part, (Storage, Sampler, Writer)) else part
