"""The memory of tensors that records are read into, and what a user's function makes of records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.record_batch import RecordBatch
from shmbuffer.memory.record_format import Chunk
from shmbuffer.numpy.records.memory import is_lent, lent
from shmbuffer.numpy.records.table import Raw
from shmbuffer.replay.form.packing import Decompress, expanded
from shmbuffer.replay.form.tensors import contiguous, torch_dtype, torch_dtype_like


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to be written whole; see `lent` for the memory of a large one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not is_lent(nbytes):
        return torch.empty(shape, dtype=dtype)
    memory = torch.from_numpy(lent(nbytes).reshape(*shape[:-1], -1))
    return memory if dtype is torch.uint8 else memory.view(dtype)


def torch_dtype_of(chunk: Chunk) -> torch.dtype | None:
    """Torch's dtype of a chunk: of a tensor, or of an array that torch can have; else None."""
    if chunk.kind == "tensor":
        return torch_dtype(chunk.dtype)
    return torch_dtype_like(chunk.dtype) if chunk.kind in ("array", "number") else None


def by_user(
    own: Decompress, batch: RecordBatch, chunk: Chunk, dims: Ints, offsets: Ints, sizes: Ints
) -> Raw:
    """What the user's function makes of pieces, raw. ``rows`` is for the caller to say."""
    dtype = torch_dtype_of(chunk)
    kept = []
    addresses = np.zeros(offsets.shape, np.int64)
    found_sizes = np.zeros(offsets.shape, np.int64)
    for row, shape in enumerate(dims.tolist()):
        size = torch.Size(shape[1:] if chunk.frames else shape)
        nbytes = size.numel() * chunk.itemsize
        plain = size if dtype is not None else torch.Size((nbytes,))
        for piece in range(chunk.pieces if nbytes else 0):
            at = int(offsets[row, piece])
            stored = torch.from_numpy(batch.data[at : at + int(sizes[row, piece])].copy())
            tensor = contiguous(expanded(own, stored, dtype or torch.uint8, plain))
            kept.append(tensor)
            addresses[row, piece], found_sizes[row, piece] = tensor.data_ptr(), nbytes
    return Raw(slice(None), addresses, found_sizes, kept)
