"""Cuts a block of memory into the leaves of many items."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.record_format import Chunk


def values(memory: Bytes, starts: Ints, dims: Ints, chunk: Chunk) -> list[Any]:
    """Returns the leaf of each item, whose bytes begin at ``memory[starts[i]]``.

    Arrays are views of the memory. Tensors are returned as NumPy arrays.
    """
    at, data = starts.tolist(), memory.data
    match chunk.kind:
        case "array" | "tensor":
            kind = chunk.dtype
            dtype = DTYPES[kind].array if chunk.kind == "tensor" else np.dtype(kind)
            return [
                np.ndarray(shape, dtype, data, start)
                for shape, start in zip(dims.tolist(), at, strict=True)
            ]
        case "number":
            dtype = np.dtype(chunk.dtype)
            return [np.ndarray((), dtype, data, start)[()] for start in at]
        case "float":
            return [np.ndarray((), "<f8", data, start).item() for start in at]
        case "bool":
            found = memory[starts]
            if (found > 1).any():
                raise ValueError(f"a bool must be 0 or 1, got {found.max()}")
            return [bool(one) for one in found.tolist()]
        case "none":
            return [None] * len(at)
    spans = zip(at, (starts + dims[:, 0]).tolist(), strict=True)
    if chunk.kind == "str":
        return [str(data[a:b], "utf-8", "surrogatepass") for a, b in spans]
    if chunk.kind == "bytes":
        return [bytes(data[a:b]) for a, b in spans]
    return [int.from_bytes(data[a:b], "little", signed=True) for a, b in spans]
