"""Buffers whose samples are TensorDicts that say where their rows come from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuffer.memory import patience
from shmbuffer.replay.buffers.prefetch import Batch
from shmbuffer.replay.buffers.refilled import Beside, Refills
from shmbuffer.replay.buffers.replay_buffer import ReplayBuffer
from shmbuffer.replay.eager import FRAMES, eager
from shmbuffer.replay.form.batches import as_tensordict
from shmbuffer.replay.form.mismatch import no_names
from shmbuffer.replay.form.nodes import is_collection, nest, unlocked
from shmbuffer.replay.form.tensors import as_tensor
from shmbuffer.replay.keys import GENERATION, INDEX, OWN_KEYS
from shmbuffer.replay.records.deferred import amended
from shmbuffer.replay.samplers import PrioritizedSampler, PriorityUpdate
from shmbuffer.replay.samplers.priority.raw import as_raw, check_raw
from shmbuffer.replay.samplers.sampler import draw_key
from shmbuffer.replay.storages.native_rows import NativeRows
from shmbuffer.replay.storages.rows import Rows
from shmbuffer.replay.storages.tensor import TensorStorage
from shmbuffer.replay.writers import TensorDictRoundRobinWriter

_NO_OUT = (
    "sample(out=...) is there where one native call makes the sample: items are TensorDicts of "
    "tensors of one shape in the ring's own memory, with one storage dimension, and there is no "
    "collate_fn, transform, pin_memory, prefetch or include_info; leave out away"
)


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for TensorDicts: samples say their index, data bring their priority.

    Data may also come as a dict of tensors or numpy arrays (nested, or with tuple keys), which is
    the fastest way in; it is the same as the TensorDict with these entries. Numbers, lists of them
    and arrays of other libraries (JAX) are converted. A plain number takes the dtype of its leaf if
    that can hold it; what else differs in dtype is refused.

    A sample has, beside the data:

    | key | shape, dtype | when |
    |---|---|---|
    | ``"index"`` | ``[n]`` int64, or ``[n, ndim]`` | always |
    | ``"_weight"``, ``"priority_weight"`` | ``[n]`` float32, one tensor | prioritized |
    | ``"index_generation"`` | ``[n]`` int64 | shared, or the writer tracks generations |

    Where one item has a batch size of its own, they are expanded to it. They are never stored.

    Args:
        priority_key: entry of the data and of samples that holds priorities.
        **kwargs: see `ReplayBuffer`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> rb.extend(TensorDict({"obs": torch.arange(3)}, [3]))
        tensor([0, 1, 2])
        >>> sorted(rb.sample().keys())
        ['index', 'obs']

    Source: ``torchrl.data.TensorDictReplayBuffer``.
    """

    family = "TensorDictReplayBuffer"
    default_writer = TensorDictRoundRobinWriter
    _flat_rows: Rows | None = None  # where one native call makes a sample
    _mapping = "tensordict"
    _said_what_is_missing = False  # priorities, of a sample that came back without

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **kwargs: Any) -> None:
        self._priority_key = priority_key
        self._refills = Refills()
        super().__init__(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_refills": Refills(), "_flat_rows": None}

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Entry that holds priorities."""
        return self._priority_key

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        self._priority_key = key
        self._join()

    # -- writing -------------------------------------------------------------------------------

    @eager
    def add(self, data: Any, timeout: float | None = None) -> int | torch.Tensor:
        """Write one item: a TensorDict ``[*lanes]``, or a dict.

        A priority in ``data[priority_key]`` becomes the item's, in the same write.

        Args:
            data: the item.
            timeout: see `ReplayBuffer.add`.

        Returns:
            Its index, an int; where the storage has lanes, int64 ``[lanes, ndim]``.

        Raises:
            ValueError: the priority is NaN, infinite or negative; nothing was changed.
            TypeError: None, or a tuple or list, whose parts have no names.
            SchemaMismatchError, RingOverrunError, RateLimitTimeout, RateLimitError: see
                `ReplayBuffer.add`.
        """
        if timeout is not None:
            with patience.within(timeout):
                return self.add(data)
        direct = self._direct
        if direct is not None and not self._transform.transforms:
            index = direct.add(data)
            if index is not None:
                return index
        if data is None:
            self._refuse_none("add")
        data = self._named(data, True)
        data = self._inverted(data) if len(self._transform) else data
        if data is None:
            return self._nothing()
        return self._write(data, True, self._priorities_in(data, True))

    @eager
    def extend(
        self,
        tensordicts: Any,
        *,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Write a batch: whole or not at all.

        Priorities in ``tensordicts[priority_key]`` become the items', in the same native call.

        Args:
            tensordicts: a TensorDict ``[n, *lanes]``, a dict, or a list of TensorDicts.
            update_priority: False leaves priorities in the data alone: items get the default one.
            timeout: see `ReplayBuffer.add`.

        Returns:
            Indices, int64 ``[n]``; where the storage has lanes, ``[n * lanes, ndim]``.

        Raises:
            ValueError: a priority is NaN, infinite or negative; nothing was changed.
            TypeError: None, or a tuple, whose parts have no names.
            SchemaMismatchError, RingOverrunError, RateLimitTimeout, RateLimitError: see
                `ReplayBuffer.extend`.

        Cost: one native call; 0.6 µs a leaf more where something has to be converted.
        """
        if timeout is not None:
            with patience.within(timeout):
                return self.extend(tensordicts, update_priority=update_priority)
        direct = self._direct
        if (
            direct is not None
            and update_priority is None
            and not self._transform.transforms
            and not self._dim_extend
        ):
            written = direct.extend(tensordicts)
            if written is not None:
                return written
        if tensordicts is None:
            self._refuse_none("extend")
        data = self._named(tensordicts, False)
        if type(data) is list or len(self._transform) or self.dim_extend:
            data = self._batch_of(data)
        if data is None:
            return self._nothing()
        priorities = None
        if update_priority is not False:
            priorities = self._priorities_in(data, False)
        index = self._write(data, False, priorities)
        assert isinstance(index, torch.Tensor)
        return index

    # -- sampling ------------------------------------------------------------------------------

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: TensorDict | None = None,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: how many items; None is the constructor's.
            return_info: return ``(data, info)``.
            include_info: False leaves index and weights out of the sample; they are in ``info``.
            out: a sample that is not needed any more, to become this one: its tensors are filled
                anew, entries of its own are dropped. Any TensorDict ``[batch_size]`` will do. Only
                where one native call makes the sample; see ``ValueError``.
            min_size: wait until so many items are there.
            timeout: seconds to wait, for them and for a `RateLimiter`; None: as long as it takes.

        Returns:
            A TensorDict ``[batch_size]`` with the entries of the table above; ``out``, where it was
            given. Where the items are tensorclasses (or, with a storage of somebody else's, no
            TensorDicts), index and weights are in ``info`` only.

        Raises:
            EmptyBufferError: nothing to draw from.
            RateLimitTimeout, RateLimitError: items have to be written first.
            RuntimeError: no batch size anywhere, or a transform has changed the batch size, so that
                index and weights do not fit (take them from ``return_info=True`` then).
            TypeError: ``out`` is no TensorDict.
            ValueError: ``out`` has another batch size; or items are no TensorDicts of tensors, of
                one shape and in the ring's own memory; or ``include_info=False``, several storage
                dimensions, a ``collate_fn``, a transform, ``pin_memory`` or ``prefetch`` is asked
                for as well.

        Cost: one native call; 0.4 µs a leaf for the tensors that it fills, nothing with ``out``.
        """
        count = self._batch_size if batch_size is None else None
        if count is None:
            count = self._count(batch_size)
        asked = min_size is not None or timeout is not None
        if not asked and (not self._limiter_version[0] or self._admitted(count)):
            try:
                return self._sampled(count, return_info, include_info, out)
            except BaseException:
                self._not_drawn(count)
                raise
        draw = partial(self._sampled, count, return_info, include_info, out)
        queued = partial(self._queued, return_info, include_info, out)
        return self._in_turn(count, min_size, timeout, draw, queued)

    def _queued(
        self, return_info: bool, include_info: bool | None, out: TensorDict | None, batch: Batch
    ) -> Any:
        """`sample`, of what came out of a queue."""
        if out is not None:
            raise ValueError(_NO_OUT)
        data, info = batch
        if include_info is not False:
            data = self._with_info(data, info)
        return (data, info) if return_info else data

    def _sampled(
        self, count: int, return_info: bool, include_info: bool | None, out: TensorDict | None
    ) -> Any:
        """`sample`, now."""
        if self._flat_rows is None:
            self._rows()  # another process may have written the first item by now
        rows = self._flat_rows
        if rows is not None and include_info is None and not self._transform.transforms:
            if out is not None:
                info = self._refill(out, count, rows)
                return (out, info) if return_info else out
            tensors, index, tickets, weights = self._draw(rows.sample, count)
            info = {INDEX: index}
            if weights is not None:
                for key in self._weight_keys:
                    info[key] = weights
            if self._says_generation or self._shared:
                info[GENERATION] = tickets
            data = rows.leaves.build_with(tensors, index.shape, info)
            return (data, info) if return_info else data
        if out is not None and (self._rows() or not isinstance(self._storage, TensorStorage)):
            raise ValueError(_NO_OUT)
        data, info = self._next(count)
        if include_info is not False:
            data = self._with_info(data, info)
        return (data, info) if return_info else data

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Set the priorities of a sample from its entry ``priority_key``.

        Where the sample has ``"index_generation"``, items that were written over since are left
        alone and counted. Without an entry ``priority_key`` the items get the default priority, as
        in TorchRL, and a warning says so once.

        Args:
            data: a sample, or part of one: entries ``"index"`` and ``priority_key``. Several
                priorities an item (a stored trajectory) are reduced by the sampler's ``reduction``.

        Returns:
            How many were applied and how many were stale; zeros where the sampler knows no
            priorities.

        Raises:
            KeyError: no entry ``"index"``.
            ValueError: NaN, infinite or negative; nothing was changed.

        Cost: one native call.
        """
        sampler = self._sampler
        if not isinstance(sampler, PrioritizedSampler):
            return PriorityUpdate(0, 0)
        given = data
        if isinstance(data, LazyStackedTensorDict) and not isinstance(self._storage, TensorStorage):
            data = self._by_item(data)
        entries = data._tensordict if type(data) is TensorDict else data
        index = entries.get(INDEX, None)
        if index is None:
            raise KeyError(
                f"update_tensordict_priority needs the entry {INDEX!r} that a sample has; "
                f"this TensorDict has {sorted(map(str, data.keys()))}"
            )
        key = self._priority_key
        priority = entries.get(key, None) if type(key) is str else data.get(key, None)
        generation = entries.get(GENERATION, None)
        storage = self._storage
        if getattr(storage, "lanes", ()):
            count = index.numel() // index.shape[-1]
        else:
            index = _one_each(index)
            count = index.numel()
        if generation is not None:
            generation = _one_each(generation)
        raw: Any = priority
        if priority is None:
            if not self._said_what_is_missing:
                self._said_what_is_missing = True
                say_what_is_missing(key, given)
            raw = sampler.default_priority
        elif not (isinstance(priority, torch.Tensor) and priority.numel() == count):
            raw = reduce(priority, count, sampler.reduction)
        return sampler.update_priority(index, raw, storage=storage, generation=generation)

    # -- inside --------------------------------------------------------------------------------

    def _refill(self, out: TensorDict, count: int, rows: Rows) -> dict[str, Any]:
        """Draw into ``out``. What is in it beside the items."""
        if not isinstance(rows, NativeRows):
            raise ValueError(_NO_OUT)
        sampler = self._sampler
        by_priority = self._by_priority
        tickets = GENERATION if self._says_generation or self._shared else None
        beside = Beside(INDEX, tickets, (), torch.float32)
        if by_priority is not None:
            beside = Beside(INDEX, tickets, self._weight_keys, by_priority.dtype)
        into = self._refills.of(out, count, rows.leaves, beside)
        index, weights, shown = into.index, into.weights, into.shown
        beta = None if by_priority is None else by_priority.beta
        key = draw_key(sampler._rng)
        rows.sample_into(into.addresses, index, into.tickets, weights, key, beta)
        if shown is not weights:
            assert by_priority is not None
            assert by_priority.ring is not None
            assert weights is not None
            assert shown is not None
            shown.copy_(by_priority._weights(by_priority.ring, index, weights))
        into.changed()
        info = {INDEX: index, **dict.fromkeys(beside.weight_keys, shown)}
        return info if tickets is None else {**info, GENERATION: into.tickets}

    def _named(self, data: Any, single: bool) -> Any:
        """The data, as those see them who take no dict apart: as TensorDicts."""
        rows = isinstance(self._storage, TensorStorage)
        if rows and not len(self._transform):
            return data
        if isinstance(data, list) and not single:
            return data if rows else [self._named(item, True) for item in data]
        if isinstance(data, tuple) and not rows:
            raise TypeError(no_names(data))
        if is_collection(data) or not isinstance(data, Mapping):
            return data
        return as_tensordict(data, self._storage.ndim - single)

    def _join(self) -> None:
        storage = self._storage
        if isinstance(storage, TensorStorage):
            key = self._priority_key
            extra = [name for name in (key, self._weight_key) if isinstance(name, str)]
            storage.allow(OWN_KEYS.union(extra))
        super()._join()

    def _choose_path(self) -> None:
        super()._choose_path()
        storage = self._storage
        plain = (
            self._native_sample
            and isinstance(storage, TensorStorage)
            and (storage.device is None or storage.device.type == "cpu")
            and self._collate_fn is None
            and not self._pin_memory
            and self._prefetcher is None
        )
        rows = self._rows() if plain else None
        self._flat_rows = rows if rows is not None and rows.leaves.is_flat else None
        self._says_generation = self._track_generations or storage.shared

    @property
    def _priority_entry(self) -> str | tuple[str, ...] | None:
        return self._priority_key

    def _priorities_in(self, data: Any, single: bool) -> NDArray[np.float64] | None:
        """Raw priorities in the data, float64 ``[n * lanes]``; None if there are none."""
        if not isinstance(self._sampler, PrioritizedSampler):
            return None
        key = self._priority_key
        if isinstance(data, (list, LazyStackedTensorDict)) and not (
            single or isinstance(self._storage, TensorStorage)
        ):
            found = self._reduced(data if isinstance(data, list) else list(data.unbind(0)))
            if found is not None:
                check_raw(found)
                self._storage.prepare(data, single)
            return found
        if type(data) is TensorDict and type(key) is str:
            priority = data._tensordict.get(key)
        elif isinstance(data, dict):
            priority = data.get(key)
            if priority is None and type(key) is tuple:
                priority = _entry(nest(data), key)
        elif is_collection(data):
            priority = data.get(key, None)
        else:
            return None
        if priority is None:
            return None
        storage = self._storage
        dims = storage.ndim - 1 if single else storage.ndim
        priority = as_tensor(priority)
        count = priority.shape[:dims].numel()
        raw = reduce(priority, count, self._sampler.reduction)
        if self._rows() is None or not self._ring_priorities:
            # The first write, or a table of the sampler's own: look before anything is made or
            # written.
            check_raw(raw)
            storage.prepare(data, single)  # binds the sampler, so that priorities go with the write
        return raw

    def _reduced(self, items: list[Any]) -> NDArray[np.float64] | None:
        """Raw priorities in TensorDicts, one each; None where one of them has none."""
        found = [item.get(self._priority_key, None) for item in items if is_collection(item)]
        if len(found) < len(items) or not items or any(one is None for one in found):
            return None
        how = self._sampler.reduction  # type: ignore[attr-defined] # of a prioritized one
        return np.concatenate([reduce(torch.as_tensor(one), 1, how) for one in found])

    def _by_item(self, data: LazyStackedTensorDict) -> TensorDict:
        """What a sample of items of any shapes says of each of them: index, ticket, priority."""
        items = data.tensordicts
        rows: dict[Any, torch.Tensor] = {}
        for key in (INDEX, GENERATION):
            found = [item.get(key, None) for item in items]
            if all(one is not None for one in found):
                rows[key] = torch.stack([one.reshape(-1)[0] for one in found])
        if (raw := self._reduced(items)) is not None:
            rows[self._priority_key] = torch.from_numpy(raw)
        return TensorDict(rows, [len(items)])

    def _with_info(self, data: Any, info: dict[str, Any]) -> Any:
        """``data`` with index and weights among its entries."""
        if not isinstance(data, TensorDictBase):
            return data
        dims = data.batch_dims
        if type(data) is TensorDict and _lie_beside(data, info):
            for key, value in info.items():
                data._set_str(key, value, validated=True, inplace=False, non_blocking=False)
            return data
        try:
            if isinstance(data, LazyStackedTensorDict) and not isinstance(
                self._storage, TensorStorage
            ):
                if not amended(data, partial(_set_by_item, info=info)):
                    with unlocked(data):
                        _set_by_item(data.tensordicts, info)
                return data
            if -1 in data.batch_size:  # nested: of each item there is one index and one weight
                data.batch_size = data.batch_size[: list(data.batch_size).index(-1)]
                dims = data.batch_dims
            with unlocked(data):
                for key, value in info.items():
                    entry = torch.stack(value, -1) if isinstance(value, tuple) else value
                    if not isinstance(entry, torch.Tensor):
                        entry = torch.as_tensor(entry)
                    tail = 1 if isinstance(value, tuple) else 0
                    while entry.dim() - tail < dims:
                        entry = entry.unsqueeze(entry.dim() - tail)
                    entry = entry.expand(*data.batch_size, *entry.shape[dims:])
                    data.set(key, entry.to(data.device) if data.device is not None else entry)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"index and weights have {len(info[INDEX])} rows, but the sample has batch size "
                f"{list(data.batch_size)}: a transform or collate_fn has changed it; take them "
                "from sample(return_info=True, include_info=False)"
            ) from error
        return data


