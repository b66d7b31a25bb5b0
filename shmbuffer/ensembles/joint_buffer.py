"""The methods of several buffers that are used like one `ReplayBuffer`.

    sample ──▶ the joint sampler chooses rows ──▶ each buffer reads and validates its row
           ──▶ the rows are joined ──▶ transform

The storages, samplers and writers of the buffers are combined in a `StorageEnsemble`, a
`SamplerEnsemble` and a `WriterEnsemble`. A `ReplayBuffer` with these three, the *joint buffer*,
prefetches, saves and loads. Methods that change items or all buffers are implemented here, by
calls of the public methods of each buffer.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.buffers.calls.dataset import BatchDataset
from shmbuffer.buffers.calls.stored_items import ConditionalUpdateResult
from shmbuffer.buffers.data_path import drawing
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.data_path.priority_entry import (
    no_index,
    sample_alone,
    say_what_is_missing,
)
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.ensembles.joint_parts import JointPart, PartsOf, StorageEnsemble, WriterEnsemble
from shmbuffer.ensembles.joint_rows import known_tickets, routes, storage_index
from shmbuffer.ensembles.sampler_ensemble import SamplerEnsemble
from shmbuffer.ensembles.turns import Row, Shares, Turns
from shmbuffer.items.indices import elements_of, resolve_batch_size
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.items.raw_priorities import PriorityUpdate, reduced
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.leaf import Key
from shmbuffer.memory.system import deadline
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.sampler import Sampler, in_storage
from shmbuffer.samplers.slicing.slices import SliceSampler
from shmbuffer.saves.checkpoints import Saves
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors import pinned
from shmbuffer.tensors.eager import FRAMES, eager
from shmbuffer.tensors.form import cpu
from shmbuffer.units.unit import SampleUnit
from shmbuffer.writers.immutable import ImmutableDatasetWriter
from shmbuffer.writers.writer import Writer

Collate = Callable[[Any], Any]

_PARTS = {"storage": StorageEnsemble, "sampler": SamplerEnsemble, "writer": WriterEnsemble}
_VERSION = ("", "version")  # cannot be the key of an entry in a patch


class _OfJoint:
    """Descriptor of an attribute or method that is delegated to the joint buffer."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

    def __get__(self, rb: Any, owner: Any = None) -> Any:
        return getattr(ReplayBuffer if rb is None else rb._joint, self._name)

    def __set__(self, rb: Any, value: Any) -> None:
        setattr(rb._joint, self._name, value)


class _ReturnsSelf(_OfJoint):
    """Descriptor of a method of the joint buffer that returns ``self``, here the ensemble."""

    def __get__(self, rb: Any, owner: Any = None) -> Any:
        call = super().__get__(rb, owner)
        return call if rb is None else lambda *given, **options: (call(*given, **options), rb)[1]


