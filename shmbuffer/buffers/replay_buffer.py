"""The replay buffer, which consists of a storage, a sampler and a writer."""

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


class ReplayBuffer(BufferClient, Saves, metaclass=ABCMeta):  # ABCMeta registers ensembles
    """A replay buffer that consists of a storage, a sampler and a writer.

    If all three are from this package, each batch needs one native call. ``extend`` claims slots,
    copies the items and commits them; ``sample`` draws, gathers and validates items. Custom classes
    derive from `Storage`, `Sampler` and `Writer`.

    Args:
        storage: storage of the items, or its factory. If None, creates a ``ListStorage(1000)``.
        sampler: sampler that selects items. If None, creates a `RandomSampler`.
        writer: writer that selects the slots of new items. If None, creates a `RoundRobinWriter`.
        collate_fn: function that is called with the items of a batch as the storage returns them.
            If None, leaves them unchanged, except that a list is stacked.
        pin_memory: gather samples in pinned memory, which is reused; see docs/memory.md. Without a
            GPU, a warning is issued and ordinary memory is used.
        prefetch: number of batches to prepare in advance. It requires ``batch_size``. The batches
            are prepared in this number of threads, or in the caller's thread if measurements show
            that this is faster; ``print(buffer.plan)`` shows which. Items are always drawn in the
            caller's thread, so both modes produce the same batches. Items can be overwritten after
            their batch was prepared.
        transform: a transform, several of them, or a `Compose`, called with every sample and every
            ``rb[i]``. See `append_transform`.
        transform_factory: function that creates the transform when the buffer is first used.
        batch_size: batch size of ``sample()`` and of iteration.
        dim_extend: dimension of the data along which ``extend`` appends; None: ``ndim - 1``.
        checkpointer: checkpointer of the storage. If None, keeps the storage's own.
        generator: random generator for sampling. If None, uses torch's default generator.
        rank: rank of this learner among several, from 0. If None, uses the rank of
            torch.distributed, then the variable ``RANK``, then 0. On a shared buffer, samples
            differ by rank, and rank 0 has no effect. With a ``generator``, only an explicit rank is
            used.
        shared: treat the buffer as shared even if its memory is anonymous: samples contain
            ``index_generation``, and reads return validated copies. Directories are always shared.
        compilable: accepted and ignored, because the calls are always marked for `torch.compile`.
        delayed_init: create storage, sampler, writer and transform when the buffer is first used.
            Until then, it can be pickled with their factories. None: only if there is a
            ``transform_factory``.
        weight_key: name of the importance weights in a sample. None means both ``"_weight"`` and
            ``"priority_weight"``, which share one tensor.
        rate_limiter: `RateLimiter` that keeps the ratio of samples to inserts, or turns the buffer
            into a queue. It applies to all users. If None, keeps the current limiter.
        sample_unit: extends each drawn item: a `Sequence` of steps, one transition over n steps
            (`NStep`), or the item with the preceding frames (`FrameStack`). None returns the item
            alone. Batch sizes refer to the drawn items.
        consume_after_n_samples: creates a `ConsumingSampler` with this ``max_sample_count``. It
            cannot be combined with ``prefetch`` or with another sampler.
        **later: TorchRL's arguments ``service_backend``, ``service_backend_options``, ``transport``
            and ``transport_options``. Only their default values are supported.

    Raises:
        NotImplementedError: an argument of ``later`` differs from its default.
        ValueError: ``prefetch`` or a sampler with ``drop_last`` was passed without ``batch_size``.
        TypeError: both arguments for the transform were passed, or an argument is unknown.

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
    """The name of this class and its subclasses in a directory."""
    default_writer: ClassVar[type[RoundRobinWriter]] = RoundRobinWriter
    _mapping: ClassVar[str] = "dict"  # type for plain dicts in the data
    _own_options: ClassVar[tuple[str, ...]] = ()  # options of a subclass for its `Parts`
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
            pin_memory=pinned.can_pin(pin_memory),
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
        """Creates the objects that implement the calls. All of them share ``parts``."""
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
        created = ("_writes", "_reads", "_items", "_priorities", "_saves", "_iterator")
        return {name: value for name, value in self.__dict__.items() if name not in created}

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
            timeout: maximum wait in seconds. If None, waits up to 5 s for a slot that another
                process is writing, and indefinitely for a `RateLimiter`.
            streams: number of the item's stream; see `extend`.

        Returns:
            The index of the item, an int. If the storage has lanes, int64 ``[lanes, ndim]``.

        Raises:
            SchemaMismatchError: a leaf is missing or unknown, or has another dtype or shape.
                Nothing was changed. A plain number is converted to the dtype of its leaf if that
                dtype can represent it.
            TypeError: the item is None, or a tuple or list in a TensorDict buffer.
            ValueError: a priority in the data of a TensorDict buffer is NaN, infinite or negative.
                Nothing was changed.
            RingOverrunError: another living process is still writing the next slot.
            RateLimitTimeout, RateLimitError: the limiter requires more samples before this write.
                Nothing was changed.

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
        """Writes a batch atomically, even if the process is killed during the call.

        Args:
            data: ``[n, *lanes, ...]`` (with ``dim_extend`` d, n is dimension d of the data). A list
                is stacked, and a tuple or dict is a PyTree. An empty list writes nothing.
            update_priority: supported by TensorDict buffers only.
            timeout: see `add`.
            streams: number of the environment of this handle from which each item comes, so that no
                slice mixes two environments. Pass integers ``[n]`` (a list, an array or a tensor)
                from 0 to 2**24 - 1, or one int for the batch. None means 0. If the storage has
                lanes, only one int is allowed, because each lane is a stream. The numbers refer to
                the items after the transforms.
            stream_dim: dimension of the streams in the data: 0 for ``[streams, T, ...]``, 1 for
                ``[T, streams, ...]``. The items are stored step by step in streams 0, 1, ... The
                returned index has these two dimensions of the data.

        Returns:
            Indices, int64 ``[n]``, or ``[n * lanes, ndim]`` with lanes. ``[0]`` if a transform
            keeps all data back. If there are more items than the capacity, the last ones are kept.

        Raises:
            TypeError, ValueError: ``streams`` are not integers, are out of range, do not have
                length ``n``, or are not supported by the storage. Nothing was changed.
            Other exceptions are those of `add`.

        Cost: one native call, and 0.6 µs per leaf if data must be converted.
        """
        if update_priority is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.extend() does not accept update_priority, because its data "
                "have no priority entry; call update_priority(index, priority) after extend()"
            )
        plan = self._parts.plan
        if timeout is None and streams is None and stream_dim is None and not plan.transforms:
            fast = plan.fast_write
            if fast is not None and (index := fast.write(data, False)) is not None:
                return index  # type: ignore[no-any-return]
        return self._writes.write(data, False, None, timeout, streams, stream_dim)  # type: ignore[no-any-return]

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes all items and resets the cursor to 0.

        If no other handle has opened the buffer, the next write can define another schema (keys,
        dtypes, shapes).

        Args:
            empty_write_count: also reset the write count to 0.

        Raises:
            RuntimeError: the writer is an `ImmutableDatasetWriter`. Nothing was changed.
        """
        parts = self._parts
        parts.drop_prefetched()
        parts.writer._empty(empty_write_count)  # first, because the writer can refuse
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
        """Samples a batch.

        Args:
            batch_size: number of items. If None, uses the constructor's batch size. If the two
                differ, a warning is issued.
            return_info: return ``(data, info)``. The dict ``info`` contains ``"index"`` and, if
                available, the weights and ``"index_generation"``.
            min_size: wait until the buffer contains at least this number of items.
            timeout: maximum wait in seconds for ``min_size``, a `RateLimiter`, or a batch of a
                consumer. If None, waits indefinitely.
            lease: seconds after which unacknowledged items are delivered to other clients; see
                `ack`. It requires a sampler with a consumer. With ``math.inf``, the lease ends when
                this handle is closed or its process ends. None acknowledges the items immediately.

        Returns:
            The data ``[batch_size, ...]``, with the structure that was written.

        Raises:
            EmptyBufferError: there are no items to sample.
            RateLimitTimeout, RateLimitError: the limiter requires more items before this sample.
            CollectorsDiedError: the required items will never be written; see `RateLimiter`.
            RuntimeError: there is no batch size.

        Cost: one native call, and 0.4 µs per leaf for new tensors.
        """
        count = self._reads.count(batch_size)
        batch = self._reads.sample(count, None, None, min_size, timeout, lease)
        return batch if return_info else batch[0]

    def can_sample(self, batch_size: int | None = None) -> bool:
        """True if ``sample(batch_size)`` would return a batch now, without waiting.

        The result depends on the sampler, which can need long slices or complete batches, and on a
        `RateLimiter`. Other processes may write and sample before this process does.

        Args:
            batch_size: number of items. If None, uses the constructor's batch size.

        Raises:
            RuntimeError: there is no batch size, or the sampler can never make a batch of this size
                from the items.

        Cost: 1 µs. For slices see `SliceSampler`. A sampler with a consumer also checks the items
            that were returned to the consumer.
        """
        return self._reads.can_sample(batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yields samples until the end of the sampler's pass, or forever if it has no passes.

        Like `sample`, each step waits indefinitely for a batch. To limit the wait to 30 seconds,
        for example if a queue can be empty, use ``for batch in rb.as_dataset(timeout=30)``.
        """
        if self._parts.batch_size is None:
            raise RuntimeError("iteration needs a batch size; pass batch_size to the constructor")
        return self._reads.batches(self.sample)

    def next(self) -> Any:
        """Returns the next sample of an iteration over the buffer, or None at the end of a pass."""
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
        """Returns the batches of this buffer as a data set for torch's ``DataLoader``.

            data = rb.as_dataset(256)
            loader = DataLoader(
                data, batch_size=None, collate_fn=data.collate_fn, num_workers=2
            )
            for batch in loader:
                batch["td_error"] = learn(batch)
                rb.update_tensordict_priority(batch)

        Each worker opens the buffer itself and samples its own batches. The seed of a worker is
        derived from the loader's seed, the rank and the worker's number. The buffer's `generator`
        is used in this process only. Workers share each pass of a
        `SamplerWithoutReplacement`, and the end of a pass ends the loader. With other samplers the
        loader never ends. If the sampler has its own ``world_size``, every pass of new workers has
        the same order, so use ``persistent_workers=True``.

        The data set yields complete batches. Pass ``batch_size=None`` and the data set's
        ``collate_fn``, because the loader's default would split TensorDicts. Priorities are updated
        from the loop as usual. The updates are delayed by the batches in the loader, which are two
        per worker unless ``prefetch_factor`` is set.

        Args:
            batch_size: see `sample`.
            return_info: see `sample`.
            min_size: see `sample`.
            timeout: see `sample`.

        Returns:
            The data set. Create it in the process that has the rank. With ``num_workers=0``, the
            loader yields the same batches as iteration over the buffer.

        Raises:
            RuntimeError: there is no batch size.

        Cost: 0.4 ms through a pipe for a TensorDict of up to 1 MB. Larger ones, text and objects
            take at least 2 ms through torch's shared memory. `sample` takes 30 µs, so workers only
            help if transforms are slow.
        """
        if batch_size is None and self._parts.batch_size is None:
            raise RuntimeError(
                "no batch size was specified; pass batch_size to as_dataset() or to the buffer"
            )
        options = {"return_info": return_info, "min_size": min_size, "timeout": timeout}
        return BatchDataset(self, self._reads.batches, batch_size=batch_size, **options)

    @eager
    def update_priority(self, index: Any, priority: Any = None, *, generation: Any = None) -> Any:
        """Sets the priorities of items.

        Args:
            index: indices returned by a sample or a write: ``[n]``, ``[n, ndim]``, or an int. A
                TensorDict buffer also accepts a sample, like ``update_tensordict_priority``.
            priority: ``[n]`` or one number, finite and non-negative. With ``dim_extend`` it can
                also have the shape of the batch, ``[lanes, n]``. If None, the sample's
                ``priority_key`` entry is used.
            generation: the sample's ``index_generation``, ``[n]``. Items that have been overwritten
                since are skipped and counted as stale. If None, the current items are updated.

        Returns:
            `PriorityUpdate`, which counts the applied and the stale updates.

        Raises:
            ValueError: a priority is NaN, infinite or negative.
            IndexError: an index is out of range or not an integer, or the indices are a mask.
            TypeError: ``priority`` is None, and ``index`` is not a sample with priorities.
                No priority is changed if an error is raised.

        Cost: one native call.
        """
        return self._priorities.update(index, priority, generation)

    def mark_update(self, index: Any) -> None:
        """Sets the priorities of the items at ``index`` to the default priority."""
        self._parts.mark_update(index)

    # -- items in storage order ----------------------------------------------------------------

    @eager
    def __len__(self) -> int:
        """Returns the number of elements in the buffer."""
        return len(self._parts.storage)

    def __getitem__(self, index: Any) -> Any:
        """Returns items by index, through ``collate_fn`` and the transforms.

        A shared buffer returns validated copies. In other buffers, an int or a slice returns views.
        """
        return self._items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Changes items in place. Their priorities and the write count do not change."""
        self._items[index] = value

    def set_(self, key: str | tuple[str, ...], value: Any) -> Self:
        """Changes one entry of every item (``rb[:][key] = value``); see `set_at_`."""
        return self.set_at_(key, value, slice(None))

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> Self:
        """Changes one entry of some items (``rb[index][key] = value``) and returns the buffer.

        Other entries, priorities and the write count do not change, even while other processes
        write.

        Args:
            key: key of an existing entry; a tuple for nested entries.
            value: value with the shape of ``rb[index][key]``, or one that can be expanded to it.
            index: index as for reading.

        Raises:
            KeyError: there is no such entry.
            SchemaMismatchError: the value has another dtype or shape.
            IndexError: there is no item at the index.
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
        """Changes several entries of every item and returns the buffer; see `set_`.

        Args:
            input_dict_or_td: new values of the entries, each ``[len, ...]``.
            clone: accepted and ignored, because values are always copied.
            keys_to_update: keys of the entries to change. None changes all of them.
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
        """Changes entries of sampled items that have not been overwritten in the meantime.

        Comparison and change are atomic. A changed item gets a new generation. To change the item
        once more, sample it again.

        Args:
            index: ``sample["index"]``: int64 ``[n]``, or ``[n, ndim]``.
            generation: ``sample["index_generation"]``: int64 ``[n]``.
            patch: TensorDict or dict of the new entries, each ``[n, ...]``. If `extend` returned
                ``index``, they can also have the batch shape of its data, such as ``[lanes, T]``.
            version_key: key of the entry with an item's version, which is one number. Items with a
                newer version are skipped. The others get the patch and ``version``. If an item
                occurs twice, the highest version is used.
            version: version of the patch: one number, or ``[n]``.
            require_newer: also skip items with the same version.

        Returns:
            `ConditionalUpdateResult`, which lists the items that were changed.

        Raises:
            KeyError: the items lack an entry of the patch.
            SchemaMismatchError: a new entry has another dtype or shape. Nothing was changed.
            RuntimeError: the storage does not support generations, or this buffer does not track
                them. Nothing was changed.
            ValueError: ``version_key`` was passed without ``version``, is part of the patch, or
                contains several numbers per item.
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
        """Schedules `update_if_present` after the batches that are being prefetched.

        Batches whose preparation starts later contain the change. Do not modify the arguments
        before the change is complete. Arguments on a GPU are read in stream order.

        Returns:
            A future with the result of `update_if_present`. Without ``prefetch``, it is already
            complete.

        Raises:
            BufferClosedError: the buffer was closed.
        """
        self._require_alive("changed")
        arguments = {
            "index": index,
            "generation": generation,
            "patch": patch,
            "version_key": version_key,
            "version": version,
            "require_newer": require_newer,
        }
        return self._items.submit(self.update_if_present, arguments)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Returns ``rb[:end]``, the items in storage order; see also `iter_in_order`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Overwrites every item, or the first ``end``, in storage order (``rb[:end] = data``).

        Cursor, write count and priorities do not change.

        Raises:
            SchemaMismatchError: the leaves differ. In a buffer that is not shared, a new key adds a
                column instead.
            ValueError: the data do not have the same number of items.
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
        """Saves the buffer into the directory ``path / "storage"``, which `attach` can open.

        Items, priorities, cursor and counts belong to one snapshot, even while other processes
        write. After a crash or a full disk, ``path`` contains either the earlier or the new save.

        If ``path / "storage"`` is the ``scratch_dir`` of the storage, nothing is copied. The items
        are written to disk, and the directory contains the live buffer instead of a snapshot.

        A storage with save hooks or a checkpointer for episodes is saved in TorchRL's layout.

        Args:
            path: the directory, created if necessary. Only an earlier save in it is replaced.
            extra: data that `loads` will return, such as the ``state_dict()`` of networks,
                optimizers and schedulers. It can contain tensors, arrays, numbers, text, None, and
                dicts, lists and tuples of these. Nothing is pickled. Tensors that share memory are
                saved separately.
            layout: ``"torchrl"`` writes a save that TorchRL can load. It replaces the entire
                directory ``path``.
            on_progress: function that is called with a `ProgressReport` several times a second. If
                it raises an exception, this call raises it too, and the earlier save is kept.

        Raises:
            RuntimeError: the storage was never written to.
            TypeError: an item (see `ListStorageCheckpointer`) or a value in ``extra`` could only be
                saved by pickling it. The earlier save is kept.
            ValueError: ``extra`` has more than 128 levels or an int of more than 4,300 digits, or
                ``layout`` is unknown. Nothing was written.
            BufferExistsError: the directory contains another buffer's files, or files that are not
                part of a save.
            SpaceError, OSError: the disk is full or permission is denied. The earlier save is kept.

        Cost: one copy of all bytes directly to files, and one sync of each file.
        """
        self._saves.dumps(path, extra, layout, on_progress)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Any:
        """Replaces the contents of the buffer with a save by `dumps` or by TorchRL.

        The call restores items and their indices, cursor and counts, priorities, the states of
        sampler, generator and transforms, and the batch size if saved. If the storage is empty, the
        save defines its schema. Prefetched batches of this buffer are dropped, and those of the
        save are delivered next. Nothing is unpickled, so TorchRL's ``prefetch.pkl`` is ignored.

        Args:
            path: the directory.
            on_progress: see `dumps`. If it raises an exception, either nothing was changed, or a
                note on the exception says that the buffer is now empty.

        Returns:
            The ``extra`` that was passed to `dumps`, with its tensors on the CPU, or None.

        Raises:
            FileNotFoundError: the directory contains no save.
            SchemaMismatchError: the buffer has other leaves. Nothing was changed.
            ValueError: there are more items than the capacity (nothing was changed), or the save
                contains data that could only be unpickled.
            BufferInUseError: other processes use the buffer. Nothing was changed.
            CorruptBufferError: the files are damaged.
            ShmBufferError: the buffer is a queue (``max_times_sampled``). Nothing was changed.

        Cost: one copy of all bytes, or none if the save is the storage's ``scratch_dir``.
        """
        return self._saves.loads(path, on_progress)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Registers a save hook; see `StorageCheckpointerBase.register_save_hook`."""
        self._parts.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Registers a load hook; see `StorageCheckpointerBase.register_load_hook`."""
        self._parts.storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Returns items, priorities, counters, transforms and generator state as a plain dict."""
        return self._saves.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the contents of the buffer with the result of `state_dict`.

        Raises:
            SchemaMismatchError: the buffer has other leaves.
            ValueError: the capacity differs.
            ShmBufferError: the buffer is a queue (``max_times_sampled``). Nothing was changed.
            KeyError: ``state_dict`` is not the state of a buffer. Nothing was changed.
        """
        self._saves.load_state_dict(state_dict)

    def to_parquet(self, path: str | os.PathLike[str], *, compression: str = "none") -> int:
        """Writes all items into a Parquet file, oldest first. Requires the extra ``parquet``.

        Each leaf becomes a column: a number, a fixed-size list of numbers, or, for several uint8, a
        fixed-size binary. Nested keys are joined with dots. `from_parquet` restores the structure
        and the exact bytes of the items; other programs see plain columns. Priorities and the
        cursor are not saved (see `dumps`). The file appears atomically and is synced to disk.

        Args:
            path: the file. An existing file is replaced.
            compression: ``"none"``, ``"zstd"``, ``"lz4"`` or ``"snappy"``.

        Returns:
            The number of items written. Items that are overwritten during the call are left out.

        Raises:
            TypeError: the items contain text or other values that are not tensors.
            MissingExtra: pyarrow is not installed. The message contains the command to install it.
            OSError: there is no space, or permission is denied. The existing file is kept.

        Cost: one copy of all bytes, and memory for 64 MiB of items.
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
        """Creates a buffer with the items of a Parquet file. Requires the extra ``parquet``.

        Args:
            path: a file from `to_parquet` or another program, or a folder of such files. A column
                contains numbers, lists of numbers, fixed-size binaries, or structs of these. All
                lists of a column must have the same length, which becomes the shape. A dot in a
                name separates nested keys. From a folder, all ``*.parquet`` files in it and its
                subfolders are read in the order of their names (``part.2`` before ``part.10``).
                Names that begin with a dot or underscore are skipped.
            storage: storage for the items, or a function that creates one for a number of items.
                If None, creates a `LazyTensorStorage`.
            rename: dict from names of columns in the file to new names. For example, LeRobot's
                column ``index`` has the name of an entry of each sample, so pass
                ``{"index": "stored_index"}``.
            **options: arguments of the constructor.

        Raises:
            FileNotFoundError: the file does not exist, or the folder contains no Parquet file.
            SchemaMismatchError: a column has an unsupported type, lists of different lengths, rows
                without a value, or an invalid name. Also raised if the files of a folder have
                different columns. The message names the file and the column.
            ValueError: ``rename`` contains a column that does not exist.
            MissingExtra: see `to_parquet`.

        Cost: one copy of all bytes, and 64 MiB of memory in addition to the storage.
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
