"""An ensemble of buffers. Each row of a sample comes from one of the buffers.

    ensemble[i].extend(data)  ──▶  buffer i

    ensemble.sample()  ──▶  sampler: chooses the buffers, and items in them
                       ──▶  each buffer: reads a row, calls its collate_fn and its transform
                       ──▶  collate_fn of the list of rows, transform  ──▶  [rows, batch / rows]

Each buffer reads and validates its rows in the same way as for its own samples, so a sample never
contains torn items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.buffers.calls.stored_items import is_key
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.ensembles.joint_buffer import Collate, JointBuffer
from shmbuffer.ensembles.joint_parts import (
    StorageEnsemble,
    WriterEnsemble,
    member_numbers,
    refusal,
    select,
)
from shmbuffer.ensembles.joint_rows import (
    BUFFER_IDS,
    route_items,
    stack_batches,
    stack_infos,
    with_infos,
    written_tickets,
)
from shmbuffer.ensembles.sampler_ensemble import SamplerEnsemble, Weights
from shmbuffer.ensembles.turns import Row, Shares
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.memory.format.streams import check_streams, expand_streams
from shmbuffer.memory.system import deadline
from shmbuffer.storages.indexing import is_one
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.transforms import Transform
from shmbuffer.units.unit import Transition


class ReplayBufferEnsemble(JointBuffer):
    """Samples several buffers as one.

    A sample has the shape ``[rows, batch_size / rows]``. Each row comes from one buffer, which a
    `SamplerEnsemble` chooses. A sample of TensorDicts has the same entries as a sample of
    `TensorDictReplayBuffer`. Its ``"index"`` is a nested TensorDict of ``"buffer_ids"`` and
    ``"index"``. Rows that differ in keys or shapes are stacked lazily. Pass a sample with
    priorities to `update_tensordict_priority`.

    Items are written to the individual buffers: ``ensemble[i].extend(data)``. ``ensemble[i]``
    returns a buffer, ``ensemble[:, index]`` reads from all buffers, and any other index returns an
    ensemble of the selected buffers. The length is the number of buffers; ``stats()`` counts items.
    An ensemble can be pickled if its buffers can be pickled. The class is registered as a
    `ReplayBuffer`. Methods that only a single buffer supports, such as ``reserve``, raise
    TypeError.

    Args:
        *rbs: the buffers.
        storages: storages to create buffers from, together with ``samplers`` and ``writers``,
            instead of ``rbs``.
        samplers: one sampler for each storage. ``p``, ``sample_from_all`` and
            ``num_buffer_sampled`` can be set in this `SamplerEnsemble`.
        writers: one writer for each storage.
        transform: transform that is called with every sample, after the transforms of the buffers.
        batch_size: number of items per sample, over all buffers.
        collate_fn: function that is called with the list of the buffers' rows. None stacks them.
        collate_fns: one ``collate_fn`` per buffer, which replaces the buffer's own. None instead of
            a function keeps the buffer's own.
        p: see `SamplerEnsemble`.
        sample_from_all: see `SamplerEnsemble`.
        num_buffer_sampled: see `SamplerEnsemble`.
        routing_key: key of an entry of the data that contains the number of the buffer for each
            item. With this argument, ``ensemble.extend(data)`` writes to the selected buffers.
        routing_dim: dimension of the data that has one entry per buffer, as an alternative to
            ``routing_key``.
        generator: random generator for the choice of buffers and for all draws. If None, leaves the
            generators of the buffers unchanged.
        shared: see `ReplayBuffer`.
        **kwargs: see `ReplayBuffer`.

    Raises:
        RuntimeError: both buffers and storages, samplers or writers were passed.
        TypeError: neither was passed, or an argument is not a buffer.
        NotImplementedError: the ensemble or one of the buffers has a ``sample_unit``.
        ValueError: the numbers of storages, samplers and writers differ, or both ``routing_key``
            and ``routing_dim`` were passed.

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
    _what = "buffer"

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
            raise ValueError("routing_key and routing_dim cannot be combined; pass one of them")
        for rb in rbs:
            if issubclass(type(rb), JointBuffer):
                raise TypeError("an ensemble cannot contain another ensemble; pass its buffers")
            if not isinstance(rb, ReplayBuffer):
                raise TypeError(f"an ensemble must consist of buffers, got {rb!r}")
        for unit in (kwargs.get("sample_unit"), *(rb._parts.unit for rb in rbs)):
            if unit is not None and type(unit) is not Transition:
                raise NotImplementedError(
                    f"an ensemble samples items, not {type(unit).__name__}, because its samples "
                    "consist of rows of equal length; sample from the buffer with the sample_unit "
                    "directly"
                )
        self._routing_key, self._routing_dim = routing_key, routing_dim
        count = len(rbs) if rbs else len(storages or ())
        if collate_fns is not None and len(collate_fns) != count:
            raise ValueError(
                f"collate_fns must have one function for each buffer, got {len(collate_fns)} "
                f"functions for {count} buffers"
            )
        if rbs:
            if any(part is not None for part in (storages, samplers, writers)):
                raise RuntimeError(
                    "pass either buffers, or storages, samplers and writers from which buffers are "
                    "created"
                )
            samplers = SamplerEnsemble(
                *(rb._sampler for rb in rbs),
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )
        elif storages is None or samplers is None or writers is None:
            raise TypeError(
                "an ensemble needs buffers, or all three of storages=, samplers= and writers="
            )
        else:
            samplers.sample_from_all |= sample_from_all
            samplers.p = samplers.p if p is None else p
            if num_buffer_sampled is not None:
                samplers.num_buffer_sampled = num_buffer_sampled
            share = None if batch_size is None else batch_size // samplers.num_buffer_sampled
            rbs = _create_buffers(storages, samplers, writers, collate_fns, share)
        super().__init__(
            rbs,
            samplers,
            storages,
            writers,
            collate_fn=collate_fn,
            collate_fns=collate_fns,
            transform=transform,
            batch_size=batch_size,
            generator=generator,
            shared=shared,
            **kwargs,
        )

    # -- writing -------------------------------------------------------------------------------

    @eager
    def add(self, data: Any, timeout: float | None = None, streams: int | None = None) -> Any:
        """Writes one item into the buffer that its ``routing_key`` entry selects; see `extend`."""
        if self._routing_key is None:
            raise RuntimeError(refusal("an item was given to the ensemble"))
        if not isinstance(data, TensorDictBase) or data.batch_dims:
            raise ValueError(
                "add() needs one item, which is a TensorDict with batch size []; use extend() to "
                "write a batch"
            )
        return self.extend(data.unsqueeze(0), timeout=timeout, streams=streams)[0]

    @eager
    def extend(
        self,
        data: Any,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> Any:
        """Writes each item of a batch into the buffer that the routing key or dimension selects.

        Args:
            data: a TensorDict ``[...]``, which is flattened.
            update_priority: see `TensorDictReplayBuffer.extend`.
            timeout: maximum wait in seconds for the entire call; see `ReplayBuffer.add`.
            streams: streams of the flattened items, ``[n]``; see `ReplayBuffer.extend`.
            stream_dim: not supported. Must be None.

        Returns:
            A TensorDict ``[n]`` in the order of the flattened data. For each item it contains the
            number of the buffer, ``"buffer_ids"``, the ``"index"`` in the buffer, and the
            ``"index_generation"`` if samples of all buffers have this entry.

        Raises:
            RuntimeError: the ensemble has neither a routing key nor a routing dimension. Write to
                ``ensemble[i]`` instead.
            TypeError, ValueError: a buffer number in the data is invalid. Nothing was changed.
            SchemaMismatchError: an item does not match the schema of its buffer. Items may already
                have been written to other buffers.
        """
        if self._routing_key is None and self._routing_dim is None:
            raise RuntimeError(refusal("a batch was given to the ensemble"))
        if stream_dim is not None:
            raise TypeError(
                "stream_dim: an ensemble distributes single items to its buffers; pass the stream "
                "of each item as streams instead. Nothing was written"
            )
        if len(self._transform):
            data = self._transform.inv(data)
        items, ids = route_items(data, len(self._members), self._routing_key, self._routing_dim)
        known: dict[str, Any] = (
            {} if update_priority is None else {"update_priority": update_priority}
        )
        of = None if streams is None else expand_streams(check_streams(streams), len(ids))
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        tickets = cpu.full((len(ids),), -1, dtype=torch.int64)
        with deadline.limit_waits(timeout):
            for at in range(len(self._members)):
                rows = torch.nonzero(ids == at).flatten()
                if len(rows):
                    if of is not None:
                        known["streams"] = of[rows.numpy()]
                    rb = self._members[at]
                    ring = ring_of(rb._storage)
                    before = 0 if ring is None else ring.head
                    written.append((rows, rb.extend(items[rows], **known)))
                    tickets[rows] = written_tickets(rb, before, written[-1][1])
        index = cpu.zeros(
            (len(ids), *(written[0][1].shape[1:] if written else ())), dtype=torch.int64
        )
        for rows, where in written:
            index[rows] = where
        found = TensorDict({BUFFER_IDS: ids, INDEX: index}, [len(ids)])
        return found.set(GENERATION, tickets) if self._writer.tracks_generations else found

    # -- sampling ------------------------------------------------------------------------------

    def _shares(self, count: int, min_size: int | None) -> tuple[Shares, dict[int, int]]:
        chosen = self._sampler.shares(self._storage, count)
        return [(at, count // len(chosen)) for at in chosen], {}

    def _batch(self, count: int, min_size: int | None) -> Batch:
        if min_size is not None:
            raise NotImplementedError(
                "sample() of an ensemble does not support min_size; use "
                "ensemble[i].sample(min_size=...), or a RateLimiter(min_size=...) for each buffer"
            )
        return super()._batch(count, None)

    def _to_rows(self, index: Any, known: Any) -> Any:
        return [
            (int(row.get(BUFFER_IDS)), row.get(INDEX), dict(facts.items(True, True)))
            for row, facts in zip(index.unbind(0), known.unbind(0), strict=True)
        ]

    def _with_info(self, data: Any, info: Any) -> tuple[Any, Any]:
        return with_infos(data, info)

    def _join(self, rows: list[Row]) -> Batch:
        buffer_ids, batches, infos = [], [], []
        for at, data, info in rows:
            if self._weight_key is not None:
                keys = self._members[at].plan.info.weight_keys
                weights = [info.pop(key) for key in keys if key in info]
                info.update({self._weight_key: weights[0]} if weights else {})
            buffer_ids.append(at)
            batches.append(self._finish_row(at, data))
            infos.append(info)
        return self._collate(batches), stack_infos(buffer_ids, infos, self._default_info())

    # -- the buffers ---------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Returns a buffer, ``ensemble[i]``, its items, ``ensemble[i, index]``, or an ensemble.

        ``ensemble[:, index]`` returns the items of each buffer, stacked as in a sample.
        """
        if is_key(index):
            return self[:, :][index]
        if not isinstance(index, tuple) or len(index) == 1:
            return select(self, index)
        items = index[1] if len(index) == 2 else index[1:]
        found = member_numbers(index[0], len(self), "buffer")
        if isinstance(found, int):
            return self._items(found, items)
        data = self._collate([self._items(at, items) for at in found])
        return self._apply_transform(data)

    def _subset(self, found: list[int]) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(
            *(self._members[at] for at in found),
            transform=self._transform,
            batch_size=self.batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[at] for at in found],
            routing_key=self._routing_key,
            generator=self.generator,
            shared=self._parts.treated_as_shared,
            **self._sampler.choice(found),
        )

    def __len__(self) -> int:
        """Returns the number of buffers."""
        return len(self._members)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Returns all items of all buffers in storage order: ``ensemble[:, :end]``."""
        return self[:, :end]

    def _items(self, at: int, index: Any) -> Any:
        """Returns items of one buffer by index, collated and transformed like its samples."""
        rb = self._members[at]
        if self._collate_fns[at] is None or is_one(index):
            return rb[index]
        views = False if rb.shared else None
        return self._finish_row(at, rb.storage.fetch(index, dim_extend=rb.dim_extend, views=views))

    def _collate(self, data: Any) -> Any:
        return stack_batches(data) if self._collate_fn is None else self._collate_fn(data)


def _create_buffers(
    storages: StorageEnsemble,
    samplers: SamplerEnsemble,
    writers: WriterEnsemble,
    collate_fns: Sequence[Collate | None] | None,
    share: int | None,
) -> tuple[ReplayBuffer, ...]:
    """Creates a buffer from each storage with its sampler and writer.

    Args:
        storages: the storages, with their transforms.
        samplers: one sampler for each storage.
        writers: one writer for each storage.
        collate_fns: one function or None for each buffer, or None.
        share: number of items of one buffer in a sample, or None if it is not known.
    """
    count = len(storages)
    if not count == len(samplers) == len(writers):
        raise ValueError(
            f"an ensemble needs the same number of storages, samplers and writers, got {count}, "
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
                # A sampler with drop_last requires a batch size.
                batch_size=share if getattr(sampler, "drop_last", False) else None,
            )
        )
        if mapping is not None:
            storage.mapping = mapping  # keeps the mapping of the buffer that used the storage first
    return tuple(made)
