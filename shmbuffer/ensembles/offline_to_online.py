"""Samples from a fixed data set (the offline part) and from collected items (the online part).

    extend(data)  ──▶  the online part
    sample(n)     ──▶  round(fraction * n) rows of the data set, the other rows online, as one batch

Both parts have one common index, which selects the part for reads, priorities and patches:

    0 .. capacity - 1              slots of the online part, as returned by its writes
    capacity .. capacity + data    items of the data set
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_map

from shmbuffer.buffers.calls.stored_items import is_key
from shmbuffer.buffers.data_path import drawing
from shmbuffer.buffers.data_path.parts import ring_backed
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.data_path.priority_entry import one_each
from shmbuffer.buffers.data_path.sample_info import with_info
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.datasets.loading import opened
from shmbuffer.ensembles.joint_buffer import JointBuffer
from shmbuffer.ensembles.joint_rows import BUFFER_IDS, full_tensor
from shmbuffer.ensembles.one_batch import OneBatch
from shmbuffer.ensembles.sampler_ensemble import SamplerEnsemble
from shmbuffer.ensembles.turns import Row, Shares
from shmbuffer.items.keys import INDEX, WEIGHT_KEYS
from shmbuffer.memory.mixture import Mixture
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.storages.indexing import as_array, is_one
from shmbuffer.storages.lazy_tensor import LazyTensorStorage
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import Storage
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.torchrl.transforms import Transform

ONLINE, OFFLINE = 0, 1


class OfflineToOnlineReplayBuffer(JointBuffer):
    """Samples a data set and collected items in a fixed proportion.

    ``sample(n)`` returns one flat batch: first exactly ``round(offline_fraction * n)`` rows of the
    data set, then rows of the online part. While the online part is empty, all rows come from the
    data set. ``extend`` and ``add`` write to the online part. The data set never changes.

    All processes that use the online part share the proportion, which is stored with the online
    part. If one process calls `anneal`, the new proportion applies to the next sample of every
    process.

    An ``"index"`` below the capacity of the online part is a slot of the online part. A larger
    index is an item of the data set. Both parts can have priorities, which are set by
    `update_tensordict_priority` and `update_priority`. The importance weight of a row corrects for
    the priorities within its part, but not for the proportion of the parts. Rows of a part without
    priorities have a weight of 1.

    Args:
        offline_dataset: a buffer, a directory, or a name. A directory (`pathlib.Path`) is opened as
            a `ReadOnlyStorage`, which all learners share. A name is passed to `load_dataset`, for
            example ``"minari:door/human-v2"`` or ``"parquet:runs.parquet"``.
        online_storage: one-dimensional storage of the online part. A `LazyMemmapStorage` is shared
            between processes.
        online_capacity: capacity of a `LazyTensorStorage`, as an alternative to ``online_storage``.
        offline_fraction: share of the data set in a sample, between 0 and 1. The initial value must
            be the same for all handles of a shared online part.
        batch_size: number of items per sample, and batch size of a data set that is loaded by name.
        transform: transform that is called with every sample.
        online_sampler: sampler of the online part. If None, creates a `RandomSampler`.
        priority_key: see `TensorDictReplayBuffer`.
        generator: random generator for both parts.
        rank: rank for both parts; see `ReplayBuffer`.
        prefetch: see `ReplayBuffer`.
        **dataset_kwargs: arguments of `load_dataset`.

    Raises:
        ValueError: not exactly one of ``online_storage`` and ``online_capacity`` was passed. The
            fraction is not between 0 and 1, or differs from the initial one of a shared online
            part. A storage has several dimensions or no maximum size. ``dataset_kwargs`` were
            passed together with a buffer.
        TypeError: ``offline_dataset`` is not a buffer, a directory or a name.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, OfflineToOnlineReplayBuffer
        >>> from shmbuffer import ReplayBuffer
        >>> data = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> index = data.extend(TensorDict({"obs": torch.zeros(100)}, [100]))
        >>> rb = OfflineToOnlineReplayBuffer(
        ...     data, online_capacity=50, offline_fraction=0.25, batch_size=8
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.ones(10)}, [10]))
        >>> rb.sample()["obs"]
        tensor([0., 0., 1., 1., 1., 1., 1., 1.])

    Source: ``torchrl.data.OfflineToOnlineReplayBuffer``.
    """

    family = "OfflineToOnlineReplayBuffer"
    _one_buffer = "online_buffer"

    def __init__(
        self,
        offline_dataset: str | os.PathLike[str] | Any,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Transform | None = None,
        online_sampler: Sampler | None = None,
        priority_key: str | tuple[str, ...] = "td_error",
        generator: torch.Generator | None = None,
        rank: int | None = None,
        prefetch: int | None = None,
        **dataset_kwargs: Any,
    ) -> None:
        if (online_storage is None) == (online_capacity is None):
            raise ValueError("pass either online_storage or online_capacity")
        if not 0.0 < offline_fraction < 1.0:
            raise ValueError(
                f"offline_fraction must be between 0 and 1, got {offline_fraction}; use a "
                "ReplayBuffer if only one of the parts is needed"
            )
        offline = opened(offline_dataset, batch_size, dataset_kwargs)
        if online_capacity is not None:
            online_storage = LazyTensorStorage(online_capacity)
        assert online_storage is not None
        for name, storage in (("online", online_storage), ("offline", offline._storage)):
            if storage.ndim != 1 or storage.max_size >= 2**62:
                raise ValueError(
                    f"the storage of the {name} part must have one dimension and a maximum size, "
                    "because an index selects the part by its size, got a "
                    f"{type(storage).__name__} with ndim={storage.ndim} and "
                    f"max_size={storage.max_size}"
                )
        self._base = float(offline_fraction)
        online = TensorDictReplayBuffer(
            storage=online_storage, sampler=online_sampler, priority_key=priority_key, rank=rank
        )
        if rank is not None:
            offline._parts.rank_given = rank
        if online_storage.shared:
            offline.share()  # otherwise ranks with the same seed would draw the same items
        offline.generator = offline.generator  # the next draw then determines the rank
        self._mixture = _mixture(online_storage, self._base)
        super().__init__(
            (online, offline),
            _MixedSampler(self._mixture, (online, offline)),
            transform=transform,
            batch_size=batch_size,
            generator=generator,
            rank=rank,
            prefetch=prefetch,
        )
        self._sampler.prefetcher = self._parts.prefetcher

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sampler.prefetcher = self._parts.prefetcher

    def _exchange(self, name: str, new: Any) -> Any:
        before = super()._exchange(name, new)
        if name == "sampler":  # keeps the proportion of the parts
            mixed = _MixedSampler(self._mixture, self._members)
            mixed.prefetcher = self._parts.prefetcher
            super()._exchange(name, mixed)
        return before

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The buffer of the online part, which contains the collected items."""
        return self._members[ONLINE]

    @property
    def offline_buffer(self) -> ReplayBuffer:
        """The buffer of the data set."""
        return self._members[OFFLINE]

    @property
    def _start(self) -> int:
        """Index of the first item of the data set."""
        return self.online_buffer._storage.max_size

    # -- the proportion ------------------------------------------------------------------------

    @property
    def offline_fraction(self) -> float:
        """Fraction of rows from the data set in the next sample of every process."""
        return float(self._mixture.fraction)

    def anneal(self, step: int, total_steps: int) -> None:
        """Sets `offline_fraction` for all processes, so that it decreases linearly to 0.

        Args:
            step: the current step, counted from 0.
            total_steps: the step at which the fraction reaches 0.

        Raises:
            ValueError: ``total_steps`` is below 1, or ``step`` is below 0.
        """
        if total_steps < 1 or step < 0:
            raise ValueError(
                "anneal: step must be at least 0 and total_steps at least 1, got "
                f"step={step} and total_steps={total_steps}"
            )
        self._mixture.fraction = self._base * max(0.0, 1.0 - step / total_steps)

    # TorchRL's trainer reads and sets the fraction under these names.
    @property
    def _offline_fraction(self) -> float:
        return self.offline_fraction

    @_offline_fraction.setter
    def _offline_fraction(self, value: float) -> None:
        self._mixture.fraction = float(value)

    @property
    def _base_offline_fraction(self) -> float:
        return self._base

    @_base_offline_fraction.setter
    def _base_offline_fraction(self, value: float) -> None:
        self._base = float(value)

    # -- both parts ----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of items in both parts."""
        return sum(len(rb) for rb in self._members)

    def stats(self) -> dict[str, Any]:
        """Returns the sums of TorchRL's counters, ``offline_fraction``, and the sizes of the parts.

        The sizes are ``offline_size`` and ``online_size``.
        """
        return {
            **super().stats(),
            "offline_fraction": self.offline_fraction,
            "offline_size": len(self.offline_buffer),
            "online_size": len(self.online_buffer),
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(offline={type(self.offline_buffer).__name__}, "
            f"offline_fraction={self.offline_fraction:.3f}, "
            f"online_size={len(self.online_buffer)}, batch_size={self.batch_size})"
        )

    # -- writing -------------------------------------------------------------------------------

    def add(self, data: Any, timeout: float | None = None, streams: int | None = None) -> Any:
        """Writes one item to the online part; see `ReplayBuffer.add`."""
        return self.online_buffer.add(data, timeout, streams=streams)

    def extend(self, data: Any, *given: Any, **options: Any) -> Any:
        """Writes a batch to the online part; see `TensorDictReplayBuffer.extend`."""
        return self.online_buffer.extend(data, *given, **options)

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes all items from the online part; see `ReplayBuffer.empty`."""
        self._parts.drop_prefetched()
        self.online_buffer.empty(empty_write_count)
        self._turns.forget()

    # -- sampling ------------------------------------------------------------------------------

    def _shares(self, count: int, min_size: int | None) -> tuple[Shares, dict[int, int]]:
        if min_size:
            ring_backed(self.online_buffer._storage, "min_size needs")
        shares = self._sampler.shares_of(count, waits=bool(min_size))
        return shares, {ONLINE: min_size} if min_size else {}

    def _to_rows(self, index: Any, known: Any) -> Any:
        return index

    def _read_rows(self, rows: Any) -> Batch:
        if isinstance(rows, tuple):  # `_MixedSampler.sample` has already read the batch
            return rows
        return super()._read_rows(rows)

    def _draw_row(self, at: int, share: int) -> Row:
        plan = self._members[at].plan
        if plan.draws:
            return at, *drawing.drawn(plan, share, pins=False)
        return super()._draw_row(at, share)

    def _join(self, rows: list[Row]) -> Batch:
        defaults, infos = self._default_info(), []
        for at, _, known in rows:
            where = known[INDEX] + at * self._start
            missing = {key: full_tensor(where.shape, value) for key, value in defaults.items()}
            infos.append({**missing, **known, INDEX: where})
        info = infos[0]
        if len(infos) > 1:
            info = {key: torch.cat([one[key] for one in infos]) for key in info}
        return _concatenate([self._finish_row(at, data) for at, data, _ in rows]), info

    def _with_info(self, data: Any, info: Any) -> tuple[Any, Any]:
        return with_info(data, info), info

    # -- items by their index ------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Returns items by their index in samples, or by key.

        A slice leaves out slots that contain no item.
        """
        if is_key(index):
            return self[:][index]
        start = self._start
        end = start + self.offline_buffer._storage.max_size
        if is_one(index):
            place = int(index[0] if isinstance(index, tuple) else index)
            place += end if place < 0 else 0
            at = int(place >= start)
            return self._apply_transform(self._members[at][place - at * start])
        sliced = isinstance(index, slice) or index is Ellipsis
        places = torch.from_numpy(np.arange(end)[index if sliced else as_array(index)].copy())
        if sliced:
            held = cpu.ones(len(places), dtype=torch.bool)
            for rb, rows, local in self._by_part(places):
                contains: Any = rb._storage.contains
                held[rows] = contains(local)
            places = places[held]
        parts = [(rows, rb[local]) for rb, rows, local in self._by_part(places) if len(rows)]
        if not parts:
            return self._apply_transform(self.offline_buffer[:0])
        order = torch.argsort(torch.cat([rows for rows, _ in parts]))
        data = _concatenate([items for _, items in parts])
        data = tree_map(lambda leaf: leaf[order], data, is_leaf=is_collection)
        return self._apply_transform(data)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Returns ``rb[:end]``: the items of the online part, then the items of the data set."""
        return self[:end]

    def _by_part(
        self, places: torch.Tensor
    ) -> Iterator[tuple[ReplayBuffer, torch.Tensor, torch.Tensor]]:
        """Divides indices among the two parts.

        Args:
            places: indices of items, int64 ``[n]``.

        Yields:
            For each part its buffer, the positions of its items in ``places``, and their indices in
            this buffer.
        """
        for at, rb in enumerate(self._members):
            rows = torch.nonzero((places >= self._start) == bool(at)).flatten()
            yield rb, rows, places[rows] - at * self._start

    def _routable(self, index: Any) -> TensorDict:
        """Converts an index to the index of an ensemble, with "buffer_ids" and "index"."""
        places = cpu.as_tensor(index)
        places = one_each(places) if places.dim() > 1 else places.reshape(-1)
        ids = (places >= self._start).long()
        return TensorDict({BUFFER_IDS: ids, INDEX: places - ids * self._start}, [len(places)])

    def _can_change(self, at: int) -> bool:
        return at == ONLINE


class _MixedSampler(SamplerEnsemble):
    """The samplers of both parts, which use the shared proportion and save it.

    Args:
        mixture: object whose attribute ``fraction`` is the fraction of the data set.
        parts: the buffers of the online and the offline part.
    """

    def __init__(self, mixture: Any, parts: Sequence[ReplayBuffer]) -> None:
        super().__init__(*(rb._sampler for rb in parts))
        self._mixture = mixture
        self._parts = parts
        self.prefetcher: Any = None  # prefetcher of the joint buffer
        #: The plans of both parts, and the `OneBatch` for these plans, or None if there is none.
        self._one_batch: tuple[list[Plan], OneBatch | None] | None = None

    def shares_of(self, count: int, *, waits: bool = False) -> Shares:
        """Divides a sample among the parts.

        Args:
            count: number of items in the sample.
            waits: if True, the online part has a share even if it is empty.

        Returns:
            The part and its number of rows, without parts that have no rows.
        """
        of_data = round(self._mixture.fraction * count)
        if not waits and not len(self._parts[ONLINE]):
            of_data = count
        return [(at, n) for at, n in ((OFFLINE, of_data), (ONLINE, count - of_data)) if n]

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, Any]:
        """Draws a sample from both parts.

        Returns:
            ``((data, info), {})`` if a `OneBatch` can read the rows while it draws them. Otherwise
            the part, index and info of each row, and an empty dict.
        """
        shares = self.shares_of(batch_size)
        if self.prefetcher is None or self.prefetcher.hand_over.at_once:
            one = self._as_one()
            if one is not None:
                return one.sample(shares, (0, self._parts[ONLINE]._storage.max_size)), {}
        return [(at, *self._draw(at, self._parts[at]._storage, n)) for at, n in shares], {}

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if both parts can provide their shares of a batch."""
        return all(self._parts[at].can_sample(share) for at, share in self.shares_of(batch_size))

    def _as_one(self) -> OneBatch | None:
        """Returns a `OneBatch` for the current plans of both parts, or None if it is impossible."""
        plans = [rb.plan for rb in self._parts]
        if self._one_batch is None or self._one_batch[0] != plans:
            self._one_batch = plans, OneBatch.of(self._parts, WEIGHT_KEYS)
        return self._one_batch[1]

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "_offline_fraction": self._mixture.fraction}

    def _take_state(self, state: dict[str, Any]) -> None:
        super()._take_state(state)
        if "_offline_fraction" in state:
            self._mixture.fraction = float(state["_offline_fraction"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "prefetcher": None, "_one_batch": None}


def _mixture(storage: Storage, base: float) -> Any:
    """Returns an object whose attribute ``fraction`` is the fraction of the data set.

    The attribute is stored in shared memory if the storage is shared.

    Args:
        storage: storage of the online part.
        base: initial fraction.
    """
    if isinstance(storage, TensorStorage) or (isinstance(storage, RingBacked) and storage.shared):
        return Mixture(storage.engine(), base)
    return SimpleNamespace(fraction=base)


def _concatenate(data: list[Any]) -> Any:
    """Concatenates rows of both parts into one batch."""
    if len(data) == 1:
        return data[0]
    try:
        return tree_map(lambda *leaves: torch.cat(leaves), *data, is_leaf=is_collection)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RuntimeError(
            "the items of the data set and of the online part have different layouts and cannot be "
            f"joined into one batch: {_differences(*data) or error}; write the same entries, or "
            "add a transform to one of the parts"
        ) from error


def _differences(*parts: Any) -> str:
    """Describes the entries that only one part has, or returns "" if the parts have the same.

    Args:
        *parts: rows of the data set, and rows of the online part.
    """
    if not all(map(is_collection, parts)):
        return ""
    keys = [
        {".".join(key) if isinstance(key, tuple) else key for key in part.keys(True, True)}
        for part in parts
    ]
    said = [
        f"only the {name} has {sorted(mine - others)}"
        for name, mine, others in (
            ("data set", keys[0], keys[1]),
            ("online part", keys[1], keys[0]),
        )
        if mine - others
    ]
    return ", ".join(said)
