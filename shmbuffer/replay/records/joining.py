"""The leaves of items that differ, joined to one batch; `Nesting` makes jagged tensors of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, is_non_tensor, lazy_stack

from shmbuffer.replay.records.building import Batch
from shmbuffer.replay.records.layers import Key, Path, Tensors, chunks_of, name_of, path_of
from shmbuffer.replay.records.table import Column, Table
from shmbuffer.replay.records.transfer import Transfer, empty, homes

Leaf = Column | Tensors
Later = Callable[[], Any]
"""Gives what is there when everything has moved."""


class Joining:
    """Makes one batch of the leaves of items: says what goes where, and takes it when it is there.

    Subclasses say what becomes of a leaf, and of entries that are no tensors.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._transfer = Transfer()
        self._after: list[Callable[[], None]] = []

    def of(self, table: Table, transfer: Transfer) -> Any:
        """The batch.

        Args:
            table: all items; see `layers`.
            transfer: moves what is in columns.
        """
        self._transfer = transfer
        columns: list[Any] = list(table.columns)
        leaves = {
            path: number
            for path, number in chunks_of(table.tree).items()
            if not isinstance(columns[number], list)
        }
        tree = self._look(table, {path: columns[number] for path, number in leaves.items()})
        later = {number: self._leaf(columns[number], path) for path, number in leaves.items()}
        transfer.run()
        for step in self._after:
            step()
        for number, made in later.items():
            columns[number] = made()
        return self._finished(_Joined(self, table.batch_dims, columns).of(tree))

    def _look(self, table: Table, leaves: dict[Path, Leaf]) -> Any:
        """Checks what was asked for against what there is; the tree of the batch."""
        for path in self._asked():
            if path not in leaves:
                raise KeyError(
                    f"{name_of(path)} is no tensor of the items, which have "
                    f"{', '.join(map(name_of, leaves)) or 'none'}"
                )
        return table.tree

    def _asked(self) -> Iterable[Path]:
        """Leaves that must be there."""
        raise NotImplementedError

    def _finished(self, batch: Any) -> Any:
        """The batch, with what belongs to it besides its leaves."""
        return batch

    def _leaf(self, leaf: Leaf, path: Path) -> Later:
        """What a leaf becomes."""
        raise NotImplementedError

    def size(self, dims: NDArray[np.int64]) -> list[int]:
        """The batch size of what has these, int64[n, rank]; after the first dim."""
        raise NotImplementedError

    def apart(self, values: list[Any], dims: NDArray[np.int64]) -> Any:
        """What a list with one thing for each item becomes, in TensorDicts of these sizes."""
        if all(map(is_non_tensor, values)):
            return NonTensorStack(*values)
        return lazy_stack(values)

    def _dense(self, leaf: Leaf) -> Later:
        """A leaf whose rows have one shape."""
        if isinstance(leaf, Tensors):
            return known(torch.stack(leaf.tensors))
        assert leaf.dtype is not None  # it is a tensor's
        out = empty((len(leaf.dims), *leaf.dims[0].tolist()), leaf.dtype)
        self._transfer.add(leaf, out, np.arange(len(out)) * leaf.nbytes)
        return self._sent(out)

    def _scatter(
        self,
        column: Column,
        last: int,
        out: torch.Tensor,
        starts: NDArray[np.int64],
        shape: Sequence[int],
    ) -> None:
        """Rows of a column go to their places, where these are not in one run each.

        Args:
            column: of any codecs.
            last: the last of its dims that differs, or lies apart in ``out``.
            out: all of it but the rows is there already.
            starts: int64[n], bytes: where each row starts in ``out``.
            shape: sizes in ``out`` of the dims of a row: how far apart it lies.
        """
        homes_of, nbytes = homes(column.nbytes)
        memory = empty((nbytes,), torch.uint8)
        self._transfer.add(column, memory, homes_of)
        rows, source, target, sizes = _runs(column.dims, last, shape, column.chunk.itemsize)
        source += homes_of[rows] + memory.data_ptr()
        target += starts[rows] + out.data_ptr()

        def step() -> None:
            again = Transfer()
            again.move(source, sizes, target, (memory, out))
            again.run()

        self._after.append(step)

    def _sent(self, out: torch.Tensor) -> Later:
        """A tensor of ours, when everything has moved."""
        return lambda: out if self.device is None else out.to(self.device)


