"""The leaves of items that differ, joined to one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, is_non_tensor, lazy_stack

from shmbuffer.replay.records.layers import Layer, Path, Tensors
from shmbuffer.replay.records.table import Column
from shmbuffer.replay.records.transfer import Transfer, empty, homes

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

    def of(self, layer: Layer, transfer: Transfer) -> Any:
        """The batch.

        Args:
            layer: all items.
            transfer: moves what is in columns.
        """
        self._transfer = transfer
        self._look(layer)
        made = self._layer(layer, ())
        transfer.run()
        for step in self._after:
            step()
        return self._finished(layer, made())

    def _look(self, layer: Layer) -> None:
        """Checks what was asked for against what there is."""

    def _finished(self, layer: Layer, batch: Any) -> Any:
        """The batch, with what belongs to it besides its leaves."""
        return batch

    def _leaf(self, leaf: Column | Tensors, path: Path) -> Later:
        """What a leaf becomes."""
        raise NotImplementedError

    def _batch_size(self, layer: Layer) -> list[int]:
        """Of the batch, after its first dim."""
        raise NotImplementedError

    def _apart(self, values: list[Any], layer: Layer) -> Any:
        """What a list with one thing for each item becomes."""
        if all(map(is_non_tensor, values)):
            return NonTensorStack(*values)
        return lazy_stack(values)

    def _layer(self, layer: Layer, path: Path) -> Later:
        later: dict[str, Later] = {}
        for key, entry in layer.entries.items():
            if isinstance(entry, Layer):
                later[key] = self._layer(entry, (*path, key))
            elif isinstance(entry, list):
                later[key] = known(self._apart(entry, layer))
            else:
                later[key] = self._leaf(entry, (*path, key))
        size = torch.Size((len(layer.batch_dims), *self._batch_size(layer)))
        return lambda: layer.build({key: value() for key, value in later.items()}, size)

    def _dense(self, leaf: Column | Tensors) -> Later:
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
