"""A fixed data set and collected items: each sample has a fixed share of both.

extend(data)  ──▶  the online part
sample(n)     ──▶  round(fraction * n) rows of the data set, the rest online, in one batch [n]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from shmbuffer.buffers import TensorDictReplayBuffer
from shmbuffer.buffers.data_path import drawing
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Batch, Order
from shmbuffer.buffers.data_path.sample_info import with_info
from shmbuffer.datasets.loading import opened
from shmbuffer.ensembles.one_batch import OneBatch
from shmbuffer.ensembles.sampler import SamplerEnsemble
from shmbuffer.ensembles.stacked_rows import filled
from shmbuffer.ensembles.turns import Row
from shmbuffer.ensembles.two_parts import OFFLINE, ONLINE, TwoParts
from shmbuffer.items.keys import INDEX
from shmbuffer.memory.mixture import Mixture
from shmbuffer.samplers import Sampler
from shmbuffer.storages import LazyTensorStorage, Storage, TensorStorage
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.torchrl.transforms import Transform


class OfflineToOnlineReplayBuffer(TwoParts):
    """A data set and collected items, sampled in a fixed proportion.

    ``sample(n)`` is one flat batch of exactly ``round(offline_fraction * n)`` rows of the data set,
    first, and rows of the online part. While the online part is empty, all rows are of the data
    set. ``extend`` and ``add`` write into the online part; the data set never changes.

    All processes with the online part share the proportion: after `anneal` in one of them, the next
    sample of each has it. It is stored with the online part.

    An ``"index"`` below the capacity of the online part is a place there, others are items of the
    data set. Both parts may have priorities, set by `update_tensordict_priority` and
    `update_priority`. An importance weight corrects for the priorities of its own part, not for the
    proportion. Rows of a part without priorities weigh 1.

    Args:
        offline_dataset: a buffer; a directory (`pathlib.Path`), opened as a `ReadOnlyStorage`,
            which all learners share; or a name for `load_dataset`, such as
            ``"minari:door/human-v2"`` or ``"parquet:runs.parquet"``.
        online_storage: of the online part, with one storage dimension. A `LazyMemmapStorage` is
            shared.
        online_capacity: instead, the size of a `LazyTensorStorage`.
        offline_fraction: share of the data set in a sample, between 0 and 1; the same initial value
            for all handles of a shared online part.
        batch_size: of ``sample()``; and of a data set that is loaded by name.
        transform: called with every sample.
        online_sampler: of the online part; None is a `RandomSampler`.
        priority_key: see `TensorDictReplayBuffer`.
        generator: of the draws in both parts.
        rank: see `ReplayBuffer`; for both parts.
        prefetch: see there.
        **dataset_kwargs: for `load_dataset`.

    Raises:
        ValueError: both or none of ``online_storage`` and ``online_capacity``; a fraction that is
            not between 0 and 1, or not the initial one of a shared online part; a storage of
            several dimensions, or without a limit; ``dataset_kwargs`` for a loaded data set.
        TypeError: another kind of ``offline_dataset``.

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
    _one_batch: tuple[list[Plan], OneBatch | None] | None = None  # and what it was made of

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
            raise ValueError("give online_storage or online_capacity, one of the two")
        if not 0.0 < offline_fraction < 1.0:
            raise ValueError(
                f"offline_fraction has to be between 0 and 1, got {offline_fraction}; without a "
                "data set, or with nothing else, a ReplayBuffer will do"
            )
        offline = opened(offline_dataset, batch_size, dataset_kwargs)
        if online_capacity is not None:
            online_storage = LazyTensorStorage(online_capacity)
        assert online_storage is not None
        for name, storage in (("online", online_storage), ("offline", offline._storage)):
            if storage.ndim != 1 or storage.max_size >= 2**62:
                raise ValueError(
                    f"the {name} part has a {type(storage).__name__} with ndim={storage.ndim} and "
                    f"max_size={storage.max_size}: an index names a part by the size of the other, "
                    "so give it one dimension and a size"
                )
        self._base = float(offline_fraction)
        online = TensorDictReplayBuffer(
            storage=online_storage, sampler=online_sampler, priority_key=priority_key, rank=rank
        )
        if rank is not None:
            offline._rank_given = rank
        if online_storage.shared:
            offline.share()  # so that ranks of one seed draw differently from it, too
        offline._ask_rank()
        self._mixture = _mixture(online_storage, self._base)
        super().__init__(
            online,
            offline,
            transform=transform,
            batch_size=batch_size,
            generator=generator,
            rank=rank,
            prefetch=prefetch,
        )
        self._sampler = _MixedSampler(self._mixture, online._sampler, offline._sampler)
        self._join()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_one_batch": None}

    # -- the proportion ------------------------------------------------------------------------

    @property
    def offline_fraction(self) -> float:
        """Share of the data set in the next sample of every process."""
        return float(self._mixture.fraction)

    def anneal(self, step: int, total_steps: int) -> None:
        """Set the share of the data set, for every process, falling linearly to 0.

        Args:
            step: the present step, from 0.
            total_steps: the step at which the share is 0.

        Raises:
            ValueError: ``total_steps`` below 1, or ``step`` below 0.
        """
        if total_steps < 1 or step < 0:
            raise ValueError(f"anneal: step {step} of {total_steps}; count from 0 to at least 1")
        self._mixture.fraction = self._base * max(0.0, 1.0 - step / total_steps)

    # The names by which TorchRL's trainer saves and sets them.
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
        """Items of both parts."""
        return sum(len(rb) for rb in self._members)

    def stats(self) -> dict[str, Any]:
        """TorchRL's keys, of both parts together; ``offline_fraction``, and the size of each."""
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
            f"online_size={len(self.online_buffer)}, batch_size={self._batch_size})"
        )

    # -- writing -------------------------------------------------------------------------------

    def add(self, data: Any, timeout: float | None = None, streams: int | None = None) -> Any:
        """Write one item into the online part; see `ReplayBuffer.add`."""
        return self.online_buffer.add(data, timeout, streams=streams)

    def extend(self, data: Any, *given: Any, **options: Any) -> Any:
        """Write a batch into the online part; see `TensorDictReplayBuffer.extend`."""
        return self.online_buffer.extend(data, *given, **options)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget the items of the online part; see `ReplayBuffer.empty`."""
        self._drop_prefetched()
        self.online_buffer.empty(empty_write_count)
        self._turns.forget()

    # -- sampling ------------------------------------------------------------------------------

    def _drawing(self, min_size: int | None) -> Callable[[int], Batch]:
        return partial(self._mixed, min_size=min_size) if min_size else self._next

    def _with_info(self, data: Any, info: Any) -> tuple[Any, Any]:
        return with_info(data, info), info

    def _next(self, count: int) -> Batch:
        if self._prefetcher is None or count != self._batch_size:
            return self._mixed(count)
        if self._turns.are_needed():
            self._drop_prefetched()
            return self._mixed(count)
        return self._prefetcher.next()

    def _shares(self, count: int, *, waits: bool = False) -> Iterator[tuple[int, int]]:
        """The number of rows of each part."""
        of_data = round(self.offline_fraction * count)
        if not waits and not len(self.online_buffer):
            of_data = count
        yield from ((at, n) for at, n in ((OFFLINE, of_data), (ONLINE, count - of_data)) if n)

    def _draws_now(self, count: int) -> bool:
        return all(
            self._members[at]._admits(share) and self._can_give(at, share)
            for at, share in self._shares(count)
        )

    def _mixed(self, count: int, min_size: int | None = None) -> Batch:
        shares = [*self._shares(count, waits=bool(min_size))]
        if not min_size and (one := self._as_one()) is not None:
            data, info = one.sample(shares, (0, self._start))
            return self._finished([data], info)
        rows: list[Row] = []
        for at, share in shares:
            draw = partial(self._drawn_from, at)
            least = min_size if at == ONLINE else None
            rows.append((at, *self._members[at]._in_turn(share, least, None, draw)))
        return self._joined(rows)

    def _as_one(self) -> OneBatch | None:
        """Makes batches of both parts at once; None if their present plans do not allow it."""
        plans = [rb.plan for rb in self._members]
        if any(plan.limiter_version[0] for plan in plans):
            return None
        if self._one_batch is None or self._one_batch[0] != plans:
            self._one_batch = plans, OneBatch.of(self._members, self._weight_keys)
        return self._one_batch[1]

    def _drawn_from(self, at: int, share: int) -> Batch:
        """Items of a part, also across the end of a pass."""
        rb = self._members[at]
        plan = rb.plan
        if plan.draws:
            return rb._finished(*drawing.drawn(plan, share, pins=False))
        return rb._gathered(*self._sampler._draw(at, rb._storage, share))

    def _order(self, at_once: bool) -> Order:
        """See `Sampling._order`."""
        assert self._batch_size is not None
        with self._planned().choosing():
            before, shares = self._draws(), [*self._shares(self._batch_size)]
            if at_once and (one := self._as_one()) is not None:
                data, info = one.sample(shares, (0, self._start))
                return Order(partial(self._finished, [data], info), False, before)
            drawn = [
                (at, *self._sampler._draw(at, self._members[at]._storage, share))
                for at, share in shares
            ]
            return Order(partial(self._gathered, drawn, None), False, before)

    def _gathered(self, index: Any, found: Any) -> Batch:
        return self._joined(
            [(at, *self._members[at]._gathered(where, known)) for at, where, known in index]
        )

    def _joined(self, rows: list[Row]) -> Batch:
        """Join the rows of both parts into a batch."""
        fillings, infos = self._fillings(), []
        for at, _, known in rows:
            where = known[INDEX] + at * self._start
            missing = {key: filled(where.shape, value) for key, value in fillings.items()}
            infos.append({**missing, **known, INDEX: where})
        info = infos[0]
        if len(infos) > 1:
            info = {key: torch.cat([one[key] for one in infos]) for key in info}
        return self._finished([data for _, data, _ in rows], info)


class _MixedSampler(SamplerEnsemble):
    """The samplers of both parts, saved with the proportion."""

    def __init__(self, mixture: Any, *samplers: Sampler) -> None:
        super().__init__(*samplers)
        self._mixture = mixture

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "_offline_fraction": self._mixture.fraction}

    def _take_state(self, state: dict[str, Any]) -> None:
        super()._take_state(state)
        if "_offline_fraction" in state:
            self._mixture.fraction = float(state["_offline_fraction"])


def _mixture(storage: Storage, base: float) -> Any:
    """The share, stored with the storage if that is shared memory, else in this process."""
    if isinstance(storage, TensorStorage) or (isinstance(storage, RingBacked) and storage.shared):
        return Mixture(storage.engine(), base)
    return SimpleNamespace(fraction=base)