def say_what_is_missing(key: str | tuple[str, ...], data: TensorDictBase) -> None:
    """Warn the caller of ``update_tensordict_priority`` of a sample without priorities."""
    names = ((one,) if isinstance(one, str) else one for one in data.keys(True))
    there = sorted(".".join(name) for name in names if name[0] not in OWN_KEYS)
    warnings.warn(
        f"update_tensordict_priority: this sample has no entry {key!r}, so its items get the "
        f"default priority; it has {there}. Set sample[{key!r}] to the new priorities, or name "
        "their entry with the buffer's priority_key",
        stacklevel=3 + FRAMES,
    )


def reduce(priority: Any, count: int, how: str) -> NDArray[np.float64]:
    """Priorities ``[count, ...]`` as float64 ``[count]``: of several for one item, one.

    Args:
        priority: tensor or array whose leading dimensions hold ``count`` items.
        count: items.
        how: ``"max"``, ``"min"``, ``"mean"``, ``"median"`` or ``"sum"``.

    Raises:
        RuntimeError: the numbers cannot be divided among the items.
    """
    if isinstance(priority, torch.Tensor) and priority.requires_grad:
        priority = priority.detach()
    size = priority.numel() if isinstance(priority, torch.Tensor) else np.size(priority)
    if size == count or size <= 1:
        return as_raw(priority, count)
    if not count or size % count:
        raise RuntimeError(f"{size} priorities cannot be divided among {count} items")
    several = as_raw(priority, size).reshape(count, -1)
    if how == "median":  # of an even number the lower one, as torch.median has it
        return np.ascontiguousarray(np.sort(several, axis=1)[:, (several.shape[1] - 1) // 2])
    return np.ascontiguousarray(getattr(np, how)(several, axis=1))


def _lie_beside(data: TensorDict, info: dict[Any, Any]) -> bool:
    """Whether index and weights are entries of a sample as they are."""
    size, device = data._batch_size, data._device
    return not data._is_locked and all(
        type(value) is torch.Tensor
        and type(key) is str
        and value.shape == size
        and device in (None, value.device)
        for key, value in info.items()
    )


def _set_by_item(items: Sequence[Any], info: dict[Any, Any]) -> None:
    """Set row i of each entry in item i, whatever shape the item has."""
    for key, values in info.items():
        rows = torch.as_tensor(values).unbind(0)
        for item, row in zip(items, rows, strict=True):
            if type(item) is TensorDict and type(key) is str and not item._batch_size:
                entry = row if item._device is None else row.to(item._device)
                item._set_str(key, entry, validated=True, inplace=False, non_blocking=False)
                continue
            lead = (1,) * item.batch_dims
            entry = row.reshape((*lead, *row.shape)).expand((*item.batch_size, *row.shape))
            item.set(key, entry if item.device is None else entry.to(item.device))


def _one_each(entry: torch.Tensor) -> torch.Tensor:
    """An entry of a sample ``[n]``, where it was expanded to the batch size of an item."""
    while entry.dim() > 1:
        entry = entry[..., 0]
    return entry


def _entry(data: Any, key: str | tuple[str, ...]) -> Any:
    for name in (key,) if isinstance(key, str) else key:
        data = data.get(name) if hasattr(data, "get") else None
    return data
