"""The memory of tensors that records are read into, and what a user's function makes of records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shmbuffer.items.records.memory import is_lent, lent
from shmbuffer.memory.format.array_types import Bytes
from shmbuffer.memory.record_format import Chunk
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.packing import Decompress, expanded
from shmbuffer.tensors.form.tensors import contiguous, torch_dtype, torch_dtype_like


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to be written whole; see `lent` for the memory of a large one."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not is_lent(nbytes):
        return cpu.empty(shape, dtype=dtype)
    memory = torch.from_numpy(lent(nbytes).reshape(*shape[:-1], -1))
    return memory if dtype is torch.uint8 else memory.view(dtype)


def torch_dtype_of(chunk: Chunk) -> torch.dtype | None:
    """Torch's dtype of a chunk: of a tensor, or of an array that torch can have; else None."""
    if chunk.kind == "tensor":
        return torch_dtype(chunk.dtype)
    return torch_dtype_like(chunk.dtype) if chunk.kind in ("array", "number") else None


def by_user(own: Decompress, stored: Bytes, chunk: Chunk, shape: list[int]) -> torch.Tensor:
    """What the user's function makes of a piece: a tensor, or bytes where torch has no dtype."""
    dtype, size = torch_dtype_of(chunk), torch.Size(shape)
    if dtype is None:
        dtype, size = torch.uint8, torch.Size((size.numel() * chunk.itemsize,))
    return contiguous(expanded(own, torch.from_numpy(stored.copy()), dtype, size))
