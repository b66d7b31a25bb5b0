"""The buffer: a storage, a sampler and a writer, and the data that go in and out."""

from __future__ import annotations

import math
import os
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Self

import torch

from shmbuffer.buffers.buffer_client import BufferClient
from shmbuffer.buffers.calls.dataset import BatchDataset
from shmbuffer.buffers.calls.reads import Reads
from shmbuffer.buffers.calls.saving import Saving
from shmbuffer.buffers.calls.stored_items import ConditionalUpdateResult, StoredItems
from shmbuffer.buffers.calls.writes import Writes
from shmbuffer.buffers.data_path.parts import Parts, UnmadeParts
from shmbuffer.buffers.data_path.priority_entry import PriorityUpdates
from shmbuffer.buffers.unsupported import refuse
from shmbuffer.items.indices import as_int
from shmbuffer.memory import RateLimiter
from shmbuffer.memory.system.progress import OnProgress
from shmbuffer.samplers.consuming_sampler import consuming_instead
from shmbuffer.samplers.rank import require_rank
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.saves import parquet_file
from shmbuffer.saves.checkpoints import Saves
from shmbuffer.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors import pinned
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form.tensor_batches import swap_dims
from shmbuffer.torchrl.transforms import Transform
from shmbuffer.units.unit import SampleUnit
from shmbuffer.writers.round_robin import RoundRobinWriter
from shmbuffer.writers.writer import Writer


