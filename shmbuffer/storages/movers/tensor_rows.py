"""Base class for movers for items of one structure, with one column per leaf.

The C core copies rows in the ring's own memory (`NativeRows`). torch copies rows in tensors of this
process (`HeldRows`), between claim and commit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_non_tensor

from shmbuffer.items.form.arrays import NO_ARRAY
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.form.mismatch import refuse_leaf
from shmbuffer.items.indices import elements_of
from shmbuffer.memory import ItemSnapshot, Ring
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.format.streams import GivenStreams
from shmbuffer.memory.system.progress import Progress
from shmbuffer.saves.tickets import Tickets
from shmbuffer.storages.indexing import Selection, meant, ravel, tickets_at
from shmbuffer.storages.movers.storage_mover import StorageMover, whole_or_empty
from shmbuffer.tensors.form.objects import as_objects, objects_in
from shmbuffer.tensors.form.tensor_kit import values_of
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode, is_collection
from shmbuffer.tensors.form.tensor_structure import leaves_of
from shmbuffer.tensors.form.tensors import as_numbers, dtype_name, like, put_rows, take_rows

# A load claims and copies at most PIECE slots at a time, and about PIECE_BYTES bytes.
PIECE = 4096
PIECE_BYTES = 2**25


class Rows(StorageMover):
    """Base class for movers for the rows of a ring."""

    _claim: AbstractContextManager[Any] = nullcontext()
    """Lock that is held from claim to commit, if the ring's own locks are not sufficient."""

    _keeps = False
    """True if `patch` never changes observations that are stored only once."""

    def __init__(self, ring: Ring, leaves: Leaves) -> None:
        self.ring = ring
        self.leaves = leaves
        self.lanes = leaves.lanes
        self.where = leaves.where
        self.build = leaves.build  # type: ignore[method-assign] # saves a call

    @abstractmethod
    def write(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Appends a batch, or one item if ``single`` is True.

        Returns the first ticket and the number of slots.
        """

    @abstractmethod
    def views(self) -> list[torch.Tensor]:
        """Returns a view ``[slots, *lanes, *shape]`` per leaf. The views are not validated."""

    def column(self, at: int) -> torch.Tensor:
        """Returns the view of leaf ``at``. Raises SchemaMismatchError if it has no column."""
        return self.views()[at].as_subclass(torch.Tensor)

    def take(self, at: int, elements: Ints) -> torch.Tensor:
        """Copies leaf ``at`` of n elements, ``[n, *shape]``. The copies are not validated."""
        flat = self.column(at).detach().reshape(self.ring.elements, *self.leaves.leaves[at].shape)
        return take_rows(flat, torch.from_numpy(elements).to(flat.device)).cpu()

    def leaf_at(self, path: KeyPath) -> int | None:
        """Returns the number of the leaf at ``path``, or None if there is no such leaf."""
        leaves = enumerate(self.leaves.leaves)
        return next((at for at, leaf in leaves if leaf.path == path), None)

    def contiguous(self, at: int) -> torch.Tensor | None:
        """Returns the column of leaf ``at`` if it is contiguous in CPU memory, otherwise None."""
        sharing = self.ring.schema.sharing
        is_shared = sharing and self.leaves.leaves[at].path in sharing.paths
        if at in self.leaves.objects or is_shared:
            return None
        column = self.column(at).detach()
        return column if column.is_cpu and column.is_contiguous() and column.numel() else None

    def entries(self, slots: Ints, paths: Sequence[KeyPath]) -> tuple[list[Any], Ints]:
        """Reads entries of the items that are present.

        Returns the values for each path, and the ticket of each slot, which is -1 if it is empty.
        The values are an array ``[elements, k]`` of numbers, an array of objects, or None if there
        is no such leaf.
        """
        elements = elements_of(slots, self.ring.width)
        found: list[Any] = []
        for at in map(self.leaf_at, paths):
            if at is None:
                found.append(None)
            elif at in self.leaves.objects:
                held: Any = self.views()[at]  # `Objects`
                found.append(held.view(self.ring.elements).array[elements])
            else:
                found.append(as_numbers(self.take(at, elements)).reshape(len(elements), -1))
        # Read last. A slot that a writer has claimed meanwhile then counts as empty.
        tickets = tickets_at(self.ring, slots)
        which = (tickets >= 0).repeat(self.ring.width)
        return [None if one is None else one[which] for one in found], tickets

    @abstractmethod
    def copy_out(self, columns: list[torch.Tensor]) -> ItemSnapshot:
        """Copies a snapshot of all items to ``columns``, while other processes write."""

    def select_rows(self, data: Any, which: NDArray[Any]) -> Any:
        """Returns the rows of ``data`` that ``which`` selects, in the form that `place` accepts."""
        values, _ = values_of(self.leaves, data)
        chosen = torch.from_numpy(which)
        parts = [value[chosen.to(value.device)] for value in values]
        return self.build(parts, (len(which), *self.lanes))

    def as_batch(self, item: Any) -> Any:
        """Converts an item to a batch with one item."""
        values, _ = values_of(self.leaves, item, torch.Size(()))
        return self.build([value.unsqueeze(0) for value in values], (1, *self.lanes))

    # -- reading -------------------------------------------------------------------------------

    def build(self, found: list[Any], lead: tuple[int, ...]) -> Any:
        """Builds items from their leaves. ``lead`` has the sizes of their leading dimensions."""
        return self.leaves.build(found, lead)

    def shaped(self, found: Any, lead: tuple[int, ...], held: torch.Tensor | None = None) -> Any:
        """Builds the selected items. If there is a mask ``held``, builds only the items in it."""
        if held is not None:
            found = [
                tensor.view(lead[0], -1, *tensor.shape[1:])[held.to(tensor.device)]
                for tensor in found
            ]
            lead = (int(held.sum()), *lead[1:])
        leaves = zip(found, self.leaves.leaves, strict=True)
        return self.build([tensor.view((*lead, *leaf.shape)) for tensor, leaf in leaves], lead)

    def viewed(self, selection: Selection) -> Any:
        """Returns unvalidated views of the selected items."""
        assert selection.view is not None
        return self.build([selection.view(view) for view in self.views()], selection.lead)

    def everything(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Returns the element numbers, the copied leaves and the tickets of all items."""
        index = torch.from_numpy(self.ring.live.committed())
        tensors, tickets, missing = self.read(index)
        if missing:  # another process has overwritten items in the meantime
            lanes = self.ring.width
            kept = (tickets >= 0).view(-1, lanes).all(1).repeat_interleave(lanes)
            index = index[kept]
            tensors = [tensor[kept.to(tensor.device)] for tensor in tensors]
            tickets = tickets[kept]
        return index, tensors, tickets

    # -- changing ------------------------------------------------------------------------------

    def change(self, index: Any, value: Any, path: tuple[str, ...] | None, dim_extend: int) -> None:
        """Changes the entry at ``path``, or whole items, in place; see `Storage.change`."""
        chosen = self.select(index, dim_extend)
        self.patch(chosen.elements, columns_of(self.leaves, chosen.lead, value, path))

    def change_if_present(
        self, index: Any, generation: Any, patch: Any, *, dim_extend: int = 0
    ) -> Flags:
        """Changes entries of items that have not been overwritten. Returns bool ``[n]``."""
        elements, tickets = meant(index, generation, self.lanes)
        written = [-1, *self.lanes] if self.lanes else list(np.shape(index))
        if self.lanes and len(elements) % self.ring.width == 0:
            written[0] = len(elements) // self.ring.width
        columns = columns_of(self.leaves, (len(elements),), patch, (), written, dim_extend)
        return self.patch(elements, columns, tickets)

    def entry(self, index: Any, path: KeyPath) -> tuple[Ints, torch.Tensor, Ints]:
        """Reads one entry of some items; see `Storage.entry`."""
        found = [at for at, leaf in enumerate(self.leaves.leaves) if leaf.path == path]
        if not found:
            raise KeyError(f"{'.'.join(path)!r} is not a leaf of {self.where}")
        elements, view = ravel(index, self.lanes), self.views()[found[0]].as_subclass(torch.Tensor)
        column = view.view(-1, *self.leaves.leaves[found[0]].shape)
        numbers = column[torch.from_numpy(elements).to(column.device)]
        # Tickets are read last. An unchanged ticket proves that the value belongs to the item.
        return elements, numbers.cpu(), tickets_at(self.ring, elements // self.ring.width)

    def patch(
        self, elements: Ints, columns: dict[int, torch.Tensor], tickets: Ints | None = None
    ) -> Flags:
        """Changes leaves of elements in place.

        The other leaves, the priority, the source and the write count do not change. No other write
        can occur between the check of the ticket and the change.

        Args:
            elements: numbers of the elements, int64 ``[n]``.
            columns: new values by leaf number, ``[n, *shape]``.
            tickets: expected tickets, int64 ``[n]``. Elements with another ticket are not changed.

        Returns:
            bool ``[n]``, True for each element that was changed.
        """
        width = self.ring.width
        slots, of_slot = np.unique(elements // width, return_inverse=True)
        expected = None
        if tickets is not None:  # if a slot occurs several times, its newest ticket is expected
            expected = np.full(len(slots), -1)
            np.maximum.at(expected, of_slot, tickets)
        with self._claim:
            kept = self.ring.claims.claim_slots(
                slots, in_place=True, keeps=self._keeps, tickets=expected
            )
            changed = kept[of_slot]
            if expected is not None:
                changed &= tickets == expected[of_slot]
            if not kept.any():
                return changed
            which = torch.from_numpy(np.nonzero(changed)[0])
            where = torch.from_numpy(elements)[which]

            def fill() -> None:
                for at, values in columns.items():
                    view = self.column(at)
                    flat = view.view(-1, *self.leaves.leaves[at].shape)
                    rows = values[which.to(values.device)].to(flat.device)
                    put_rows(flat, where.to(flat.device), rows)

            self._commit(fill)
        return changed

    def copy_in(
        self,
        columns: list[torch.Tensor] | None,
        rows: Ints,
        slots: Ints,
        *,
        cursor: int,
        write_count: int,
        tickets: Tickets | None = None,
        sources: NDArray[np.uint64] | None = None,
    ) -> None:
        """Replaces the contents of the storage. The bytes are copied once, in pieces.

        Args:
            columns: column of each leaf. None if the bytes are already in the storage.
            rows: row of each item in the columns, int64 ``[n]``.
            slots: slot of each item, int64 ``[n]``.
            cursor: slot of the next write.
            write_count: number of writes so far.
            tickets: tickets of the items. None assigns new tickets.
            sources: writer and stream of each item, uint64 ``[n]``.
        """
        self.ring.empty()
        exact = None if tickets is None else tickets.for_ring(self.ring)
        runs, starts, head = self._runs(slots, cursor, exact)
        # If the bytes are in place, the load is too short for progress reports.
        total = len(slots) * self._slot_bytes if columns is not None else 0
        with whole_or_empty(self.ring, self.where), Progress("load", total) as progress:
            most = max(1, min(PIECE, PIECE_BYTES // max(1, self._slot_bytes)))
            for run, ticket in zip(runs, starts, strict=True):
                if ticket is not None:
                    self.ring.restore(ticket, 0, None)
                for first, count in progress.cut(len(run), self._slot_bytes, most):
                    part = run[first : first + count]
                    whose = None if sources is None else sources[part]
                    self._replace_some(columns, rows[part], slots[part], whose, ticket is None)
                    progress.advance(count * self._slot_bytes)
        self.ring.restore(head, write_count, None)

    def _runs(
        self, slots: Ints, cursor: int, exact: Tickets | None
    ) -> tuple[list[Ints], list[int | None], int]:
        """Groups items into runs in the order in which they were written.

        Returns the positions of the items in each run, the first ticket of each run or None, and
        the new head of the ring.
        """
        runs = None if exact is None else exact.runs()
        if exact is None or runs is None:
            return [np.arange(len(slots))], [None], cursor
        return runs, [int(exact.of_items[run[0]]) for run in runs], exact.head

    def _replace_some(
        self,
        columns: list[torch.Tensor] | None,
        rows: Ints,
        slots: Ints,
        sources: NDArray[np.uint64] | None,
        placed: bool,
    ) -> None:
        """Writes items in one claim, to the given slots if ``placed``, otherwise at the head."""
        from_, to = torch.from_numpy(rows), torch.from_numpy(slots)

        def fill() -> None:
            for view, column in zip(self.views(), columns or (), strict=columns is not None):
                where = view.device
                put_rows(view.as_subclass(torch.Tensor), to.to(where), column[from_].to(where))

        with self._claim:
            if placed:
                self.ring.claims.claim_slots(slots, in_place=False)
            else:
                self.ring.claims.claim(len(slots))
            self._commit(fill)

    def _commit(self, fill: Callable[[], None], priorities: Floats | None = None) -> None:
        """Calls ``fill``, which writes the claimed slots, and commits the claim.

        If ``fill`` raises an error, the claim is aborted.
        """
        try:
            fill()
            self._settle()
        except BaseException:
            self.ring.claims.abort()
            raise
        self.ring.claims.commit(priorities)

    def _settle(self) -> None:
        """Waits until torch has written the rows. Does nothing on the CPU."""

    @property
    def _slot_bytes(self) -> int:
        """Bytes per slot, for progress reports. A Python object counts as 8 bytes."""
        leaves, lanes = self.leaves, self.ring.width
        sizes = (
            8 if at in leaves.objects else leaf.nbytes for at, leaf in enumerate(leaves.leaves)
        )
        return sum(sizes) * lanes


def columns_of(
    leaves: Leaves,
    lead: tuple[int, ...],
    data: Any,
    key: KeyPath | None,
    written: Sequence[int] = (),
    dim_extend: int = 0,
) -> dict[int, torch.Tensor]:
    """Converts new values to columns ``[n, *shape]``, by leaf number.

    Args:
        leaves: leaves of the storage.
        lead: shape of the selection, which has n elements.
        data: new value of the entry at ``key``, or whole items if ``key`` is None.
        key: path of the entry.
        written: shape of the index of a write. ``data`` can have this shape instead of ``lead``.
        dim_extend: dimension of such data that corresponds to the first dimension of ``written``.

    Raises:
        KeyError: a path is not a leaf of the storage.
        SchemaMismatchError: the structure, a dtype or a shape does not match.
    """
    number = {leaf.path: at for at, leaf in enumerate(leaves.leaves)}
    columns: dict[int, Any] = {}
    nested = isinstance(leaves.node, TensorDictNode)
    for path, value in _changes(data, key, number, nested).items():
        at = number.get(path)
        if at is None:
            if key is None:
                leaves.refuse_form(data)
            raise KeyError(
                f"{'.'.join(path)!r} is not a leaf of {leaves.where}, which has "
                f"{sorted('.'.join(known) for known in number)}"
            )
        leaf, dtype = leaves.leaves[at], leaves.dtypes[at]
        shape = (*lead, *leaf.shape)
        batch = _exchanged([*written, *leaf.shape], dim_extend) if len(written) > 1 else None
        if at in leaves.objects:
            if is_non_tensor(value) and list(value.batch_size) == batch:
                flat = objects_in(value).transpose(0, dim_extend)
                columns[at] = flat.reshape(-1, *leaf.shape)
                continue
            try:
                columns[at] = as_objects(value, shape).reshape(-1, *leaf.shape)
            except RuntimeError as error:
                refuse_leaf(leaves.where, leaf, shape, str(error))
            continue
        try:
            tensor = like(value, leaf.dtype)[1].detach()
        except NO_ARRAY as error:
            refuse_leaf(leaves.where, leaf, shape, f"{type(value).__name__} ({error})")
        if list(tensor.shape) == batch:
            tensor = tensor.transpose(0, dim_extend).reshape(shape)
        try:
            wide = tensor.expand(shape)
        except RuntimeError:
            wide = tensor
        if wide.dtype is not dtype or wide.shape != shape:
            found = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            refuse_leaf(leaves.where, leaf, shape, found)
        columns[at] = wide.reshape(-1, *leaf.shape)
    if key is None and len(columns) < len(number):
        leaves.refuse_form(data)
    return columns


def _exchanged(sizes: list[int], dim: int) -> list[int]:
    """Exchanges the sizes of dimensions 0 and ``dim`` in a shape."""
    sizes[0], sizes[dim] = sizes[dim], sizes[0]
    return sizes


def _changes(
    data: Any, key: KeyPath | None, known: Collection[KeyPath], nested: bool
) -> dict[KeyPath, Any]:
    """Returns the new values in ``data`` by the path of their leaf."""
    if key is None:
        return leaves_of(data, nested)
    if key in known or not (is_collection(data) or isinstance(data, (dict, tuple, list))):
        return {key: data}
    return {(*key, *path): value for path, value in leaves_of(data, nested).items()}
