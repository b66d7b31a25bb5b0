"""Tensors, and what can become one: numbers, arrays, lists of them; their dtypes and bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from shmbuffer._native import _core
from shmbuffer.errors import SchemaMismatchError
from shmbuffer.numpy.arrays import is_plain
from shmbuffer.replay.form import cpu

_core.know_tensors(torch.Tensor)

_KNOWN = (bool, int, float, complex, np.generic, np.ndarray)


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor over the same memory where that is possible."""
    if isinstance(value, torch.Tensor):
        require_memory(value)
        return value
    if isinstance(value, np.ndarray) and not _fits_torch(value):
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, (list, tuple)):
        return cpu.as_tensor(value) if is_plain(value) else torch.stack(list(map(as_tensor, value)))
    if isinstance(value, _KNOWN):
        return cpu.as_tensor(value)
    if hasattr(type(value), "__dlpack__"):
        return from_dlpack(value)
    return as_tensor(np.asarray(value))


def _fits_torch(array: np.ndarray[Any, Any]) -> bool:
    """Whether torch shares its memory: writable, native, and without negative strides."""
    forward = min(array.strides, default=0) >= 0
    return array.flags.writeable and array.dtype.isnative and forward


def like(value: Any, dtype: str) -> tuple[str, torch.Tensor]:
    """`as_tensor`, with the name of its dtype; plain numbers, and lists of them, as `arrays.like`.

    An integer may become any float, and a float a shorter one, but not infinite.
    """
    value = bool(value) if isinstance(value, np.bool_) else value  # torch takes it for an index
    tensor, wanted = as_tensor(value), torch_dtype(dtype)
    name = dtype_name(tensor.dtype)
    if not is_plain(value) or not torch.can_cast(tensor.dtype, wanted):
        return name, tensor
    try:
        cast = cpu.tensor(value, dtype=wanted)  # from the number: as_tensor may have rounded it
    except RuntimeError:  # out of range
        return name, tensor
    if wanted.is_floating_point or wanted.is_complex:
        held = cast.isfinite() | ~cpu.tensor(value, dtype=torch.complex128).isfinite()
    else:
        held = cast == tensor
    if held.all():
        return dtype, cast
    return ("float64" if name == dtype else name), tensor  # too large for the same one


def template(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of that form for ``torch.empty_like``, the cheapest allocation that torch offers."""
    with cpu.lasting():
        one = cpu.empty((), dtype=dtype).expand(shape)  # one element, whatever the shape
        made = torch.empty_like(one)
        # A tensor of one element would keep strides of 0, with which torch refuses `view(dtype)`.
        fits = made.is_contiguous() and 0 not in made.stride()
        return one if fits else cpu.empty(shape, dtype=dtype)


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` as torch's dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaMismatchError(
            f"the buffer has a leaf of dtype {name!r}, which this torch ({torch.__version__}) does "
            "not know; use a newer one",
            expected=name,
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


def tensor_of(leaf: Any) -> torch.Tensor:
    """A tensor as it is; an array of a dtype that torch has; of any other, and of bytes, these."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, bytes):
        if torch_dtype_like(leaf.dtype) is not None:
            return as_tensor(np.ascontiguousarray(leaf).reshape(leaf.shape))
        leaf = leaf.tobytes()
    return torch.from_numpy(np.frombuffer(leaf, np.uint8).copy())


@lru_cache(maxsize=256)
def torch_dtype_like(dtype: np.dtype[Any] | str) -> torch.dtype | None:
    """Torch's dtype for arrays of one of numpy's; None if it has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # text, times, another byte order
        return None


_SIGNED: dict[torch.dtype | None, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def take_rows(
    rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``rows.index_select(0, index)``, also of unsigned integers; see `put_rows`."""
    signed = _SIGNED.get(getattr(rows, "dtype", None))
    if signed is None:
        if out is None:
            return rows.index_select(0, index)  # objects have this method, too
        return torch.index_select(rows, 0, index, out=out)
    taken = take_rows(rows.view(signed), index, None if out is None else out.view(signed))
    return taken.view(rows.dtype)


def put_rows(into: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """``into[index] = rows``, also of unsigned integers, which torch does not put by an index."""
    signed = _SIGNED.get(getattr(into, "dtype", None))  # objects have none
    if signed is None:
        into[index] = rows
    else:
        into.view(signed)[index] = rows.view(signed)


def require_memory(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor without numbers in a row in memory that can be read."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise TypeError("a sparse, nested or meta tensor has no numbers in a row")
    if not tensor.numel():
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    try:
        held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # of a subclass without storage
        held = 0
    if held < needed:
        raise TypeError(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory: it is fake, "
            "functional, or its storage was freed"
        )


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to the CPU, without flags, unless its bytes are its numbers in order there.

    Raises:
        TypeError: it has no memory that can be read; see `require_memory`.
    """
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    require_memory(plain)
    return plain


class _Reads(threading.local):
    """What this thread reads into: other memory for one buffer, and not for all on its storage."""

    empty_like: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.empty_like)


reads = _Reads()


def reads_elsewhere() -> bool:
    """Whether this thread reads into memory that somebody has chosen."""
    return reads.empty_like is not torch.empty_like


@contextmanager
def reads_into(empty_like: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Have `Leaves.outputs` of this thread make its tensors so."""
    before, reads.empty_like = reads.empty_like, empty_like
    try:
        yield
    finally:
        reads.empty_like = before
