"""Sampler in proportion to priority (Schaul et al., Prioritized Experience Replay, ICLR 2016)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.keys import GENERATION, WEIGHT_KEYS
from shmbuffer.items.mover import draw_from
from shmbuffer.items.raw_priorities import as_beta, as_non_negative
from shmbuffer.memory import LIVE_READS, ItemSnapshot, Ring
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.mapped.recorded import REDUCTIONS
from shmbuffer.samplers.priority.priority_table import raw_of
from shmbuffer.samplers.priority.store import PriorityStore
from shmbuffer.samplers.sampler import NOTHING_THERE, draw_key, in_storage
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_kit import TENSORS
from shmbuffer.torchrl.compat.sampler_files import PRIORITIES, moved

DTYPES = (torch.float32, torch.float64)
# Maximum relative difference between a weight computed in float64 and the core's float32 weight. A
# larger difference means that the priorities have changed since the draw.
_SAME_WEIGHT = 1e-4


class PrioritizedSampler(PriorityStore):
    """Draws item i with probability ``mass_i / sum(mass)``.

    The mass of an item is ``(priority + eps) ** alpha``.

    The importance weight is ``(mass_i / min(mass)) ** -beta``, in (0, 1], with the minimum over all
    items. A new item gets the largest priority that was ever set, initially 1.0. If all masses are
    zero (``eps=0``), sampling is uniform with weights of 1.

    Storages of this package keep the priorities in their own memory. In a directory, all processes
    share one tree: collectors set initial priorities, and several learners sample and update
    concurrently. All samplers of a shared directory must have the same alpha and eps. With other
    storages, the sampler keeps the priorities in its own table. A second sampler of a storage that
    is not shared also has its own table.

    Args:
        max_capacity: capacity of the sampler's own table in elements.
        alpha: priority exponent, at least 0. With 0, sampling is uniform.
        beta: exponent of the importance weights, at least 0. A value far above 1 causes a warning.
        eps: constant that is added to every priority, at least 0.
        dtype: dtype in which weights are computed and returned, ``torch.float`` or
            ``torch.double``. Priorities and masses are always float64.
        reduction: how several priorities of one item, such as a stored trajectory, are combined:
            ``"max"``, ``"min"``, ``"mean"``, ``"median"`` (the lower of two middle values) or
            ``"sum"``.
        max_priority_within_buffer: if True, a new item gets the largest priority of the items in
            the buffer instead of the largest priority that was ever set. All processes that write
            to a shared directory must pass the same value.
        device: None or the CPU, because the tree is in shared memory.

    Raises:
        ValueError: ``alpha``, ``beta`` or ``eps`` is negative or not finite, ``max_capacity`` is
            below 1, or ``reduction`` is unknown.
        NotImplementedError: ``dtype`` is not supported, or ``device`` is not the CPU.

    Cost: one native call draws and gathers 256 items with their weights in about ten microseconds.
        This time grows with the base-16 logarithm of the capacity. With
        ``max_priority_within_buffer``, a write without priorities reads the priorities of all items
        written since the last such write. If the item with the largest priority was removed, or if
        another process has set priorities, the write reads all masses, which takes a millisecond
        per million items.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, PrioritizedSampler
        >>> from shmbuffer import ReplayBuffer
        >>> sampler = PrioritizedSampler(max_capacity=10, alpha=1.0, beta=1.0)
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(10), sampler=sampler, batch_size=4
        ... )
        >>> index = rb.extend(torch.arange(3))
        >>> rb.update_priority(index, torch.tensor([0.0, 1000.0, 0.0]))
        PriorityUpdate(applied=3, stale=0)
        >>> rb.sample()
        tensor([1, 1, 1, 1])

    Source: ``torchrl.data.replay_buffers.PrioritizedSampler``; equations 1 and 2 of the paper.
    """

    _state_keys = ("_alpha", "_beta", "_eps", "_priorities", "_max_priority")
    _torchrl_files = PRIORITIES

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
        super().__init__(max_capacity, alpha, eps, max_priority_within_buffer)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        if dtype not in DTYPES:
            raise NotImplementedError(
                f"dtype of a PrioritizedSampler must be torch.float32 or torch.float64, got {dtype}"
            )
        if device is not None and torch.device(device).type != "cpu":
            raise NotImplementedError(
                f"device of a PrioritizedSampler must be the CPU, because the priority tree is in "
                f"shared memory, got {str(device)!r}; omit device, and move samples to the device "
                "with a transform"
            )
        self._beta = as_beta(beta)
        self.dtype = dtype
        self.reduction = reduction
        self._greatest_at: tuple[float | None, int | None] = (None, None)

    @property
    def max_capacity(self) -> int:
        """Capacity of the sampler's own table in elements."""
        return self._max_capacity

    @property
    def max_size(self) -> int:
        """Capacity of the sampler's own table, under TorchRL's name."""
        return self._max_capacity

    @property
    def device(self) -> torch.device:
        """Device of the priorities, which is the CPU."""
        return cpu.DEVICE

    @property
    def max_priority_within_buffer(self) -> bool:
        """True if new items get the largest priority in the buffer instead of the largest ever."""
        return self._max_within_buffer

    @property
    def beta(self) -> float:
        """Exponent of the importance weights.

        Raises:
            ValueError: the new value is negative or not finite.
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = as_beta(value)

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws items by priority; see `Sampler.sample`.

        Returns:
            Element indices, and a dict with the weights under ``"_weight"`` and
                ``"priority_weight"``, ``[batch_size]``. With a shared storage, the dict also has
                ``"index_generation"``, int64 ``[batch_size]``.

        Raises:
            EmptyBufferError: the storage is empty.
        """
        ring: Ring | None = ring_of(storage)
        # In all other cases the core waits for open writes, or raises the exception.
        if not len(storage) and (ring is None or not batch_size):
            raise EmptyBufferError(NOTHING_THERE)
        if ring is None or not self.bind(storage):
            ring = self._fit_table(storage).ring
        elements, tickets, found = draw_from(
            TENSORS, ring, batch_size, draw_key(self, storage), self._beta
        )
        info = dict.fromkeys(WEIGHT_KEYS, self._weights(elements, found))
        if self._table is None and storage.shared:
            info[GENERATION] = tickets
        return in_storage(storage, elements), info

    def _weights(self, elements: torch.Tensor, weights: Any) -> torch.Tensor:
        """Converts the float32 weights of the C core to `dtype`.

        Weights in float64 are computed again from the current masses. If the mass of an item has
        changed since the draw, its float32 weight is used.
        """
        ring = self.ring()
        assert ring is not None  # the draw has already used the ring
        least = ring.tree.p_min
        if self.dtype is torch.float32 or not least:
            return weights.to(self.dtype)  # type: ignore[no-any-return]
        first = weights.double()
        mass = torch.from_numpy(ring.tree.mass(elements.numpy()))
        exact = (mass / least) ** -self._beta
        return torch.where(torch.isclose(exact, first, rtol=_SAME_WEIGHT, atol=0.0), exact, first)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns alpha, eps, beta, and all raw priorities.

        Returns:
            A dict with ``_alpha``, ``_eps`` and ``_beta``. ``_max_priority`` is the largest
                priority that was ever set, or None. ``_priorities`` is float64 ``[elements]``, with
                NaN for elements without an item, or None if nothing has been written.
        """
        ring = self.ring()
        return {
            "_alpha": self.alpha,
            "_eps": self.eps,
            "_max_priority": None if ring is None else ring.tree.max_priority,
            "_priorities": None if ring is None else torch.from_numpy(raw_of(ring)),
            "_beta": self._beta,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. The items must be loaded before.

        Raises:
            ValueError: the saved storage had a different capacity. Nothing was changed.
        """
        beta = as_non_negative("_beta", state_dict["_beta"])
        raw, largest = state_dict["_priorities"], state_dict["_max_priority"]
        if raw is not None:
            if self.ring() is None:
                self._fit_table(None)
            raw = self._fit_to_ring(cpu.as_tensor(raw).to("cpu", torch.float64, copy=True).numpy())
        alpha = as_non_negative("_alpha", state_dict["_alpha"])
        self._set(alpha, as_non_negative("_eps", state_dict["_eps"]))
        if raw is not None:
            self._load(raw, None if largest is None else float(largest))
        self._beta = beta

    def _load(self, raw: Floats, largest: float | None) -> None:
        """Replaces all priorities, and the largest priority that was ever set.

        Args:
            raw: raw priorities, float64 ``[elements]``, with NaN for elements without an item.
            largest: the largest priority that was ever set, or None.
        """
        if self._greatest is not None:
            self._greatest.forget()
        if self._table is not None:
            self._table.load(raw, largest)
            return
        ring = self._ring
        assert ring is not None
        present = ring.live.committed()
        present = present[~np.isnan(raw[present])]
        # Setting the largest priority on one item raises the recorded maximum. The next call then
        # sets the priority that the item had.
        if largest is not None and len(present):
            ring.update(present[:1], np.array([largest]))
        ring.update(present, raw[present])
        if ring.seat.is_alone():
            ring.restore(ring.head % ring.capacity, ring.write_count, largest)

    def _fit_to_ring(self, raw: Floats) -> Floats:
        """Returns the priorities of a state with one number per element of the ring.

        If the storage can still grow, the state can have more elements, as long as they have no
        priorities. Otherwise a different number of elements raises ValueError.
        """
        if self._ring is None:
            return raw
        storage, elements = self._bound_storage, self._ring.elements
        grows = storage is not None and storage.max_size > elements
        if len(raw) != elements and not (grows and np.isnan(raw[elements:]).all()):
            raise ValueError(
                f"the state has priorities for {len(raw)} elements, but the storage has {elements} "
                "elements; load it into a storage of the same size"
            )
        fitted = np.full(elements, np.nan)
        fitted[: len(raw)] = raw[:elements]
        return fitted

    def _saved(self, moment: Any, folder: Path) -> dict[str, Any]:
        state = self.state_dict()
        if self._ring is not None and (moment is LIVE_READS or isinstance(moment, ItemSnapshot)):
            state["_priorities"] = None  # the save of the storage contains the priorities
        return state

    def _apply(self, saved: dict[str, Any], loaded: Loaded | None) -> None:
        state = dict(saved)
        if loaded is not None and loaded.in_place:  # the directory contains newer priorities
            self.beta = state["_beta"]
            return
        in_storage = state.pop("_in_storage", False) or state["_priorities"] is None
        if loaded is not None and loaded.moment is not None and in_storage:
            state["_priorities"] = torch.from_numpy(loaded.moment.priorities)
            state["_max_priority"] = loaded.moment.max_priority
        ring = self._bound()
        if loaded is not None and ring is not None and state["_priorities"] is not None:
            state["_priorities"] = moved(state["_priorities"], loaded, ring.elements)
        self.load_state_dict(state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction})"
        )

    # -- TorchRL's private names ---------------------------------------------------------------

    @property
    def _max_priority(self) -> tuple[float | None, int | None]:
        """The largest raw priority, and an element that has this priority.

        If no element has the priority any more, the element of the last call is returned, or None.
        """
        ring = self.ring()
        if ring is None or (self._max_within_buffer and not ring.length):
            return None, None
        largest = self.default_priority if self._max_within_buffer else ring.tree.max_priority
        if largest is None:
            return None, None
        present = ring.live.committed()
        has_it = present[ring.tree.priorities(present) == largest]
        if len(has_it):
            self._greatest_at = largest, int(has_it[0])
        elif self._greatest_at[0] != largest:
            self._greatest_at = largest, None
        return self._greatest_at

    @property
    def _sum_tree(self) -> torch.Tensor:
        """Copy of all masses, ``[elements]``, with 0 for elements without an item."""
        ring = self.ring()
        mass = np.zeros(self._max_capacity) if ring is None else ring.tree.mass()
        return torch.from_numpy(mass).to(self.dtype)

    @property
    def _min_tree(self) -> torch.Tensor:
        """Copy of all masses, ``[elements]``, with the largest number of `dtype` in place of 0."""
        mass = self._sum_tree
        return torch.where(mass > 0, mass, torch.finfo(self.dtype).max)
