"""Leaves of different lengths as torch's jagged tensors."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.replay.records.joining import Joining, Later, known
from shmbuffer.replay.records.layers import Key, Layer, Path, Tensors, leaves_of, name_of, path_of
from shmbuffer.replay.records.table import Column
from shmbuffer.replay.records.transfer import empty, homes


class Nesting(Joining):
    """See `densify`."""

    def __init__(self, keys: Collection[Key]) -> None:
        super().__init__()
        self._keys = {path_of(key) for key in ([keys] if isinstance(keys, str) else keys)}
        self._offsets: dict[tuple[bytes, torch.device], torch.Tensor] = {}

    def _look(self, layer: Layer) -> None:
        leaves = leaves_of(layer, ())
        for path in self._keys:
            if path not in leaves:
                raise KeyError(
                    f"{name_of(path)} is no tensor of the items, which have "
                    f"{', '.join(map(name_of, leaves)) or 'none'}"
                )

    def _batch_size(self, layer: Layer) -> list[int]:
        dims = layer.batch_dims
        sizes: list[int] = np.where((dims != dims[:1]).any(axis=0), -1, dims[0]).tolist()
        return sizes

    def _leaf(self, leaf: Column | Tensors, path: Path) -> Later:
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
