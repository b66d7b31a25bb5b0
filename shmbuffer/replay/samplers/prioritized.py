"""Drawing in proportion to priority (Schaul et al., Prioritized Experience Replay, ICLR 2016)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.replay.keys import WEIGHT_KEYS
from shmbuffer.replay.samplers.random import draw_from
from shmbuffer.replay.samplers.sampler import PriorityUpdate, Sampler, draw_key
from shmbuffer.replay.samplers.table import PriorityTable
from shmbuffer.replay.storages.indexing import ravel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring

REDUCTIONS = ("max", "min", "mean", "median", "sum")


class PrioritizedSampler(Sampler):
    """Item i is drawn with probability ``mass_i / sum(mass)``.

    ``mass = (priority + eps) ** alpha``.

    Its importance weight is ``(mass_i / min(mass)) ** -beta``, in (0, 1]. A new item has the
    largest priority that the buffer has seen, 1.0 before any was given.

    On a storage of this package the priorities are in the storage's own memory. Where that is a
    directory, every process sees the one tree: collectors give initial priorities, and several
    learners sample and update at once. Two samplers over one shared directory have the same alpha
    and eps. Other storages (and a second sampler on one that is not shared) get a table that
    belongs to this sampler alone.

    Args:
        max_capacity: elements that priorities are kept for. Only a table of the sampler's own needs
            it.
        alpha: priority exponent, at least 0; 0 is uniform.
        beta: exponent of the importance weights, at least 0.
        eps: added to every priority.
        dtype: of the weights, ``torch.float`` or ``torch.double``; priorities are kept in float64.
        reduction: how the priority of an item with several (a stored trajectory) becomes one:
            ``"max"``, ``"min"``, ``"mean"``, ``"median"`` or ``"sum"``.
        max_priority_within_buffer: not there yet; has to be False.
        device: None or the CPU; a tree on a GPU is not there yet.

    Raises:
        ValueError: ``alpha`` or ``beta`` below 0, or an unknown ``reduction``.

    Cost: draw, gather and weights of 256 items are one native call of about ten microseconds; it
        grows with the
    logarithm of the capacity, to base 16.

    Source: ``torchrl.data.replay_buffers.PrioritizedSampler``; equations 1 and 2 of the paper.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if not alpha >= 0:
            raise ValueError(f"alpha has to be at least 0, got {alpha}")
        if not beta >= 0:
            raise ValueError(f"beta has to be at least 0, got {beta}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction is one of {REDUCTIONS}, got {reduction!r}")
        if max_priority_within_buffer:
            raise NotImplementedError(
                "PrioritizedSampler(max_priority_within_buffer=True) comes in a later release; the "
                "maximum is that of all priorities ever given"
            )
        if device is not None and torch.device(device).type != "cpu":
            raise NotImplementedError(
                "PrioritizedSampler(device=): a tree on a GPU comes in a later release"
            )
        self._max_capacity = int(max_capacity)
        self._alpha = float(alpha)
        self._eps = float(eps)
        self.beta = float(beta)
        self.dtype = dtype
        self.reduction = reduction
        self._storage: weakref.ref[Any] | None = None  # whose ring has our priorities
        self._ring: Ring | None = None
        self._table: PriorityTable | None = None

    # -- arguments -----------------------------------------------------------------------------

    @property
    def max_capacity(self) -> int:
        """Elements that a table of the sampler's own has room for."""
        return self._max_capacity

    @property
    def alpha(self) -> float:
        """Priority exponent.

        Setting it recomputes every mass from the raw priorities: O(capacity), exact.
        """
        return self._alpha if self.ring is None else self.ring.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        if not value >= 0:
            raise ValueError(f"alpha has to be at least 0, got {value}")
        self._alpha = float(value)
        if self.ring is not None:
            self.ring.set_alpha(self._alpha)

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self._eps

    @property
    def default_priority(self) -> float:
        """The priority of a new item: the largest ever given, 1.0 before any was."""
        largest = None if self.ring is None else self.ring.max_priority
        return 1.0 if largest is None else largest

    @property
    def ring(self) -> Ring | None:
        """Where the priorities are; None before there is anything to keep them for."""
        return self._ring if self._table is None else self._table.ring

    # -- a storage -----------------------------------------------------------------------------

    def bind(self, storage: Any) -> bool:
        """Use the priorities of ``storage``'s ring, if it has one that is free for this sampler.

        Returns:
            Whether it does; if not, the sampler keeps a table of its own.

        Raises:
            ValueError: the storage is shared, and its priorities are kept with another alpha or
                eps.
        """
        ring = getattr(storage, "ring", None)
        if ring is None:
            return False
        if ring is self._ring:
            return self._table is None
        owner = None if storage._table_owner is None else storage._table_owner()
        if not storage.shared and owner is not None and owner is not self:
            self._keep_table(storage)
            return False
        if not storage.shared and ring.prioritized and ring.eps == self._eps:
            if ring.alpha != self._alpha:
                ring.set_alpha(self._alpha)
        elif storage.shared or not ring.prioritized:
            ring.bind_priorities(self._alpha, self._eps)
        else:
            self._keep_table(storage)
            return False
        storage._table_owner = weakref.ref(self)
        self._storage, self._ring = weakref.ref(storage), ring
        return True

    def release(self, storage: Any) -> None:
        """Leave ``storage``'s priorities to the next sampler; they stay as they are."""
        if getattr(storage, "_table_owner", None) is not None and storage._table_owner() is self:
            storage._table_owner = None
        storage.detach(self)
        self._storage = self._ring = self._table = None

    def _keep_table(self, storage: Any) -> PriorityTable:
        """A table of our own, with what is there already."""
        table = self._table
        if table is None:
            capacity = max(
                self._max_capacity, getattr(storage, "max_size", 0) if storage is not None else 0
            )
            table = self._table = PriorityTable(capacity, self._alpha, self._eps)
        if storage is not None and (self._storage is None or self._storage() is not storage):
            self._storage = weakref.ref(storage)
            ring = getattr(storage, "ring", None)
            table.mark(np.arange(len(storage)) if ring is None else ring.committed())
            if ring is not None:
                storage.attach(self)  # to hear of writes by others
        return table

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw; see `Sampler.sample`.

        Returns:
            Indices, and the weights under ``"_weight"`` and ``"priority_weight"``, one tensor.

        Raises:
            EmptyBufferError: nothing to draw from.
        """
        if self.bind(storage):
            ring, lanes = storage.ring, storage.lanes
        else:
            ring, lanes = self._keep_table(storage).ring, getattr(storage, "lanes", ())
        if not ring.length:
            raise EmptyBufferError("the storage is empty: write something before sampling")
        generation = self._table is None and storage.shared
        key = draw_key(self._rng)
        index, info = draw_from(ring, lanes, batch_size, key, self.beta, generation)
        weights = info.pop("weight").to(self.dtype)
        return index, {**dict.fromkeys(WEIGHT_KEYS, weights), **info}

    # -- priorities ----------------------------------------------------------------------------

    def add(self, index: Any) -> None:
        """An item was written at ``index``: it gets the default priority."""
        self.extend(index)

    def extend(self, index: Any) -> None:
        """Items were written at ``index``: they get the default priority.

        Nothing to do where the storage's ring keeps the priorities: it has given them in the write
        itself.
        """
        if self._ring is None:
            self._mark(index)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """The items at ``index`` get the default priority."""
        if storage is not None:
            self.bind(storage)
        if self._ring is None or self._table is not None:
            self._mark(index)
        else:
            self.update_priority(index, self.default_priority)

    def _mark(self, index: Any) -> None:
        self._keep_table(None).mark(ravel(index, self._lanes()))

    def update_priority(
        self, index: Any, priority: Any, *, storage: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Set the priorities of items.

        Args:
            index: element indices: an int, ``[n]``; ``[n, ndim]`` or a tuple of ``ndim`` where
                there are lanes. Entries of -1 are left out. An index that stands twice: the last
                wins.
            priority: a number for all, or ``[n]``; finite and not negative.
            storage: what the indices refer to, where the sampler does not know it yet.
            generation: the tickets of a sample, ``[n]``: an item that was written over since is
                left alone, and counted. None sets whatever is there, as TorchRL does.

        Returns:
            How many were applied and how many were stale.

        Raises:
            ValueError: a priority is NaN, infinite or negative; nothing was changed.
            IndexError: out of range; nothing was changed.
            RuntimeError: sizes of ``index`` and ``priority`` differ.

        Cost: one native call, about 6 µs for 256.
        """
        if self._ring is None and self._table is None and storage is not None:
            self.bind(storage)
        elements = ravel(index, self._lanes())
        raw = as_raw(priority, len(elements))
        tickets = None if generation is None else ravel(generation, ())
        try:
            return self._update(elements, raw, tickets, storage)
        except IndexError:  # -1 stands for "not written" (top-k writers); looked for only here
            written = elements != -1
            if written.all():
                raise
            tickets = None if tickets is None else tickets[written]
            return self._update(elements[written], raw[written], tickets, storage)

    def _update(
        self,
        elements: NDArray[np.int64],
        raw: NDArray[np.float64],
        tickets: NDArray[np.int64] | None,
        storage: Any,
    ) -> PriorityUpdate:
        if self._ring is not None and self._table is None:
            return PriorityUpdate(*self._ring.update(elements, raw, tickets))
        check_raw(raw)
        table = self._keep_table(storage)
        if len(elements) and not 0 <= elements.min() <= elements.max() < table.ring.elements:
            raise IndexError(f"index out of range for {table.ring.elements} elements")
        return PriorityUpdate(table.update(elements, raw), 0)

    def _lanes(self) -> tuple[int, ...]:
        if self._ring is not None and self._ring.lanes == 1:
            return ()
        storage = None if self._storage is None else self._storage()
        lanes: tuple[int, ...] = getattr(storage, "lanes", ())
        return lanes

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """alpha, beta, eps, the largest priority, and every raw priority (float64)."""
        ring = self.ring
        return {
            "_alpha": self.alpha,
            "_beta": self.beta,
            "_eps": self._eps,
            "_max_priority": self.default_priority,
            "_priorities": None if ring is None else torch.from_numpy(ring.priorities()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave; the items have to be there already.

        Raises:
            ValueError: the priorities are those of a storage of another capacity.
        """
        self.beta = float(state_dict["_beta"])
        self._eps = float(state_dict["_eps"])
        priorities = state_dict["_priorities"]
        self.alpha = float(state_dict["_alpha"])
        ring = self.ring
        if priorities is None or ring is None:
            return
        if len(priorities) != ring.elements:
            raise ValueError(
                f"the state has priorities of {len(priorities)} elements, this storage has "
                f"{ring.elements}"
            )
        present = ring.committed()
        raw = priorities.numpy()[present]
        largest = np.array([float(state_dict["_max_priority"])])
        if len(
            present
        ):  # the maximum may be that of an item that is gone: show it once, then the real ones
            ring.update(present[:1], largest)
            ring.update(present, np.ascontiguousarray(raw))

    def _empty(self) -> None:
        if self._table is not None:
            self._table.empty()

    def __getstate__(self) -> dict[str, Any]:
        if self._table is not None:
            raise RuntimeError(
                "this PrioritizedSampler keeps a table of its own, which other processes cannot "
                "see; use a LazyMemmapStorage or LazyTensorStorage, which they share, and whose "
                "priorities they share too"
            )
        return {**self.__dict__, "_storage": None, "_ring": None}  # bound again where it arrives


def as_raw(priority: Any, count: int) -> NDArray[np.float64]:
    """Priorities as float64 ``[count]``, contiguous; a single one stands for all.

    Raises:
        RuntimeError: neither one nor ``count``.
    """
    if type(priority) is np.ndarray and priority.dtype == np.float64 and priority.shape == (count,):
        return priority if priority.flags.c_contiguous else np.ascontiguousarray(priority)
    if isinstance(priority, torch.Tensor):
        if not priority.is_cpu or priority.requires_grad:
            priority = priority.detach().cpu()
        if priority.dtype is torch.bfloat16:  # numpy has no such dtype
            priority = priority.double()
        priority = priority.numpy()
    raw = np.asarray(priority, dtype=np.float64).reshape(-1)
    if len(raw) == count:
        return raw if raw.flags.c_contiguous else np.ascontiguousarray(raw)
    if len(raw) == 1:
        return np.full(count, raw[0])
    raise RuntimeError(
        f"there are {len(raw)} priorities for {count} items; give one for each, or one for all"
    )


def check_raw(raw: NDArray[np.float64]) -> None:
    """ValueError where a priority is NaN, infinite or negative."""
    if len(raw) and not 0 <= raw.min() <= raw.max() < np.inf:
        bad = raw[~((raw >= 0) & (raw < np.inf))][0]
        raise ValueError(f"priorities are finite and not negative, got {bad}; nothing was changed")
