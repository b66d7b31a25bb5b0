"""Several buffers sampled as one: each row of a sample is from one of them.

    ensemble[i].extend(data)  ──▶  buffer i

    ensemble.sample()  ──▶  sampler: which buffers, and their items
                       ──▶  each buffer: rows, its collate_fn, its transform
                       ──▶  collate_fn of the list of rows, transform  ──▶  [rows, batch / rows]

Each buffer reads and validates its rows as for its own samples, so shared items are never torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from shmbuffer.buffers import ReplayBuffer
from shmbuffer.buffers.calls.access import is_key
from shmbuffer.buffers.data_path import drawing
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.ensembles.buffers import Buffers
from shmbuffer.ensembles.members import Ensemble, named
from shmbuffer.ensembles.sampler import SamplerEnsemble, Weights
from shmbuffer.ensembles.stacked_rows import (
    BUFFER_IDS,
    stack_batches,
    stack_infos,
    with_infos,
)
from shmbuffer.ensembles.storage import StorageEnsemble, local
from shmbuffer.ensembles.turns import Row, Turns
from shmbuffer.ensembles.writer import WriterEnsemble
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.memory.system import deadline
from shmbuffer.samplers import PrioritizedSampler
from shmbuffer.storages.indexing import is_one
from shmbuffer.tensors.eager import eager
from shmbuffer.torchrl.transforms import Transform
from shmbuffer.units import Transition

Collate = Callable[[Any], Any]


class ReplayBufferEnsemble(Buffers):
    """Several buffers, sampled as one.

    A sample is ``[rows, batch_size / rows]``, each row from one buffer, chosen by a
    `SamplerEnsemble`. Of TensorDicts it has the entries of a `TensorDictReplayBuffer`'s sample,
    ``"index"`` being a nested TensorDict of ``"buffer_ids"`` and ``"index"``. Rows that differ in
    keys or shapes are stacked lazily. Samples go back to `update_tensordict_priority`.

    Write into the buffers: ``ensemble[i].extend(data)``. ``ensemble[i]`` is the i-th buffer,
    ``ensemble[:, index]`` reads from all, any other index gives an ensemble of some. Its ``len`` is
    the number of buffers; ``stats()`` counts items. It can be pickled if its buffers can.

    Args:
        *rbs: the buffers.
        storages: instead of buffers, with ``samplers`` and ``writers``: the parts to make them of.
        samplers: see there; may have ``p``, ``sample_from_all`` and ``num_buffer_sampled`` already.
        writers: see there.
        transform: called with every sample, after those of the buffers.
        batch_size: of ``sample()`` and of iteration, over all buffers.
        collate_fn: called with the list of the buffers' rows; None stacks them.
        collate_fns: one for each buffer; None keeps its own.
        p: see `SamplerEnsemble`.
        sample_from_all: see there.
        num_buffer_sampled: see there.
        routing_key: entry of the data with the number of the buffer for an item; allows
            ``ensemble.extend(data)``.
        routing_dim: the same, for data with a dimension of one entry a buffer.
        generator: of the choice and of all draws. None leaves the buffers theirs.
        shared: see `ReplayBuffer`.
        **kwargs: see there.

    Raises:
        RuntimeError: both buffers and parts.
        TypeError: neither, or an argument that is no buffer.
        NotImplementedError: a ``sample_unit``, also of one of the buffers.
        ValueError: different numbers of parts; both ``routing_key`` and ``routing_dim``.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, ReplayBuffer
        >>> from shmbuffer import ReplayBufferEnsemble
        >>> one = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> other = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> rb = ReplayBufferEnsemble(
        ...     one, other, sample_from_all=True, batch_size=6
        ... )
        >>> index = rb[0].extend(torch.zeros(10)), rb[1].extend(torch.ones(10))
        >>> rb.sample()
        tensor([[0., 0., 0.],
                [1., 1., 1.]])

    Source: ``torchrl.data.ReplayBufferEnsemble``.
    """

    family = "ReplayBufferEnsemble"

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Transform | Iterable[Transform] | None = None,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
        collate_fns: Sequence[Collate | None] | None = None,
        p: Weights = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        routing_key: str | tuple[str, ...] | None = None,
        routing_dim: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        **kwargs: Any,
    ) -> None:
        if routing_key is not None and routing_dim is not None:
            raise ValueError("routing_key and routing_dim exclude each other; give one of them")
        for unit in (kwargs.get("sample_unit"), *(getattr(rb, "_sample_unit", None) for rb in rbs)):
            if unit is not None and type(unit) is not Transition:
                raise NotImplementedError(
                    f"an ensemble draws items, no {type(unit).__name__}: its samples are rows of "
                    "equal length, one of each buffer; sample a buffer with a sample_unit by itself"
                )
        self._routing_key, self._routing_dim = routing_key, routing_dim
        count = len(rbs) if rbs else len(storages or ())
        if collate_fns is not None and len(collate_fns) != count:
            raise ValueError(
                f"collate_fns are one for each buffer, got {len(collate_fns)} for {count}"
            )
        self._collate_fns = [None] * count if collate_fns is None else list(collate_fns)
        if rbs:
            if any(part is not None for part in (storages, samplers, writers)):
                raise RuntimeError(
                    "an ensemble is made of buffers, or of storages, samplers and writers, which "
                    "make the buffers; give one or the other"
                )
            for rb in rbs:
                if not isinstance(rb, ReplayBuffer):
                    raise TypeError(f"an ensemble is made of buffers, got {rb!r}")
                if isinstance(rb, ReplayBufferEnsemble):
                    raise TypeError("an ensemble is not a part of another; give it the buffers")
            storages = StorageEnsemble(
                *(rb._storage for rb in rbs), transforms=[rb._transform for rb in rbs]
            )
            samplers = SamplerEnsemble(
                *(rb._sampler for rb in rbs),
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )
            writers = WriterEnsemble(*(rb._writer for rb in rbs))
        elif storages is None or samplers is None or writers is None:
            raise TypeError(
                "an ensemble is made of buffers, or of storages=, samplers= and writers=, all three"
            )
        else:
            samplers.sample_from_all |= sample_from_all
            samplers.p = samplers.p if p is None else p
            if num_buffer_sampled is not None:
                samplers.num_buffer_sampled = num_buffer_sampled
            share = None if batch_size is None else batch_size // samplers.num_buffer_sampled
            rbs = _made_of(storages, samplers, writers, collate_fns, share)
        self._members = rbs
        self._turns = Turns(self._members)
        super().__init__(
            storage=storages,
            sampler=samplers,
            writer=writers,
            transform=transform,
            batch_size=batch_size,
            collate_fn=collate_fn,
            generator=generator,
            shared=shared,
            **kwargs,
        )
        if shared:
            for rb in self._members:
                rb.share()

    # -- sampling ------------------------------------------------------------------------------

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Any:
        """Draw a batch.

        Each row waits for the `RateLimiter` of its buffer, and counts, as a sample of that buffer
        does; rows of a queue are its oldest items. Prefetching needs buffers without a limiter.

        Args:
            batch_size: how many items in all; None is the constructor's.
            return_info: return ``(data, info)``; info is a TensorDict, of an
                `OfflineToOnlineReplayBuffer` a dict.
            include_info: False leaves index and weights out of a sample of TensorDicts.
            min_size: for an `OfflineToOnlineReplayBuffer`: wait until the online part has so many
                items, if it has a share.
            timeout: seconds to wait, in all; None: without end.
            lease: for the buffers only.

        Returns:
            ``[rows, batch_size / rows, ...]``; of an `OfflineToOnlineReplayBuffer`
            ``[batch_size, ...]``, rows of the data set first.

        Raises:
            RuntimeError: no batch size; it cannot be divided among the rows (also a ValueError); a
                transform has changed it, so that index and weights do not fit.
            EmptyBufferError: nothing to draw from in a chosen buffer.
            RateLimitTimeout, RateLimitError: items have to be written into a chosen buffer first.
            NotImplementedError: ``min_size``.

        Cost: a draw and a read for each row, and a copy to stack them.
        """
        self._delivering(lease, self._next)
        draw = self._drawing(min_size)
        with deadline.within(timeout):
            data, info = draw(self._count(batch_size))
        if include_info is not False and isinstance(data, TensorDictBase):
            data, info = self._with_info(data, info)
        return (data, info) if return_info else data

    def _drawing(self, min_size: int | None) -> Callable[[int], Batch]:
        if min_size is None:
            return self._next
        raise NotImplementedError(
            "a sample of an ensemble has no min_size: wait for the items of each buffer, "
            "ensemble[i].sample(min_size=...), or give the buffers a RateLimiter(min_size=...)"
        )

    def _with_info(self, data: Any, info: Any) -> tuple[Any, Any]:
        return with_infos(data, info)

    # -- the buffers ---------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """A buffer, ``ensemble[i]``; its items, ``ensemble[i, index]``; or an ensemble.

        ``ensemble[:, index]`` has the items of each, stacked as in a sample.
        """
        if is_key(index):
            return self[:, :][index]
        if not isinstance(index, tuple) or len(index) == 1:
            return Ensemble.__getitem__(self, index)
        items = index[1] if len(index) == 2 else index[1:]
        found = named(index[0], len(self), "buffer")
        if isinstance(found, int):
            return self._items(found, items)
        data = self._collate([self._items(at, items) for at in found])
        return self._transform(data) if len(self._transform) else data

    def _some(self, found: list[int]) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(
            *(self._members[at] for at in found),
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[at] for at in found],
            routing_key=self._routing_key,
            generator=self._generator,
            shared=self._shared,
            **self._sampler.choice(found),
        )

    def read_all_in_order(self, end: int | None = None) -> Any:
        """``ensemble[:, :end]``: every item of every buffer in storage order."""
        return self[:, :end]

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """`ReplayBuffer.iter_in_order` of one buffer after the other."""
        for rb in self._members:
            yield from rb.iter_in_order(chunk)

    # -- inside --------------------------------------------------------------------------------

    def _next(self, count: int) -> Batch:
        """The next batch, not made ahead if a buffer has a limiter."""
        if not self._turns.are_needed():
            return super()._next(count)
        self._drop_prefetched()
        chosen = self._sampler.shares(self._storage, count)
        share = count // len(chosen)
        return self._turns.sample(chosen, share, partial(self._drawn, share), self._joined)

    def _drawn(self, share: int, at: int) -> Row:
        """A row, chosen by the sampler of its buffer."""
        index, known = self._sampler._draw(at, self._members[at]._storage, share)
        return self._row(at, index, dict(known))

    def _row(self, at: int, index: Any, known: dict[Any, Any]) -> Row:
        """A row, read and validated by its buffer."""
        rb = self._members[at]
        return at, *drawing.chosen(rb.plan, local(index, rb._storage), known)

    def _gathered(self, index: Any, found: Any) -> Batch:
        """See `ReplayBuffer._gathered`."""
        return self._joined(
            [
                self._row(int(row.get(BUFFER_IDS)), row.get(INDEX), dict(known.items(True, True)))
                for row, known in zip(index.unbind(0), found.unbind(0), strict=True)
            ]
        )

    def _joined(self, rows: list[Row]) -> Batch:
        """A sample of these rows."""
        buffer_ids, batches, infos = [], [], []
        for at, data, info in rows:
            rb = self._members[at]
            if self._weight_key is not None:
                weights = [info.pop(key) for key in rb._weight_keys if key in info]
                info.update(dict.fromkeys(self._weight_keys, weights[0]) if weights else {})
            buffer_ids.append(at)
            batches.append(self._finished_row(at, data))
            infos.append(info)
        return self._finished(batches, stack_infos(buffer_ids, infos, self._fillings()))

    def _fillings(self) -> dict[str, float]:
        """For rows without: weights of 1, as drawn uniformly, and tickets of -1, as not shared."""
        found: dict[str, float] = {}
        for rb in self._members:
            if isinstance(rb._sampler, PrioritizedSampler):
                keys = rb._weight_keys if self._weight_key is None else self._weight_keys
                found.update(dict.fromkeys(keys, 1.0))
            if rb.plan.info.generation:
                found[GENERATION] = -1
        return found

    def _finished_row(self, at: int, data: Any) -> Any:
        """Items of one buffer, through its ``collate_fn`` and its transforms."""
        rb, collate = self._members[at], self._collate_fns[at]
        data = rb._collate(data) if collate is None else collate(rb._storage.uncollated(data))
        return rb._transform(data) if len(rb._transform) else data

    def _items(self, at: int, index: Any) -> Any:
        """Items of one buffer, by index, as in its samples."""
        rb = self._members[at]
        if self._collate_fns[at] is None or is_one(index):
            return rb[index]
        return self._finished_row(at, rb._fetch(index))

    def _collate(self, data: Any) -> Any:
        return stack_batches(data) if self._collate_fn is None else self._collate_fn(data)


def _made_of(
    storages: StorageEnsemble,
    samplers: SamplerEnsemble,
    writers: WriterEnsemble,
    collate_fns: Sequence[Collate | None] | None,
    share: int | None,
) -> tuple[ReplayBuffer, ...]:
    """A buffer of each storage, sampler and writer."""
    count = len(storages)
    if not count == len(samplers) == len(writers):
        raise ValueError(
            f"an ensemble is made of as many storages as samplers and writers, got {count}, "
            f"{len(samplers)} and {len(writers)}"
        )
    made = []
    for at, (storage, sampler, writer) in enumerate(
        zip(storages._members, samplers._members, writers._members, strict=True)
    ):
        mapping = getattr(storage, "mapping", None)
        made.append(
            ReplayBuffer(
                storage=storage,
                sampler=sampler,
                writer=writer,
                transform=None if storages._transforms is None else storages._transforms[at],
                collate_fn=None if collate_fns is None else collate_fns[at],
                # A sampler with drop_last needs the size of a batch.
                batch_size=share if getattr(sampler, "drop_last", False) else None,
            )
        )
        if mapping is not None:
            storage.mapping = mapping  # as in its first buffer
    return tuple(made)
