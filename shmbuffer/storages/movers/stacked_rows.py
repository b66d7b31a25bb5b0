"""Reads stacks of consecutive steps, with one native call per batch.

    index, tickets [n * steps] ──▶ observation [n, steps, ...], next observation [n, steps, ...],
                                   other leaves [n, ...] of the last step

The core copies each step to its position in the sample. The stack of next observations is made from
the same bytes as the stack of observations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS
from shmbuffer.storages.movers.native_rows import NativeRows
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import has_own_allocator

# Layouts of a leaf in a sample: the leaf of the last step, or a stack of the leaf in all steps. Any
# other value is the number of a leaf, whose stack is shifted by one step.
ONE_ROW, STACK = -2, -1


class StackedRows:
    """Reads samples of ``steps`` consecutive steps. ``forms`` has the layout of each leaf."""

    def __init__(self, rows: NativeRows, steps: int, forms: tuple[int, ...]) -> None:
        self.rows, self.steps, self._forms = rows, steps, forms
        leaves = rows.leaves
        stacked = tuple(
            leaf if form == ONE_ROW else replace(leaf, shape=(steps, *leaf.shape))
            for leaf, form in zip(leaves.leaves, forms, strict=True)
        )
        # The leaves of a sample, of which some are stacks.
        self.leaves = Leaves(leaves.kit, leaves.node, stacked, (), leaves.where)

    @classmethod
    def of(cls, rows: NativeRows, steps: int, forms: tuple[int, ...]) -> StackedRows | None:
        """Creates a reader. Returns None if the C core does not support the leaves."""
        made = cls(rows, steps, forms)
        try:
            made._core()
        except (ValueError, RuntimeError, BufferError):
            return None
        return made

    def read(self, index: torch.Tensor, tickets: torch.Tensor) -> list[torch.Tensor] | None:
        """Copies stacks of items that a sampler has chosen, to one new tensor per leaf.

        Returns None if an item was replaced, or if the handle was closed.
        """
        if has_own_allocator():
            tensors, addresses = self.leaves.outputs((index.numel() // self.steps,))
            return tensors if self.fill(index, tickets, tuple(addresses)) else None
        core = self._core()
        found: Any = None if core is None else core.copy(*self._given(index, tickets))
        return found if type(found) is list else None

    def draw(self, given: tuple[int, int, float | None], known: Any, *into: tuple[int, ...]) -> Any:
        """Draws steps and copies their stacks.

        Args:
            given: number of steps, key of the draw, and exponent beta.
            known: arguments of the core that describe the known trajectories.
            into: addresses of the leaves, the index, the tickets and the weights. If they are
                passed, the results are written there.

        Returns:
            A `Drawn`, or True if ``into`` was passed. Returns None if an item is too new or was
            overwritten, or if the direct native path is unavailable.
        """
        core = None if has_own_allocator() else self._core()
        if core is None:
            return None
        found: Any = core.draw(*given, LOCK_TIMEOUT_NS, *known, *into)
        return None if type(found) is int else found

    def fill(self, index: torch.Tensor, tickets: torch.Tensor, addresses: tuple[int, ...]) -> bool:
        """Copies stacks of chosen items to existing memory, with one address per leaf.

        Returns False if an item was replaced, or if the handle was closed.
        """
        core = self._core()
        given = self._given(index, tickets)
        return core is not None and core.fill(*given, addresses) is True

    def _given(self, index: torch.Tensor, tickets: torch.Tensor) -> tuple[int, int, int, int]:
        self.rows.ring.require_linked()
        count = index.numel() // self.steps
        return index.data_ptr(), tickets.data_ptr(), count, LOCK_TIMEOUT_NS

    def _core(self) -> Any:
        """Returns the direct native path, and creates it on first use.

        Returns None after the handle was closed.
        """
        seat = self.rows.ring.seat
        found = seat.stack_outtakes.get((self.steps, self._forms))
        if found is not None:
            return found
        with cpu.without_inference_mode():
            examples = tuple(
                cpu.empty(leaf.shape, dtype=dtype)
                for leaf, dtype in zip(self.leaves.leaves, self.leaves.dtypes, strict=True)
            )
        return seat.take_stacks_out(examples, torch.Tensor, self.steps, self._forms)