class _OfOneBuffer:
    """Descriptor of a method that only single buffers support. A call raises TypeError."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

    def __get__(self, rb: Any, owner: Any) -> Callable[..., NoReturn]:
        @functools.wraps(getattr(ReplayBuffer, self._name))
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise TypeError(
                f"{owner.__name__}.{self._name}: only a single buffer has this method. Nothing was "
                f"changed. Call {owner._one_buffer}.{self._name}(...) instead"
            )

        refuse.__doc__ = "Raises TypeError: only a single buffer has this method."
        return refuse


class JointBuffer(Saves, metaclass=ABCMeta):
    """Base class for several buffers that are used like one.

    A subclass chooses the rows of a sample (`_choose_rows`, `_shares`), joins them (`_join`) and
    writes items. `JointBuffer` does not derive from `ReplayBuffer`, but is registered as one.
    """

    _one_buffer = "ensemble[i]"  # expression for a single buffer, for messages
    _said_what_is_missing = False  # True once a warning about missing priorities was issued

    storage, sampler, writer, transform = (_OfJoint() for _ in range(4))
    batch_size, generator, set_rng, shared = (_OfJoint() for _ in range(4))
    initialized, plan, write_count, rate_limiter = (_OfJoint() for _ in range(4))
    dim_extend, compilable, is_alive, service_backend = (_OfJoint() for _ in range(4))
    synchronize, can_sample, submit_update_if_present = (_OfJoint() for _ in range(3))
    dumps, loads, register_save_hook, register_load_hook = (_OfJoint() for _ in range(4))
    _storage, _sampler, _writer, _transform = (_OfJoint() for _ in range(4))
    _parts, _reads = _OfJoint(), _OfJoint()

    start, client, append_transform, insert_transform = (_ReturnsSelf() for _ in range(4))

    ack, consumers, leased, remove_consumer = (_OfOneBuffer() for _ in range(4))
    publish, newest, reserve, resume, partials = (_OfOneBuffer() for _ in range(5))
    set_, set_at_, update_, write_all = (_OfOneBuffer() for _ in range(4))
    to_parquet, from_parquet = _OfOneBuffer(), _OfOneBuffer()

    def __init__(
        self,
        members: Sequence[ReplayBuffer],
        sampler: SamplerEnsemble,
        storage: StorageEnsemble | None = None,
        writer: WriterEnsemble | None = None,
        *,
        collate_fn: Collate | None = None,
        collate_fns: Sequence[Collate | None] | None = None,
        weight_key: str | None = None,
        pin_memory: bool = False,
        shared: bool = False,
        **options: Any,
    ) -> None:
        self._members = tuple(members)
        if storage is None or writer is None:
            transforms = [rb._transform for rb in members]
            storage = StorageEnsemble(*(rb._storage for rb in members), transforms=transforms)
            writer = WriterEnsemble(*(rb._writer for rb in members))
        self._collate_fn = collate_fn
        self._collate_fns = [None] * len(members) if collate_fns is None else list(collate_fns)
        self._weight_key = weight_key
        self._pin_memory = pinned.can_pin(pin_memory)
        self._turns = Turns(self._members)
        for name, part in (("_storage", storage), ("_sampler", sampler), ("_writer", writer)):
            part._members = PartsOf(self._members, name)
        options.pop("sample_unit", None)
        self._rows = _Rows(self)
        self._joint = _Joint(
            self._members,
            storage=storage,
            sampler=sampler,
            writer=writer,
            pin_memory=pin_memory,
            shared=shared,
            sample_unit=self._rows,
            **options,
        )
        if shared:
            for rb in self._members:
                rb.share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows.owner = weakref.ref(self)
        for name in ("_storage", "_sampler", "_writer"):
            getattr(self, name)._members = PartsOf(self._members, name)

    def __repr__(self) -> str:
        return type(self).__name__ + repr(self._joint).removeprefix(_Joint.__name__)

    # -- storages, samplers and writers --------------------------------------------------------

    def set_storage(self, storage: Storage, collate_fn: Collate | None = None) -> Storage:
        """Replaces the storages of all buffers, and the ``collate_fn``.

        Returns:
            A `StorageEnsemble` of the previous storages.

        Raises:
            TypeError: ``storage`` is not a `StorageEnsemble`.
            ValueError: the ensemble does not have one storage for each buffer.
        """
        before = self._exchange("storage", storage)
        self._collate_fn = collate_fn
        return before  # type: ignore[no-any-return]

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replaces the samplers, and the way in which buffers are chosen; see `set_storage`."""
        return self._exchange("sampler", sampler)  # type: ignore[no-any-return]

    def set_writer(self, writer: Writer) -> Writer:
        """Replaces the writers of all buffers; see `set_storage`."""
        return self._exchange("writer", writer)  # type: ignore[no-any-return]

    def _exchange(self, name: str, new: Any) -> Any:
        """Replaces the "storage", "sampler" or "writer" of all buffers, and returns the old one."""
        cls: type[JointPart] = _PARTS[name]
        if not isinstance(new, cls):
            raise TypeError(f"the {name} of an ensemble must be a {cls.__name__}, got {new!r}")
        if len(new) != len(self._members):
            raise ValueError(
                f"the {cls.__name__} must have one {name} for each of the {len(self._members)} "
                f"buffers, got {len(new)}"
            )
        self._parts.drop_prefetched()
        before = getattr(self._joint, name)
        parts = list(before._members)
        for rb, one in zip(self._members, list(new._members), strict=True):
            getattr(rb, f"set_{name}")(one)
        before._members = parts
        new._members = PartsOf(self._members, f"_{name}")
        getattr(self._joint, f"set_{name}")(new)
        return before

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
        """Samples a batch.

        The call waits until the `RateLimiter` of each chosen buffer admits a sample of the row's
        size, and counts the row as a sample of this buffer. If a buffer is a queue, its row
        contains the oldest items of the queue. Batches are prefetched only if no buffer has a rate
        limiter.

        Args:
            batch_size: total number of items. If None, uses the constructor's batch size.
            return_info: if True, returns ``(data, info)``. The info is a TensorDict, or a dict for
                an `OfflineToOnlineReplayBuffer`.
            include_info: if False, a sample of TensorDicts has no entries for index and weights.
            min_size: waits until the online part contains at least this number of items. Only
                supported by `OfflineToOnlineReplayBuffer`.
            timeout: maximum wait in seconds for the entire call. If None, waits indefinitely.
            lease: not supported, because only single buffers have leases.

        Returns:
            ``[rows, batch_size / rows, ...]``. An `OfflineToOnlineReplayBuffer` returns
            ``[batch_size, ...]`` with the rows of the data set first.

        Raises:
            RuntimeError: there is no batch size, or the batch size cannot be divided among the rows
                (also a ValueError), or a transform has changed the batch size.
            EmptyBufferError: a chosen buffer has no items to sample.
            RateLimitTimeout, RateLimitError: the rate limiter of a chosen buffer does not admit the
                sample.
            NotImplementedError: ``min_size`` was passed to a `ReplayBufferEnsemble`.
            TypeError: ``lease`` was passed.

        Cost: one draw and one read for each row, and a copy to join them.
        """
        if lease is not None:
            raise TypeError(
                f"{type(self).__name__}.sample: lease is only supported by a single buffer whose "
                "sampler has a consumer. Nothing was sampled. Call "
                f"{self._one_buffer}.sample(lease=...) instead"
            )
        own = self._joint.batch_size
        count = resolve_batch_size(batch_size, own, "the constructor of the buffer", 2 + FRAMES)
        with deadline.limit_waits(timeout):
            data, info = self._batch(count, min_size)
        if include_info is not False and isinstance(data, TensorDictBase):
            data, info = self._with_info(data, info)
        return (data, info) if return_info else data

    def __iter__(self) -> Iterator[Any]:
        """Yields samples indefinitely."""
        if self._joint.batch_size is None:
            raise RuntimeError("iteration needs a batch size; pass batch_size to the constructor")
        return self._batches(self.sample)

    def next(self) -> Any:
        """Returns ``sample()``."""
        return self.sample()

    def as_dataset(
        self,
        batch_size: int | None = None,
        *,
        return_info: bool = False,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> BatchDataset:
        """Returns a data set of samples for a `torch.utils.data.DataLoader`.

        See `ReplayBuffer.as_dataset`.
        """
        if batch_size is None and self._joint.batch_size is None:
            raise RuntimeError(
                "no batch size was specified; pass batch_size to as_dataset() or to the buffer"
            )
        options = {"return_info": return_info, "min_size": min_size, "timeout": timeout}
        return BatchDataset(self, self._batches, batch_size=batch_size, **options)

    def _batches(self, sample: Callable[[], Any]) -> Iterator[Any]:
        while True:
            yield sample()

    def _batch(self, count: int, min_size: int | None) -> Batch:
        """Returns the data and info of a sample, which may have been prefetched.

        If a buffer has a rate limiter, prefetched samples are discarded.
        """
        if min_size or self._turns.are_needed():
            self._parts.drop_prefetched()
            shares, least = self._shares(count, min_size)
            return self._turns.sample(shares, self._draw_row, self._finish, least)
        prefetcher = self._parts.prefetcher
        if prefetcher is not None and count == self._joint.batch_size:
            return prefetcher.next(self._reads.order)  # type: ignore[no-any-return]
        return self._transform_and_pin(*self._read_rows(self._choose_rows(count)))

    @abstractmethod
    def _shares(self, count: int, min_size: int | None) -> tuple[Shares, dict[int, int]]:
        """Divides a sample of ``count`` items among the buffers.

        Returns the rows, and the number of items to wait for, keyed by buffer number.
        """

    def _choose_rows(self, count: int) -> Any:
        """Draws a sample with the joint sampler, and returns the rows for `_read_rows`."""
        return self._to_rows(*self._sampler.sample(self._storage, count))

    @abstractmethod
    def _to_rows(self, index: Any, known: Any) -> Any:
        """Converts an index and info from the joint sampler to the rows for `_read_rows`."""

    def _read_rows(self, rows: Any) -> Batch:
        """Reads and joins the rows of a sample, each given as ``(buffer number, index, info)``."""
        return self._join([self._read_row(at, index, known) for at, index, known in rows])

    @abstractmethod
    def _join(self, rows: list[Row]) -> Batch:
        """Joins rows into a sample, and returns its data and info."""

    @abstractmethod
    def _with_info(self, data: Any, info: Any) -> tuple[Any, Any]:
        """Adds the entries of the info to a sample of TensorDicts, and returns both."""

    def _draw_row(self, at: int, share: int) -> Row:
        """Draws and reads a row of ``share`` items from buffer ``at``."""
        return self._read_row(at, *self._sampler._draw(at, self._members[at]._storage, share))

    def _read_row(self, at: int, index: Any, known: dict[Any, Any]) -> Row:
        """Reads and validates items of buffer ``at``. ``known`` is their info from the sampler."""
        rb = self._members[at]
        return at, *drawing.chosen(rb.plan, storage_index(index, rb._storage), dict(known))

    def _finish(self, rows: list[Row]) -> Batch:
        """Joins rows into a sample, which is transformed and pinned."""
        return self._transform_and_pin(*self._join(rows))

    def _transform_and_pin(self, data: Any, info: Any) -> Batch:
        """Transforms a joined sample, and copies it to pinned memory if this was requested."""
        data = self._apply_transform(data)
        return (pinned.pin(data), pinned.pin(info)) if self._pin_memory else (data, info)

    def _apply_transform(self, data: Any) -> Any:
        """Calls the transform of the ensemble."""
        transform = self._joint._transform
        return transform(data) if len(transform) else data

    def _finish_row(self, at: int, data: Any) -> Any:
        """Collates and transforms items from buffer ``at``, as for a sample of this buffer."""
        rb = self._members[at]
        collate = self._collate_fns[at] or rb._parts.collate_fn
        storage = rb._storage
        data = storage.collate(data) if collate is None else collate(storage.uncollated(data))
        return rb._transform(data) if len(rb._transform) else data

    def _default_info(self) -> dict[str, float]:
        """Returns the values of info entries for rows whose buffers do not have these entries.

        The importance weight is 1, as for uniform samples, and the generation is -1, for unknown.
        """
        found: dict[str, float] = {}
        for rb in self._members:
            info = rb.plan.info
            if isinstance(rb._sampler, PrioritizedSampler):
                own = info.weight_keys if self._weight_key is None else (self._weight_key,)
                found.update(dict.fromkeys(own, 1.0))
            if info.generation:
                found[GENERATION] = -1
        return found

    # -- changes of items ----------------------------------------------------------------------

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """Returns items by index."""

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """Raises RuntimeError. Items must be changed in their own buffer instead."""
        raise RuntimeError(
            f"an assignment to {index!r} of an ensemble does not select a buffer; use "
            f"{self._one_buffer}[index] = data"
        )

    def _routable(self, index: Any) -> Any:
        """Converts an index of items to the form that `routes` expects."""
        return index

    @eager
    def update_priority(
        self, index: Any, priority: Any = None, *, generation: Any = None
    ) -> PriorityUpdate:
        """Sets priorities of items in their buffers; see `ReplayBuffer.update_priority`."""
        if priority is None:
            return self._update_by_sample(sample_alone(index, index_generation=generation))
        return self._sampler.update_priority(  # type: ignore[no-any-return]
            self._routable(index), priority, storage=self._storage, generation=generation
        )

    def mark_update(self, index: Any) -> None:
        """Sets the priority of the items at ``index`` to the default priority of their buffer."""
        self._sampler.mark_update(self._routable(index), storage=self._storage)

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Sets the priorities of a sample's items in their buffers.

        See `TensorDictReplayBuffer.update_tensordict_priority`. The result contains the sums over
        all buffers. Items in buffers without priorities are not counted. If an error occurs, other
        buffers may already have been changed.
        """
        return self._update_by_sample(data)

    def _update_by_sample(self, data: Any) -> PriorityUpdate:
        """Sets the priorities of a sample's items; see `update_tensordict_priority`."""
        index = data.get(INDEX, None)
        if index is None:
            raise no_index(data)
        keys = {GENERATION, *map(_priority_key, self._members)}
        entries = {key: data.get(key, None) for key in keys}
        applied = stale = 0
        for part in routes(self._routable(index), self._storage, entries, several=True):
            member = self._members[part.at]
            sampler = member._sampler
            if not isinstance(sampler, PrioritizedSampler):
                continue
            key = _priority_key(member)
            priority = part.entries[key]
            if priority is None and not self._said_what_is_missing:
                self._said_what_is_missing = True
                say_what_is_missing(key, data, calls=4)
            raw = (
                sampler.default_priority
                if priority is None
                else reduced(priority, len(part.where), sampler.reduction)
            )
            tickets = known_tickets(part.entries[GENERATION])
            update = sampler.update_priority(
                part.where, raw, storage=part.storage, generation=tickets
            )
            applied, stale = applied + update.applied, stale + update.stale
        return PriorityUpdate(applied, stale)

    @eager
    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> Any:
        """Calls `ReplayBuffer.update_if_present` of each buffer for its items.

        ``patch`` and ``version`` have the leading shape of ``index``. The result is flattened. If
        an error occurs, other buffers may already have been changed.
        """
        patch = patch if isinstance(patch, TensorDictBase) else TensorDict(patch)
        entries = dict(patch.items(True, True))
        own: dict[Any, Any] = {GENERATION: generation, _VERSION: version}
        results = []
        for part in routes(self._routable(index), self._storage, {**entries, **own}):
            tickets, versions = (part.entries.pop(key) for key in own)
            if not self._can_change(part.at):
                found = cpu.zeros(len(part.rows), dtype=torch.bool)
                results.append((part.rows, ConditionalUpdateResult(found)))
                continue
            result = self._members[part.at].update_if_present(
                index=part.where,
                generation=tickets,
                patch=TensorDict(part.entries),
                version_key=version_key,
                version=versions,
                require_newer=require_newer,
            )
            results.append((part.rows, result))
        return _combine(results, compared=version_key is not None)

    def _can_change(self, at: int) -> bool:
        """True if `update_if_present` can change the items of buffer ``at``."""
        return True

    def end_streams(
        self,
        *,
        end_key: Key = ("next", "done"),
        terminated_key: Key | None = ("next", "terminated"),
        truncated_key: Key | None = ("next", "truncated"),
    ) -> None:
        """Ends all open trajectories, before collectors start again after a resume.

        The newest item of each stream of each collector becomes the last step of its trajectory, in
        every buffer. An item that was not the last step before is marked as truncated. Call this
        method if your code reads these flags. Slice samplers do not need it, because they never
        combine the items of a collector with the items of its successor. No collector may write
        during the call. Data sets (`ImmutableDatasetWriter`) and prefetched batches do not change.

        Args:
            end_key: key of the flag for the last step of a trajectory, which is set to True.
            terminated_key: key of the flag for a step at which the episode terminated. The flag is
                only read. The key can be None, and the items need not have it.
            truncated_key: key of the flag for a truncated step, which is set to True if neither
                ``end_key`` nor ``terminated_key`` was set. The key can be None, and the items need
                not have it.

        Raises:
            RuntimeError: a storage cannot change items in place. Nothing was changed.
            KeyError: the items have no ``end_key``. Nothing was changed.
            TypeError: a flag is not bool. Nothing was changed.
            ValueError: two of the keys are equal. Nothing was changed.

        Cost: O(capacity).
        """
        self.synchronize()
        patches = []
        for rb in self._members:
            if isinstance(rb._writer, ImmutableDatasetWriter):
                continue
            rb.synchronize()
            newest = newest_of_streams(rb._storage)
            if newest is not None:
                data = rb._storage.get(newest.index)
                patch = _patch_of(data, end_key, terminated_key, truncated_key)
                patches.append((rb, newest, patch))
        for rb, newest, patch in patches:
            rb.update_if_present(index=newest.index, generation=newest.tickets, patch=patch)
            if isinstance(rb._sampler, SliceSampler):
                rb._sampler._boundaries.forget()

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yields the items of one buffer after another; see `ReplayBuffer.iter_in_order`."""
        for rb in self._members:
            yield from rb.iter_in_order(chunk)

    # -- calls for all buffers -----------------------------------------------------------------

    def share(self, shared: bool = True) -> Self:
        """Calls `ReplayBuffer.share` for each buffer."""
        for rb in self._members:
            rb.share(shared)
        self._joint.share(shared)
        return self

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes all items from all buffers.

        Raises RuntimeError if the writer of a buffer is an `ImmutableDatasetWriter`.
        """
        self._parts.drop_prefetched()
        self._writer.require_no_data_set()
        for rb in self._members:
            rb.empty(empty_write_count)
        self._turns.forget()

    def stats(self) -> dict[str, Any]:
        """Returns the sums of TorchRL's counters over all buffers, and ``num_buffers``."""
        each = [rb.stats() for rb in self._members]
        size, capacity = (sum(one[name] for one in each) for name in ("size", "capacity"))
        return {
            "size": size,
            "capacity": capacity,
            "utilization": size / capacity,
            "write_count": sum(one["write_count"] for one in each),
            "prefetch_queue_size": self._joint.stats()["prefetch_queue_size"],
            "initialized": self.initialized,
            "num_buffers": len(each),
        }

    def flush(self) -> None:
        """Calls `ReplayBuffer.flush` for each buffer."""
        for rb in self._members:
            rb.flush()

    def close(self) -> None:
        """Closes all buffers. Idempotent."""
        if self._parts.prefetcher is not None:
            self._parts.prefetcher.close()
        for rb in self._members:
            rb.close()
        self._joint.close()

    def shutdown(self, timeout: float | None = None) -> None:
        """Calls `synchronize` and then `close`, even if `synchronize` raises an error. Idempotent.

        Args:
            timeout: ignored. It exists for compatibility with TorchRL.
        """
        try:
            self.synchronize()
        finally:
            self.close()

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Returns the class as a Ray actor class; see `ReplayBuffer.as_remote`."""
        return ReplayBuffer.as_remote.__func__(cls, remote_config)  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all buffers; see `ReplayBuffer.state_dict`."""
        own = []
        for rb in self._members:
            rng = rb.generator
            state = None if rng is None or rng is self.generator else rng.get_state()
            own.append({"_transforms": rb._transform.state_dict(), "_rng": state})
        return {**self._joint.state_dict(), "_buffers": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of all buffers; see `ReplayBuffer.load_state_dict`.

        Raises:
            ValueError: the state has another number of buffers.
        """
        for rb in self._members:
            rb._parts.drop_prefetched()
        self._joint.load_state_dict(state_dict)
        for rb, own in zip(self._members, state_dict["_buffers"], strict=True):
            rb._transform.load_state_dict(own["_transforms"])
            if own["_rng"] is not None:
                mine = rb.generator
                if mine is None or mine is self.generator:
                    mine = rb.generator = torch.Generator()
                mine.set_state(own["_rng"])


ReplayBuffer.register(JointBuffer)  # type: ignore[type-abstract] # as in TorchRL


class _Rows(SampleUnit):
    """The sample unit of the joint buffer, which reads and joins the rows of its samples.

    Args:
        owner: the ensemble.
    """

    owner: Any = None  # a weak reference, so that an unused ensemble is freed immediately

    def __init__(self, owner: JointBuffer | None = None) -> None:
        if owner is not None:
            self.owner = weakref.ref(owner)

    def expand(self, index: Any, info: Any, storage: Any) -> tuple[Any, dict[Any, Any]]:
        """Returns the rows that the joint sampler chose, instead of an index.

        `StorageEnsemble.fetch` passes them on to `assemble` unchanged.
        """
        return self.owner()._to_rows(index, info), {}

    _expand = expand

    def assemble(self, data: Any, info: dict[str, Any]) -> Batch:
        """Reads and joins the rows, and returns the data and info of the sample."""
        return self.owner()._read_rows(data)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _Rows, ()


class _Joint(ReplayBuffer):
    """The joint buffer of an ensemble.

    Args:
        buffers: the buffers of the ensemble.
        **options: arguments of `ReplayBuffer`.
    """

    _own_options = ("members",)

    def __init__(self, buffers: Sequence[ReplayBuffer], **options: Any) -> None:
        super().__init__(members=[rb._parts for rb in buffers], **options)

    def update_if_present(self, **update: Any) -> Any:
        """Calls `JointBuffer.update_if_present`. Used by `submit_update_if_present`."""
        unit: Any = self._parts.unit
        return unit.owner().update_if_present(**update)


def _priority_key(rb: ReplayBuffer) -> str | tuple[str, ...]:
    """Returns the key under which samples contain the priorities for ``rb``."""
    return rb.priority_key if isinstance(rb, TensorDictReplayBuffer) else "td_error"


def _combine(
    results: Iterable[tuple[torch.Tensor, ConditionalUpdateResult]],
    *,
    compared: bool,  # True if the versions of the items were compared
) -> ConditionalUpdateResult:
    """Combines the results of the buffers, each with the positions of its items, into one."""
    count = sum(len(rows) for rows, _ in results)
    updated, rejected = cpu.zeros((2, count), dtype=torch.bool)
    for rows, result in results:
        updated[rows] = result.updated
        if result.version_rejected is not None:
            rejected[rows] = result.version_rejected
    return ConditionalUpdateResult(updated, rejected if compared else None)


class Newest(NamedTuple):
    """The newest item of each stream in a storage."""

    index: Any  # index of the items, for `Storage.get`
    tickets: torch.Tensor  # tickets of the items, int64 ``[n]``


def newest_of_streams(storage: Storage) -> Newest | None:
    """Returns the newest item of each stream of each collector, or None if there are no items.

    Raises RuntimeError if the storage cannot change items in place.
    """
    if not storage.supports_conditional_update:
        raise RuntimeError(
            f"end_streams: a {type(storage).__name__} cannot change items in place; use a "
            "LazyTensorStorage or a LazyMemmapStorage. Nothing was changed"
        )
    ring = storage.ring()
    if ring is None:
        return None
    words = ring.live.words[: ring.live.used()].copy()
    held = np.flatnonzero(slots.committed(words))
    # Sorted by slot, newest first. Tickets are not in this order, because a change renews them.
    held = held[np.argsort(-((held - ring.head) % ring.capacity))]
    found = held[np.unique(ring.live.sources[held], return_index=True)[1]]
    if not len(found):
        return None
    elements = elements_of(found, ring.width)
    tickets = np.repeat(slots.tickets(words[found]), ring.width)
    return Newest(in_storage(storage, torch.from_numpy(elements)), torch.from_numpy(tickets))


def _patch_of(data: Any, end: Key, terminated: Key | None, truncated: Key | None) -> dict[Any, Any]:
    """Returns a patch for `update_if_present` that ends the trajectories of items.

    Args:
        data: the items, each the newest item of its stream.
        end: see ``end_key`` of `JointBuffer.end_streams`.
        terminated: see ``terminated_key``.
        truncated: see ``truncated_key``.
    """
    keys = [end, *(key for key in (terminated, truncated) if key is not None)]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"end_streams: the keys must be different, got {keys}. Nothing was changed"
        )
    flags = {key: data.get(key, None) for key in keys}
    if flags[end] is None:
        raise KeyError(f"end_streams: the items have no entry {end!r}. Nothing was changed")
    for key, flag in flags.items():
        if flag is not None and flag.dtype is not torch.bool:
            raise TypeError(
                f"end_streams: {key!r} must be bool, got {flag.dtype}. Nothing was changed"
            )
    patch = {end: torch.ones_like(flags[end])}
    if truncated is not None and flags[truncated] is not None:
        own = None if terminated is None else flags[terminated]
        over = flags[end] if own is None else flags[end] | own
        patch[truncated] = flags[truncated] | ~over
    return patch