class _Joined(Batch):
    """Makes the batch as it was asked for, of leaves that are there."""

    def __init__(self, joining: Joining, batch_dims: NDArray[np.int64], columns: list[Any]) -> None:
        super().__init__(batch_dims, columns, joining.device)
        self.size = joining.size  # type: ignore[method-assign]
        self._apart = joining.apart

    def leaf(self, column: Any, dims: NDArray[np.int64]) -> Any:
        """See `Batch.leaf`."""
        return self._apart(column, dims) if isinstance(column, list) else column


def known(value: Any) -> Later:
    """What is there already."""
    return lambda: value


def _runs(
    dims: NDArray[np.int64], last: int, shape: Sequence[int], itemsize: int
) -> tuple[NDArray[np.int64], ...]:
    """Rows as runs of bytes that stay together in a tensor where rows lie apart.

    Args:
        dims: int64[n, rank]: of each row.
        last: the last dim in which a row lies apart.
        shape: of what a row lies in.
        itemsize: of a number, in bytes.

    Returns:
        For each run its row; where it starts in the row, and where in the other; its bytes.
    """
    nbytes = dims[:, last:].prod(axis=1) * itemsize
    counts = np.where(nbytes > 0, dims[:, :last].prod(axis=1), 0)
    rows = np.repeat(np.arange(len(dims)), counts)
    first, total = homes(counts)
    number = np.arange(total) - first[rows]
    source = number * nbytes[rows]
    target = np.zeros_like(number)
    for dim in range(last - 1, -1, -1):
        number, at = np.divmod(number, dims[rows, dim])
        target += at * (math.prod(shape[dim + 1 :]) * itemsize)
    return rows, source, target, nbytes[rows]


class Nesting(Joining):
    """See `densify`."""

    def __init__(self, keys: Collection[Key]) -> None:
        super().__init__()
        self._keys = {path_of(key) for key in ([keys] if isinstance(keys, str) else keys)}
        self._offsets: dict[tuple[bytes, torch.device], torch.Tensor] = {}

    def _asked(self) -> Collection[Path]:
        return self._keys

    def size(self, dims: NDArray[np.int64]) -> list[int]:
        """See `Joining.size`."""
        sizes: list[int] = np.where((dims != dims[:1]).any(axis=0), -1, dims[0]).tolist()
        return sizes

    def _leaf(self, leaf: Leaf, path: Path) -> Later:
        ragged = leaf.ragged or ([0] if path in self._keys else [])
        if not ragged:
            return self._dense(leaf)
        if not leaf.dims.shape[1]:
            raise RuntimeError(f"{name_of(path)} has no dims along which it could be nested")
        if len(ragged) > 1:
            raise RuntimeError(
                f"{name_of(path)} differs in its dims {ragged}, and torch's jagged tensors do so "
                "in one only: pad it"
            )
        (dim,) = ragged
        lengths = np.ascontiguousarray(leaf.dims[:, dim])
        if isinstance(leaf, Tensors):
            values = torch.cat(leaf.tensors, dim)
            return known(self._jagged(values, lengths, dim))
        starts, total = homes(lengths)
        shape: list[int] = leaf.dims[0].tolist()
        shape[dim] = total
        assert leaf.dtype is not None  # it is a tensor's
        out = empty(shape, leaf.dtype)
        starts *= math.prod(shape[dim + 1 :]) * leaf.dtype.itemsize
        if dim:
            self._scatter(leaf, dim, out, starts, shape)
        else:
            self._transfer.add(leaf, out, starts)
        sent = self._sent(out)
        return lambda: self._jagged(sent(), lengths, dim)

    def _jagged(self, values: torch.Tensor, lengths: NDArray[np.int64], dim: int) -> torch.Tensor:
        """A nested tensor over values; those of the same lengths share their offsets."""
        key = (lengths.tobytes(), values.device)
        offsets = self._offsets.get(key)
        if offsets is None:
            ends = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=ends[1:])
            offsets = self._offsets[key] = torch.from_numpy(ends).to(values.device)
        made: torch.Tensor = torch.nested.nested_tensor_from_jagged(
            values,
            offsets,
            jagged_dim=dim + 1,
            min_seqlen=int(lengths.min()),
            max_seqlen=int(lengths.max()),
        )
        return made