class ReplayBuffer(BufferClient, Saves, metaclass=ABCMeta):  # so that an ensemble counts as one
    """A replay buffer made of three parts.

    If all parts are of this package, a batch is one native call: ``extend`` is claim, copy, commit;
    ``sample`` is draw, gather and validate. Parts of your own derive from `Storage`, `Sampler` and
    `Writer`.

    Args:
        storage: where the items are, or a function that makes one; None is a ``ListStorage(1000)``.
        sampler: draws items; None is a `RandomSampler`.
        writer: places new items; None is a `RoundRobinWriter`.
        collate_fn: called with the storage's items of a batch; None takes them as they are (a list
            is stacked).
        pin_memory: gather samples in pinned memory. It is reused once no part of a sample is held
            and the transfers from it have ended; see docs/memory.md. Without a GPU there is a
            warning, and ordinary memory.
        prefetch: draw and make so many batches ahead, also on a shared buffer; needs
            ``batch_size``. As many threads make them, or the caller's thread if that is measured to
            be faster; ``print(buffer.plan)`` says which. Batches are always drawn in the caller's
            thread, so both ways give the same ones. Items may be overwritten while a batch waits.
        transform: called with every sample and every ``rb[i]``; one, several, or a `Compose`. See
            `append_transform`.
        transform_factory: makes the transform when the buffer is first used, instead of
            ``transform``.
        batch_size: of ``sample()`` and of iteration.
        dim_extend: dimension of the data along which ``extend`` appends; None is
            ``storage.ndim - 1``.
        checkpointer: of the storage; None keeps the storage's own.
        generator: of the draws; None is torch's default one.
        rank: of this learner among several, from 0; None: torch.distributed's, else that in the
            variable ``RANK``, else 0. Draws on a shared buffer differ by rank; rank 0 draws as
            without one. With a ``generator`` only a rank that is given here counts.
        shared: treat the buffer as shared even in anonymous memory: samples carry
            ``index_generation``, reads are validated copies. A directory is always shared.
        compilable: accepted; the calls are marked for `torch.compile` either way.
        delayed_init: make the parts when the buffer is first used, so that it can be pickled
            before that with their factories. None is True with a ``transform_factory``.
        weight_key: name of the importance weights in a sample; None is ``"_weight"`` and
            ``"priority_weight"``, one tensor under both.
        rate_limiter: keeps writers and samplers in step, or makes a queue of the buffer; see
            `RateLimiter`. It belongs to the directory. None keeps its present limiter.
        sample_unit: makes a `Sequence` of steps of each item drawn, one transition over n of them
            (`NStep`), or the item with the frames before it (`FrameStack`). None leaves the item.
            Batch sizes count the draws.
        consume_after_n_samples: a `ConsumingSampler` with that ``max_sample_count``; not with
            ``prefetch``, or another sampler.
        **later: ``service_backend``, ``service_backend_options``, ``transport``,
            ``transport_options`` of TorchRL, so far only with their defaults.

    Raises:
        NotImplementedError: one of ``later`` is not the default.
        ValueError: ``prefetch``, or a sampler with ``drop_last``, without a batch size.
        TypeError: both ``transform`` and ``transform_factory``, or an unknown argument.

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
    """The name of this class, and of those derived from it, in a directory."""
    default_writer: ClassVar[type[RoundRobinWriter]] = RoundRobinWriter
    _mapping: ClassVar[str] = "dict"  # what a plain dict is in the data
    _own_options: ClassVar[tuple[str, ...]] = ()  # of a subclass, for its `Parts`
    _iterator: Iterator[Any] | None = None

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Iterable[Transform] | None = None,
        transform_factory: Callable[[], Transform] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        weight_key: str | None = None,
        rate_limiter: RateLimiter | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        **later: Any,
    ) -> None:
        own = {name: later.pop(name) for name in self._own_options if name in later}
        refuse(type(self).__name__, later)
        if batch_size is not None and (batch_size := as_int("batch_size", batch_size)) < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if prefetch is not None and (prefetch := as_int("prefetch", prefetch)) < 0:
            raise ValueError(f"prefetch must be at least 0, got {prefetch}")
        if prefetch and batch_size is None:
            raise ValueError(
                f"prefetch={prefetch} needs a fixed batch size; pass batch_size to the constructor"
            )
        if consume_after_n_samples is not None:
            sampler = consuming_instead(sampler, consume_after_n_samples, prefetch)
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory cannot be combined; pass one of them")
        if sample_unit is not None and not isinstance(sample_unit, SampleUnit):
            raise TypeError(
                f"sample_unit must be a SampleUnit, such as Sequence, got {sample_unit!r}"
            )
        self.compilable = bool(compilable)
        is_delayed = transform_factory is not None if delayed_init is None else delayed_init
        parts = (UnmadeParts if is_delayed else Parts)(
            family=self.family,
            mapping=self._mapping,
            makers={
                "storage": storage,
                "sampler": sampler,
                "writer": self.default_writer if writer is None else writer,
                "transform": transform_factory or transform,
                "is_factory": transform_factory is not None,
                "checkpointer": checkpointer,
                "rate_limiter": rate_limiter,
            },
            unit=sample_unit,
            collate_fn=collate_fn,
            pin_memory=pinned.wanted(pin_memory),
            batch_size=batch_size,
            dim_given=dim_extend,
            generator=generator,
            rank_given=require_rank(rank),
            treated_as_shared=shared,
            weight_key=weight_key,
            **own,
        )
        parts.prefetch(prefetch)
        if not is_delayed:
            parts.make()
        self._use(parts)

    def _use(self, parts: Parts) -> None:
        """Makes the collaborators, which share the parts."""
        self._parts = parts
        self._writes = Writes(parts)
        self._reads = Reads(parts)
        self._items = StoredItems(parts)
        self._priorities = PriorityUpdates(parts)
        self._saves = Saving(parts)

    def __repr__(self) -> str:
        parts = self._parts
        if parts.makers is not None or parts.is_closed:
            return f"{type(self).__name__}({'closed' if parts.is_closed else 'not used yet'})"
        names = ("storage", "sampler", "writer", "batch_size", "collate_fn")
        lines = "".join(f",\n    {name}={getattr(parts, name)!r}" for name in names)
        return f"{type(self).__name__}({lines[1:]})"

    def __getstate__(self) -> dict[str, Any]:
        made = ("_writes", "_reads", "_items", "_priorities", "_saves", "_iterator")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._use(self._parts)

    # -- writing -------------------------------------------------------------------------------

    @eager
    def add(
        self, data: Any, timeout: float | None = None, streams: int | None = None
    ) -> int | torch.Tensor:
        """Writes one item ``[*lanes, ...]``.

        Args:
            data: the item.
            timeout: seconds to wait for others. None: 5 s for a slot that is being written, and
                without end for a `RateLimiter`.
            streams: number of its stream; see `extend`.

        Returns:
            Its index, an int; where the storage has lanes, int64 ``[lanes, ndim]``.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape; nothing
                was changed. A plain number takes the dtype of its leaf, if that can hold it.
            TypeError: None; for a TensorDict buffer a tuple or list, whose parts have no names.
            ValueError: a priority in the data of a TensorDict buffer is NaN, infinite or negative;
                nothing was changed.
            RingOverrunError: a living writer is still filling the next slot.
            RateLimitTimeout, RateLimitError: samples have to be drawn first; nothing was changed.

        Cost: one native call.
        """
        plan = self._parts.plan
        if timeout is None and streams is None and not plan.transforms:
            fast = plan.fast_write
            if fast is not None and (index := fast.write(data, True)) is not None:
                return index  # type: ignore[no-any-return]
        return self._writes.write(data, True, None, timeout, streams)  # type: ignore[no-any-return]

    @eager
    def extend(
        self,
        data: Any,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> torch.Tensor:
        """Writes a batch: whole or not at all, also if the process is killed in the middle.

        Args:
            data: ``[n, *lanes, ...]`` (with ``dim_extend`` d, n is dimension d of the data). A list
                is a stack of items; a tuple or dict is a PyTree. An empty list writes nothing.
            update_priority: for TensorDict buffers only.
            timeout: see `add`.
            streams: the environment of this handle that each item is from, so that no slice mixes
                two of them: integers ``[n]`` (a list, an array, a tensor) from 0 to 2**24 - 1, or
                one int for the batch; None: 0. With lanes only one int: each lane is a stream. They
                are for the items after the transforms.
            stream_dim: the dimension of streams in the data: 0 for ``[streams, T, ...]``, 1 for
                ``[T, streams, ...]``. The items are stored step by step, in streams 0, 1, ...; the
                index has the form of the data.

        Returns:
            Indices, int64 ``[n]``; with lanes ``[n * lanes, ndim]``; ``[0]`` if a transform keeps
            all data back. If there are more items than the capacity, the last ones stay.

        Raises:
            SchemaMismatchError, TypeError, RingOverrunError, RateLimitTimeout, RateLimitError: as
                `add`.
            TypeError, ValueError: ``streams`` are no integers, out of range, not ``n``, or of a
                storage or writer without streams; nothing was changed.

        Cost: one native call; 0.6 µs a leaf more where something has to be converted.
        """
        if update_priority is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.extend(update_priority={update_priority}): only TensorDict "
                "buffers find priorities in the data; call update_priority(index, priority) instead"
            )
        plan = self._parts.plan
        if timeout is None and streams is None and stream_dim is None and not plan.transforms:
            fast = plan.fast_write
            if fast is not None and (index := fast.write(data, False)) is not None:
                return index  # type: ignore[no-any-return]
        return self._writes.write(data, False, None, timeout, streams, stream_dim)  # type: ignore[no-any-return]

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets every item; the cursor goes to 0.

        If no other handle has the buffer, the next write may have another form (keys, dtypes,
        shapes), which it defines.

        Args:
            empty_write_count: set the write count to 0 too.

        Raises:
            RuntimeError: the writer is an `ImmutableDatasetWriter`; nothing was changed.
        """
        parts = self._parts
        parts.drop_prefetched()
        parts.writer._empty(empty_write_count)  # first: it may refuse
        parts.storage.forget(keep_write_count=not empty_write_count)
        parts.sampler._empty()
        parts.storage.notify_emptied()

    # -- sampling ------------------------------------------------------------------------------

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Any:
        """Draws a batch.

        Args:
            batch_size: how many items; None is the constructor's, another number warns.
            return_info: return ``(data, info)``; info has ``"index"`` and, if any, the weights and
                ``"index_generation"``.
            min_size: wait until the buffer has so many items.
            timeout: seconds to wait, for ``min_size``, a `RateLimiter`, or a batch of a consumer;
                None: without end.
            lease: for a sampler with a consumer: seconds until items are given to others, unless
                `ack` comes first; ``math.inf``: until this handle is closed, or its process ends.
                None acknowledges them at once.

        Returns:
            The data ``[batch_size, ...]`` in the form in which they were written.

        Raises:
            EmptyBufferError: nothing to draw from.
            RateLimitTimeout, RateLimitError: items have to be written first.
            CollectorsDiedError: they never will be; see `RateLimiter`.
            RuntimeError: no batch size.

        Cost: one native call; 0.4 µs a leaf for the tensors that it fills.
        """
        count = self._reads.count(batch_size)
        batch = self._reads.sample(count, None, None, min_size, timeout, lease)
        return batch if return_info else batch[0]

    def can_sample(self, batch_size: int | None = None) -> bool:
        """True if ``sample(batch_size)`` would give a batch now, without waiting.

        That depends on the sampler (slices long enough, whole batches) and on a `RateLimiter`.
        Others may write and draw before the sample is made.

        Args:
            batch_size: how many items; None is the constructor's.

        Raises:
            RuntimeError: no batch size; or the sampler can never make such a batch of these items.

        Cost: a microsecond; for slices see `SliceSampler`; a consumer also looks through the items
            that were given back.
        """
        return self._reads.can_sample(batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Samples to the end of the sampler's pass, without end if it has none.

        A batch is waited for without end, as in `sample`. With a limit in seconds, for instance
        over a queue that may be empty: ``for batch in rb.as_dataset(timeout=30)``.
        """
        if self._parts.batch_size is None:
            raise RuntimeError("iteration needs a batch size; pass batch_size to the constructor")
        return self._reads.batches(self.sample)

    def next(self) -> Any:
        """The next sample of an iteration over the buffer; None at the end of a pass."""
        if self._iterator is None:
            self._iterator = iter(self)
        data = next(self._iterator, None)
        if data is None:
            self._iterator = None
        return data

    def as_dataset(
        self,
        batch_size: int | None = None,
        *,
        return_info: bool = False,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> BatchDataset:
        """The batches of this buffer as a data set for torch's ``DataLoader``.

            data = rb.as_dataset(256)
            loader = DataLoader(
                data, batch_size=None, collate_fn=data.collate_fn, num_workers=2
            )
            for batch in loader:
                batch["td_error"] = learn(batch)
                rb.update_tensordict_priority(batch)

        Each worker opens the buffer itself and draws its own batches, from the loader's seed mixed
        with rank and worker; a `generator` of the buffer applies to this process only. Workers
        share each pass of a `SamplerWithoutReplacement`, which ends the loader; other samplers
        never end. With a ``world_size`` of its own, every pass of new workers has the same order:
        use ``persistent_workers=True``.

        Batches are whole: pass ``batch_size=None`` and the data set's ``collate_fn``, because the
        loader's own takes TensorDicts apart. Priorities go back from the loop as usual. They are
        later by the batches in the loader, two a worker unless ``prefetch_factor`` is set.

        Args:
            batch_size: see `sample`, as are the others.
            return_info: see there.
            min_size: see there.
            timeout: see there.

        Returns:
            The data set. Create it where the process has its rank. With ``num_workers=0`` it is the
            same as iterating over the buffer.

        Raises:
            RuntimeError: no batch size.

        Cost: 0.4 ms for a TensorDict of up to 1 MB, through a pipe; 2 ms or more, through torch's
            shared memory, for a larger one, or text or objects. `sample` takes 30 µs: workers only
            pay for slow transforms.
        """
        if batch_size is None and self._parts.batch_size is None:
            raise RuntimeError(
                "no batch size was specified; pass batch_size to as_dataset() or to the buffer"
            )
        options = {"return_info": return_info, "min_size": min_size, "timeout": timeout}
        return BatchDataset(self, self._reads.batches, batch_size=batch_size, **options)

    @eager
    def update_priority(self, index: Any, priority: Any = None, *, generation: Any = None) -> Any:
        """Changes priorities.

        Args:
            index: of a sample or a write: ``[n]``, ``[n, ndim]``, an int; or a sample of a
                TensorDict buffer, as for ``update_tensordict_priority``.
            priority: ``[n]`` or one number; finite and not negative. With ``dim_extend`` also in
                the form of the batch, ``[lanes, n]``. None: the entry ``priority_key`` of the
                sample.
            generation: ``index_generation`` of the sample, ``[n]``: an item that was overwritten
                since is left alone, and counted as stale. None sets any item.

        Returns:
            `PriorityUpdate`: how many were applied, and how many were stale.

        Raises:
            ValueError: NaN, infinite or negative; nothing was changed.
            IndexError: out of range, a mask or fractions; nothing was changed.
            TypeError: the priorities are missing; nothing was changed.

        Cost: one native call.
        """
        return self._priorities.update(index, priority, generation)

    def mark_update(self, index: Any) -> None:
        """Gives the items at ``index`` the default priority."""
        self._parts.mark_update(index)

    # -- items in storage order ----------------------------------------------------------------

    @eager
    def __len__(self) -> int:
        """Number of elements."""
        return len(self._parts.storage)

    def __getitem__(self, index: Any) -> Any:
        """Items by index, through ``collate_fn`` and the transforms.

        Of a shared buffer they are validated copies; else an int or a slice gives views.
        """
        return self._items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Changes items in place; their priorities and the write count stay."""
        self._items[index] = value

    def set_(self, key: str | tuple[str, ...], value: Any) -> Self:
        """Changes one entry of every item, ``rb[:][key] = value``; see `set_at_`."""
        return self.set_at_(key, value, slice(None))

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> Self:
        """Changes one entry of some items: ``rb[index][key] = value``.

        Other entries, priorities and the write count stay, also while others write.

        Args:
            key: of an existing entry; nested as a tuple.
            value: as ``rb[index][key]`` gives it, or a value that expands to it.
            index: as for reading.

        Returns:
            The buffer.

        Raises:
            KeyError: no such entry.
            SchemaMismatchError: another dtype or shape.
            IndexError: there is no item.
        """
        self._items.change(index, value, key)
        return self

    def update_(
        self,
        input_dict_or_td: Any,
        clone: bool = False,
        *,
        keys_to_update: Sequence[str | tuple[str, ...]] | None = None,
    ) -> Self:
        """Changes several entries of every item; see `set_`.

        Args:
            input_dict_or_td: entries, each ``[len, ...]``.
            clone: accepted; values are always copied.
            keys_to_update: only these.

        Returns:
            The buffer.
        """
        for key, value in input_dict_or_td.items():
            if keys_to_update is None or key in keys_to_update:
                self.set_(key, value)
        return self

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Changes entries of the items of a sample that have not been overwritten since.

        Comparison and change are atomic. A changed item has another generation: to change it again,
        sample it again.

        Args:
            index: ``sample["index"]``: int64 ``[n]``, or ``[n, ndim]``.
            generation: ``sample["index_generation"]``: int64 ``[n]``.
            patch: TensorDict or dict of the new entries, each ``[n, ...]``; beside the index that
                `extend` returned also in the form of its data, such as ``[lanes, T, ...]``.
            version_key: entry of the items that holds their version, one number. An item with a
                newer one is left alone, others get ``version`` with the patch. If an item comes
                twice, the highest version counts.
            version: of the patch: one number, or ``[n]``.
            require_newer: leave items with the same version alone, too.

        Returns:
            The items that were changed.

        Raises:
            KeyError: no such entry.
            SchemaMismatchError: another dtype or shape; nothing was changed.
            RuntimeError: the storage keeps no generations, or this buffer tracks none; nothing was
                changed.
            ValueError: ``version_key`` without ``version``, or in the patch, or of several numbers
                an item.
        """
        return self._items.update_if_present(
            index, generation, patch, version_key, version, require_newer
        )

    def submit_update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> Future[ConditionalUpdateResult]:
        """`update_if_present` after the batches ordered so far; later batches see the change.

        Do not write to the arguments before it is done; those on a GPU are read in stream order.

        Returns:
            A future of what `update_if_present` returns; without ``prefetch`` it is done.

        Raises:
            BufferClosedError: the buffer was closed.
        """
        self._require_alive("changed")
        given = {
            "index": index,
            "generation": generation,
            "patch": patch,
            "version_key": version_key,
            "version": version,
            "require_newer": require_newer,
        }
        return self._items.submit(self.update_if_present, given)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """``rb[:end]``: the items in storage order, as one batch; see also `iter_in_order`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """``rb[:end] = data``: write every item, or the first ``end``, again in storage order.

        Cursor, write count and priorities stay.

        Raises:
            SchemaMismatchError: other leaves; in a buffer that is not shared, a new key adds a
                column.
            ValueError: another number of items.
        """
        self[:end] = data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yields copies of the items in storage order, in batches of ``chunk`` slots."""
        for data in self._parts.storage.iter_in_order(chunk):
            yield self._items.transformed(self._parts.collate(data))

    # -- saving --------------------------------------------------------------------------------

    def dumps(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Any = None,
        layout: str = "shmbuffer",
        on_progress: OnProgress | None = None,
    ) -> None:
        """Saves everything into the directory ``path / "storage"``, which `attach` opens.

        Items, priorities, cursor and counts are of one moment, also while other processes write. A
        crash or a full disk leaves the earlier save in ``path``, or this one.

        If ``path / "storage"`` is the ``scratch_dir`` of the storage, nothing is copied: the items
        are made durable, and the directory has the live buffer, not a moment of it.

        A storage with save hooks or a checkpointer for episodes is saved in TorchRL's layout.

        Args:
            path: the directory, made if needed. An earlier save in it is replaced, other files
                stay.
            extra: returned by `loads`: the ``state_dict()`` of networks, optimizers, schedulers,
                random states, counts. Tensors, arrays, numbers, text, None, and dicts, lists and
                tuples of them; nothing is pickled. Tensors that share memory are saved separately.
            layout: ``"torchrl"`` writes what TorchRL loads. It takes the place of the whole
                directory ``path``.
            on_progress: called with a `ProgressReport` several times a second, while data are
                copied and then synced. If it raises, this call does, and the earlier save stays.

        Raises:
            RuntimeError: the storage was never written to.
            TypeError: an item (see `ListStorageCheckpointer`) or a value in ``extra`` could only be
                pickled; the earlier save stays.
            ValueError: ``extra`` has more than 128 levels, or an int of more than 4,300 digits; or
                there is no such layout; nothing was written.
            BufferExistsError: the directory has another buffer's files, or files that no save made.
            SpaceError, OSError: no room, or no permission; the earlier save stays.

        Cost: all bytes once, straight into files, and a sync of each.
        """
        self._saves.dumps(path, extra, layout, on_progress)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Any:
        """Replaces the content of the buffer by a save of `dumps`, or of TorchRL.

        It restores items and their places, cursor and counts, priorities, the states of sampler,
        generator and transforms, and the batch size, if saved. The save defines an empty storage.
        Prefetched batches of this buffer are dropped, and those of the save come next. Nothing is
        unpickled, so TorchRL's prefetched batches (``prefetch.pkl``) are ignored.

        Args:
            path: the directory.
            on_progress: see `dumps`. If it raises, nothing was changed, or a note on the exception
                tells that the buffer is empty now.

        Returns:
            The ``extra`` of `dumps`, its tensors on the CPU; else None.

        Raises:
            FileNotFoundError: no buffer was saved there.
            SchemaMismatchError: the buffer has other leaves; nothing was changed.
            ValueError: more items than there is room for (nothing was changed); or something that
                could only be unpickled.
            BufferInUseError: other processes use the buffer; nothing was changed.
            CorruptBufferError: the files are damaged.
            ShmBufferError: the buffer is a queue (``max_times_sampled``); nothing was changed.

        Cost: all bytes once; none if ``path / "storage"`` is the storage's ``scratch_dir``.
        """
        return self._saves.loads(path, on_progress)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Registers a hook of the checkpointer: `StorageCheckpointerBase.register_save_hook`."""
        self._parts.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Registers a hook of the checkpointer: `StorageCheckpointerBase.register_load_hook`."""
        self._parts.storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Items, priorities, cursor, counts, transforms and generator, as tensors and numbers."""
        return self._saves.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the content of the buffer by a state.

        Raises:
            SchemaMismatchError: the buffer has other leaves.
            ValueError: it has another capacity.
            ShmBufferError: the buffer is a queue (``max_times_sampled``); nothing was changed.
            KeyError: it is no state of a buffer; nothing was changed.
        """
        self._saves.load_state_dict(state_dict)

    def to_parquet(self, path: str | os.PathLike[str], *, compression: str = "none") -> int:
        """Writes all items into a Parquet file, oldest first; needs the extra ``parquet``.

        A leaf is a column: a number, a fixed-size list of numbers, or, of several uint8, a
        fixed-size binary. Dots join nested keys. `from_parquet` restores the items bit for bit, in
        their form; other programs read plain columns. Priorities and cursor are left out (see
        `dumps`). The file appears as a whole, on the disk.

        Args:
            path: the file; an existing one is replaced.
            compression: ``"none"``, ``"zstd"``, ``"lz4"`` or ``"snappy"``.

        Returns:
            How many items were written; those that others overwrite meanwhile are left out.

        Raises:
            TypeError: the storage has no tensors, or also text.
            MissingExtra: pyarrow is not installed; the message has the command.
            OSError: no room, or no permission; the existing file stays.

        Cost: all bytes once; memory for 64 MiB of items.
        """
        return parquet_file.write(self._parts.storage, path, compression)

    @classmethod
    def from_parquet(
        cls,
        path: str | os.PathLike[str],
        *,
        storage: Storage | Callable[[int], Storage] | None = None,
        rename: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Self:
        """Makes a buffer with the items of a Parquet file, in order; needs the extra ``parquet``.

        Args:
            path: the file, from `to_parquet` or another program. A column holds numbers, lists of
                numbers, fixed-size binaries, or structs of these; all lists of a column have one
                length, which becomes the shape. A dot in a name nests. Of a folder, all
                ``*.parquet`` files in it and in folders below are read in the order of their names
                (``part.2`` before ``part.10``). Names that begin with a dot or underscore are left
                out.
            storage: for the items, or a function of their number that makes one; None is a
                `LazyTensorStorage`.
            rename: new names for columns of another program, by their names in the file:
                ``{"index": "stored_index"}`` for LeRobot's column, whose name is that of an entry
                of each sample.
            **options: of the buffer.

        Raises:
            FileNotFoundError: no such file, or no part file in the folder.
            SchemaMismatchError: a column has another type, lists of several lengths, rows without
                a value, or a name that no entry can have; or part files have different columns.
                The message names the file and the column.
            ValueError: ``rename`` names a column that is not there.
            MissingExtra: see `to_parquet`.

        Cost: all bytes once; 64 MiB of memory besides the storage.
        """
        file = parquet_file.File(path, rename)
        items = max(1, file.rows * math.prod(file.lanes))
        if storage is None:
            storage = LazyTensorStorage(items, ndim=1 + len(file.lanes))
        elif not isinstance(storage, Storage):
            storage = storage(items)
        buffer = cls(storage=storage, **options)
        for batch in file.batches(file.chunk):
            dim = buffer.dim_extend
            buffer.extend(swap_dims(batch, dim) if dim else batch)
        return buffer
