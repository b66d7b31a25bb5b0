"""Memory for the tensors of decoded records, and calls of the user's compression functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shmbuffer.items.records.memory import is_lent, lent
from shmbuffer.memory.format.array_types import Bytes
from shmbuffer.memory.record_format import Chunk
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import (
    contiguous,
    dtype_name,
    tensor_of,
    torch_dtype,
    torch_dtype_like,
)

Compress = Callable[[torch.Tensor], Any]
"""The user's ``compression_fn``. The caller checks that the result is a tensor."""
Decompress = Callable[[torch.Tensor, dict[str, Any]], Any]
"""The user's ``decompression_fn``.

It takes a chunk and a dict with the type, shape, dtype and device of the original tensor.
"""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor. Large tensors use pooled memory (`lent`)."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not is_lent(nbytes):
        return cpu.empty(shape, dtype=dtype)
    memory = torch.from_numpy(lent(nbytes).reshape(*shape[:-1], -1))
    return memory if dtype is torch.uint8 else memory.view(dtype)


def torch_dtype_of(chunk: Chunk) -> torch.dtype | None:
    """Returns the torch dtype of a chunk.

    Returns None if the chunk is not a tensor, array or number, or if torch does not have the dtype
    of an array or number.
    """
    if chunk.kind == "tensor":
        return torch_dtype(chunk.dtype)
    return torch_dtype_like(chunk.dtype) if chunk.kind in ("array", "number") else None


def compressed(compress: Compress, leaf: Any) -> torch.Tensor:
    """Compresses a leaf with the user's function. Returns a contiguous uint8 tensor on the CPU.

    Raises:
        TypeError: the function did not return a uint8 tensor.
    """
    chunk = compress(tensor_of(leaf))
    if not isinstance(chunk, torch.Tensor) or chunk.dtype is not torch.uint8:
        found = chunk.dtype if isinstance(chunk, torch.Tensor) else type(chunk).__name__
        raise TypeError(f"compression_fn must return a uint8 tensor, got {found}")
    return chunk.detach().cpu().contiguous()


def expanded(own: Decompress, stored: Bytes, chunk: Chunk, shape: list[int]) -> torch.Tensor:
    """Decompresses a chunk with the user's function and checks the result.

    Returns a uint8 tensor if torch does not have the dtype.

    Raises:
        RuntimeError: the function did not return the tensor that was compressed.
    """
    dtype, size = torch_dtype_of(chunk), torch.Size(shape)
    if dtype is None:
        dtype, size = torch.uint8, torch.Size((size.numel() * chunk.itemsize,))
    about = {"type": "tensor", "shape": size, "dtype": dtype, "device": cpu.DEVICE}
    found = own(torch.from_numpy(stored.copy()), about)
    if not isinstance(found, torch.Tensor):
        raise RuntimeError(
            "decompression_fn must return the tensor that was compressed, got "
            f"{type(found).__name__}"
        )
    if (found.dtype, found.numel()) not in (
        (dtype, size.numel()),
        (torch.uint8, size.numel() * dtype.itemsize),
    ):
        raise RuntimeError(
            f"decompression_fn returned {dtype_name(found.dtype)}{list(found.shape)}, but "
            f"{dtype_name(dtype)}{list(size)} was compressed"
        )
    return contiguous(found)
