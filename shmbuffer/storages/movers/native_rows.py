"""Writes and reads rows whose leaves are in the ring's own memory.

The C core copies each batch in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import MemoryMappedTensor

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.mover import Drawn, DrawnElements, draw_into
from shmbuffer.items.rows import RingRows
from shmbuffer.memory import ItemSnapshot, Ring
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import has_own_allocator


class NativeRows(RingRows, Rows):
    """Writes and reads the rows of a ring for a storage, with one native call per batch."""

    def __init__(self, ring: Ring, leaves: Leaves, *, memory_mapped: bool) -> None:
        Rows.__init__(self, ring, leaves)
        self._memory_mapped = memory_mapped
        self._views: list[torch.Tensor] | None = None
        self._has_no_outtake = False

    def read_if_held(self, index: torch.Tensor, tickets: torch.Tensor) -> list[torch.Tensor] | None:
        """Copies the leaves of items that a sampler has chosen.

        ``index`` and ``tickets`` are contiguous, int64 ``[n]``. Returns None if an item was
        replaced, or if the direct native path is unavailable. In this case, call `read`.
        """
        core = self.ring.seat.outtake or self._outtake()
        if core is None or has_own_allocator():
            return None
        at = index.data_ptr(), tickets.data_ptr(), index.numel()
        found: Any = core.copy(*at, LOCK_TIMEOUT_NS)
        return found if type(found) is list else None

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws elements and copies them, with the direct native path if possible."""
        core = self.ring.seat.outtake or self._outtake()
        if core is not None and not has_own_allocator():
            found: Any = core.sample(count, key, beta, LOCK_TIMEOUT_NS)
            if type(found) is tuple:
                return found
        return self.sample_patiently(count, key, beta)

    def sample_patiently(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws elements and copies them, without the direct native path.

        Waits if necessary, and raises an error if there are no items.
        """
        return super().sample(count, key, beta)

    def fill(
        self,
        tensors: Sequence[torch.Tensor],
        first: int,
        drawn: DrawnElements,
        key: int,
        beta: float | None,
    ) -> None:
        """Draws elements, and copies them to rows of ``tensors``, starting at row ``first``.

        Other rings fill the remaining rows.
        """
        leaves = zip(tensors, self.leaves.leaves, strict=True)
        addresses = [tensor.data_ptr() + first * leaf.nbytes for tensor, leaf in leaves]
        draw_into(self.ring, addresses, drawn, key, beta)

    def _outtake(self) -> Any:
        """Returns the direct native path for reads, and creates it on first use.

        Returns None if the core does not support the leaves, or if the handle was closed.
        """
        leaves = self.leaves
        if self._has_no_outtake or leaves.lanes:
            return None
        with cpu.without_inference_mode():
            examples = tuple(
                cpu.empty(leaf.shape, dtype=dtype)
                for leaf, dtype in zip(leaves.leaves, leaves.dtypes, strict=True)
            )
        try:
            return self.ring.seat.take_out(examples, torch.Tensor)
        except (ValueError, RuntimeError, BufferError):  # unsupported dtype or version of torch
            self._has_no_outtake = True
            return None

    def copy_out(self, columns: list[torch.Tensor]) -> ItemSnapshot:
        """Copies a snapshot of all items to ``columns``, while other processes write."""
        return self.ring.copy_out([column.data_ptr() for column in columns])

    def views(self) -> list[torch.Tensor]:
        """Returns a view ``[slots, *lanes, *shape]`` per leaf. The views are not validated."""
        if self._views is None:
            with cpu.without_inference_mode():
                self._views = [self._view(at) for at in range(len(self.leaves.leaves))]
            spans = [
                (view.data_ptr(), view.data_ptr() + view.numel() * view.element_size())
                for view in self._views
                if view.numel()
            ]
            if spans:
                self.leaves.own_memory = (
                    min(low for low, _ in spans),
                    max(high for _, high in spans),
                )
        return self._views

    def _view(self, at: int) -> torch.Tensor:
        leaf = self.leaves.leaves[at]
        dtype = self.leaves.dtypes[at]
        shape = (self.ring.capacity, *self.leaves.lanes, *leaf.shape)
        if not leaf.nbytes:  # an empty leaf has no mapping
            return cpu.empty(shape, dtype=dtype)
        view = torch.frombuffer(self.ring.leaf(at), dtype=dtype).view(shape)
        return MemoryMappedTensor(view) if self._memory_mapped else view  # type: ignore[no-untyped-call]
