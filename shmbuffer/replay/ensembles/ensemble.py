"""Several buffers as one to sample from: each row of a sample is from one of them.

    ensemble[i].extend(data)  ──▶  buffer i

    ensemble.sample()  ──▶  sampler: which buffers, and what in them
                       ──▶  each buffer: rows, its collate_fn, its transform
                       ──▶  collate_fn of the list of them, transform  ──▶  [rows, batch / rows]

Each buffer reads and validates its rows as it does for samples of its own, so what it shares with
other processes is never torn here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from shmbuffer.memory import deadline
from shmbuffer.numpy.keys import GENERATION, INDEX
from shmbuffer.replay.buffers import ReplayBuffer, drawing
from shmbuffer.replay.buffers.access import _is_key
from shmbuffer.replay.buffers.prefetch import Batch
from shmbuffer.replay.eager import eager
from shmbuffer.replay.ensembles.buffers import Buffers
from shmbuffer.replay.ensembles.members import Ensemble, named
from shmbuffer.replay.ensembles.rows import (
    BUFFER_IDS,
    stack_batches,
    stack_infos,
    with_infos,
)
from shmbuffer.replay.ensembles.sampler import SamplerEnsemble, Weights
from shmbuffer.replay.ensembles.storage import StorageEnsemble, local
from shmbuffer.replay.ensembles.turns import Row, Turns
from shmbuffer.replay.ensembles.writer import WriterEnsemble
from shmbuffer.replay.samplers import PrioritizedSampler
from shmbuffer.replay.storages.indexing import is_one
from shmbuffer.replay.transforms import Transform
from shmbuffer.replay.units import Transition

Collate = Callable[[Any], Any]


class ReplayBufferEnsemble(Buffers):
    """Several buffers, sampled as one.

    A sample is ``[rows, batch_size / rows]``, each row from one buffer; `SamplerEnsemble` says how
    buffers are chosen. Of TensorDicts it has the entries that a `TensorDictReplayBuffer` gives,
    where ``"index"`` is a nested TensorDict: ``("index", "buffer_ids")`` and ``("index",
    "index")``. Rows that differ in keys or shapes are stacked lazily. Samples go back to
    `update_tensordict_priority`, which finds the buffers.

    Write into the buffers: ``ensemble[i].extend(data)``. ``ensemble[i]`` is the i-th buffer,
    ``ensemble[:, index]`` reads the same places of all, any other index gives an ensemble of those
    that it names. Its ``len`` is the number of buffers; ``stats()`` counts items.

    Args:
        *rbs: the buffers.
        storages: in place of buffers, together with ``samplers`` and ``writers``: what to make
            them of.
        samplers: see there. ``p``, ``sample_from_all`` and ``num_buffer_sampled`` may be given to
            it, or here.
        writers: see there.
        transform: called with every sample, after those of the buffers.
        batch_size: of ``sample()`` and of iteration, in items of all buffers together.
        collate_fn: called with the list of what the buffers gave; None stacks it.
        collate_fns: one for each buffer, or None for its own.
        p: see `SamplerEnsemble`; so are ``sample_from_all`` and ``num_buffer_sampled``.
        sample_from_all: see there.
        num_buffer_sampled: see there.
        routing_key: entry of the data with the number of the buffer that an item is for: has
            ``ensemble.extend(data)`` write each item there.
        routing_dim: the same for data whose dimension ``routing_dim`` has an entry for each buffer.
        generator: of the choice and of the draws in all buffers. None leaves the buffers theirs.
        shared: see `ReplayBuffer`.
        **kwargs: see `ReplayBuffer`.

    Raises:
        RuntimeError: both buffers and parts.
        TypeError: neither, or something that is no buffer.
        NotImplementedError: a ``sample_unit``, also of one of the buffers.
        ValueError: parts of different numbers; both ``routing_key`` and ``routing_dim``.

    It can be passed to another process where each of its buffers can.

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

        What limits samples of a buffer (`RateLimiter`) limits the rows that are of it: each waits,
        and counts, as a sample of that buffer does. Out of a queue come its oldest items. Batches
        are made ahead (``prefetch``) only where no buffer is limited.

        Args:
            batch_size: how many items in all; None is the constructor's.
            return_info: return ``(data, info)``; info is a TensorDict with ``"index"`` and what
                the samplers of the buffers know.
            include_info: False leaves index and weights out of a sample of TensorDicts.
            min_size: not there; ask the buffers.
            timeout: seconds to wait for a `RateLimiter`, in all; None: as long as it takes.
            lease: not there; ask the buffers.

        Returns:
            ``[rows, batch_size / rows, ...]``.

        Raises:
            RuntimeError: no batch size anywhere; it cannot be divided among the rows (also a
                ValueError); a transform has changed the batch size, so that index and weights do
                not fit.
            EmptyBufferError: nothing to draw from in a buffer that was chosen.
            RateLimitTimeout, RateLimitError: items have to be written first into a buffer that was
                chosen; the sample counts for nothing.
            NotImplementedError: ``min_size``.

        Cost: a draw and a read for each row; rows are copied once more to be stacked.
        """
        self._delivering(lease, self._next)
        if min_size is not None:
            raise NotImplementedError(
                "a sample of an ensemble has no min_size: wait for the items of each buffer, "
                "ensemble[i].sample(min_size=...), or give the buffers a RateLimiter(min_size=...)"
            )
        with deadline.within(timeout):
            data, info = self._next(self._count(batch_size))
        if include_info is not False and isinstance(data, TensorDictBase):
            data, info = with_infos(data, info)  # type: ignore[arg-type] # a TensorDict here
        return (data, info) if return_info else data

    # -- the buffers ---------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """A buffer, an ensemble of some of them, or items of one or several.

        Returns:
            ``ensemble[i]``: the buffer. ``ensemble[i, index]``: its items. ``ensemble[:, index]``:
            those of each, stacked as a sample is. ``ensemble[1:]``: an ensemble.
        """
        if isinstance(index, str) or _is_key(index):
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
        """Every item of every buffer in storage order: ``ensemble[:, :end]``."""
        return self[:, :end]

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Items in storage order, one buffer after the other; see `ReplayBuffer.iter_in_order`."""
        for rb in self._members:
            yield from rb.iter_in_order(chunk)

    # -- inside --------------------------------------------------------------------------------

    def _next(self, count: int) -> Batch:
        """The next batch; where one of the buffers is limited it is not made ahead."""
        if not self._turns.are_needed():
            return super()._next(count)
        self._drop_prefetched()
        chosen = self._sampler.shares(self._storage, count)
        share = count // len(chosen)
        return self._turns.sample(chosen, share, partial(self._drawn, share), self._joined)

    def _drawn(self, share: int, at: int) -> Row:
        """A row as the sampler of its buffer chooses it."""
        index, known = self._sampler._draw(at, self._members[at]._storage, share)
        return self._row(at, index, dict(known))

    def _row(self, at: int, index: Any, known: dict[Any, Any]) -> Row:
        """A row that its buffer reads and validates."""
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
        """What rows of other buffers have where those of one have weights or tickets.

        Weights of 1, they are drawn uniformly; tickets of -1, nobody else writes there.
        """
        found: dict[str, float] = {}
        for rb in self._members:
            if isinstance(rb._sampler, PrioritizedSampler):
                keys = rb._weight_keys if self._weight_key is None else self._weight_keys
                found.update(dict.fromkeys(keys, 1.0))
            if rb.plan.info.generation:
                found[GENERATION] = -1
        return found

    def _finished_row(self, at: int, data: Any) -> Any:
        """What one buffer has read, through its ``collate_fn`` and its transforms."""
        rb, collate = self._members[at], self._collate_fns[at]
        data = rb._collate(data) if collate is None else collate(rb._storage.uncollated(data))
        return rb._transform(data) if len(rb._transform) else data

    def _items(self, at: int, index: Any) -> Any:
        """Items of one buffer, as a sample of it would have them."""
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
                # One that leaves out what does not fill a batch has to know how large it is.
                batch_size=share if getattr(sampler, "drop_last", False) else None,
            )
        )
        if mapping is not None:
            storage.mapping = mapping  # as its first buffer reads data
    return tuple(made)
