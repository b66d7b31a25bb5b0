"""Conversion of numbers, arrays and lists to tensors, and the dtypes and bytes of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from shmbuffer._native import _core
from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.form.arrays import is_plain
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.tensors.form import cpu

_core.register_tensors(torch.Tensor)

_KNOWN = (bool, int, float, complex, np.generic, np.ndarray)


def as_tensor(value: Any) -> torch.Tensor:
    """Converts a value to a tensor that shares its memory if possible."""
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
    """True if torch can share the memory of an array.

    The array must be writable and in native byte order, without negative strides.
    """
    forward = min(array.strides, default=0) >= 0
    return array.flags.writeable and array.dtype.isnative and forward


def like(value: Any, dtype: str) -> tuple[str, torch.Tensor]:
    """Converts a value to a tensor, and returns the name of its dtype and the tensor.

    Plain numbers and lists of them are cast to ``dtype``, under the rules of `arrays.like`.
    Integers can be cast to any float dtype. A float can be cast to a smaller dtype if the result is
    finite.
    """
    # torch.tensor would treat a NumPy bool as an index.
    value = bool(value) if isinstance(value, np.bool_) else value
    tensor, wanted = as_tensor(value), torch_dtype(dtype)
    name = dtype_name(tensor.dtype)
    if not is_plain(value) or not torch.can_cast(tensor.dtype, wanted):
        return name, tensor
    try:
        # Casts the original value, because as_tensor may already have rounded it.
        cast = cpu.tensor(value, dtype=wanted)
    except RuntimeError:  # out of range
        return name, tensor
    if _preserves(cast, value if wanted.is_floating_point or wanted.is_complex else tensor):
        return dtype, cast
    return ("float64" if name == dtype else name), tensor  # too large for this dtype


def _preserves(cast: torch.Tensor, value: Any) -> bool:
    """True if a cast preserved the numbers in ``value``.

    A tensor of integers must be preserved exactly. Other numbers may be rounded, but a finite
    number must not become infinite, NaN, or a number that is too small.
    """
    numbers = as_numbers(cast)
    if isinstance(value, torch.Tensor):
        return bool((numbers == as_numbers(value)).all())
    exact, form = np.asarray(value, np.complex128), torch.finfo(cast.dtype)
    # A float8 dtype without infinity converts a number that is too large to its maximum or to NaN.
    cut = (np.abs(numbers) == form.max) & (np.abs(exact) > form.max * (1 + form.eps))
    held = (np.isinf(numbers) == np.isinf(exact)) & (np.isnan(numbers) == np.isnan(exact)) & ~cut
    return bool(held.all())


def template(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a template for ``torch.empty_like``, which is torch's fastest allocation."""
    with cpu.without_inference_mode():
        one = cpu.empty((), dtype=dtype).expand(shape)  # one element for any shape
        allocated = torch.empty_like(one)
        # empty_like keeps strides of 0 for a tensor of one element, and `view(dtype)` rejects them.
        fits = allocated.is_contiguous() and 0 not in allocated.stride()
        return one if fits else cpu.empty(shape, dtype=dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype with a name such as ``"float32"``.

    Raises:
        SchemaMismatchError: this version of torch does not have the dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaMismatchError(
            f"the buffer has a leaf of dtype {name!r}, which torch {torch.__version__} does not "
            "support; install a newer version of torch",
            expected=name,
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a torch dtype, without the prefix ``torch.``."""
    return str(dtype).removeprefix("torch.")


def tensor_of(leaf: Any) -> torch.Tensor:
    """Converts an array or bytes to a tensor.

    Bytes, and arrays whose dtype torch does not have, are converted to uint8.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, bytes):
        if torch_dtype_like(leaf.dtype) is not None:
            return as_tensor(np.ascontiguousarray(leaf).reshape(leaf.shape))
        leaf = leaf.tobytes()
    return torch.from_numpy(np.frombuffer(leaf, np.uint8).copy())


@lru_cache(maxsize=256)
def torch_dtype_like(dtype: np.dtype[Any] | str) -> torch.dtype | None:
    """Returns the torch dtype that corresponds to a NumPy dtype, or None if torch has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # text, times, other byte orders
        return None


def _by_dtype(column: str) -> dict[torch.dtype | None, torch.dtype]:
    """Returns a dict from torch dtypes to the torch dtypes in a column of the table `DTYPES`.

    Empty cells, and dtypes that this torch does not have, are left out.
    """
    return {
        getattr(torch, name): torch_dtype(getattr(dtype, column))
        for name, dtype in DTYPES.items()
        if getattr(dtype, column) and hasattr(torch, name)
    }


_NUMBERS, _ASSIGNED = _by_dtype("numbers"), _by_dtype("assigned")


def as_numbers(tensor: torch.Tensor) -> NDArray[Any]:
    """Converts a tensor to an array, which shares the memory if NumPy has the dtype.

    Other dtypes are cast to a dtype that NumPy has.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: NDArray[Any] = tensor.to(_NUMBERS.get(tensor.dtype, tensor.dtype)).numpy()
    return array


def take_rows(
    rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns ``rows.index_select(0, index)``, even for dtypes that torch cannot index.

    ``out`` is an optional tensor for the result.
    """
    assigned = _ASSIGNED.get(getattr(rows, "dtype", None))
    if assigned is None:
        if out is None:
            return rows.index_select(0, index)  # objects have this method, too
        return torch.index_select(rows, 0, index, out=out)
    selected = take_rows(rows.view(assigned), index, None if out is None else out.view(assigned))
    return selected.view(rows.dtype)


def put_rows(into: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Performs ``into[index] = rows``, even for dtypes that torch cannot assign by index."""
    assigned = _ASSIGNED.get(getattr(into, "dtype", None))  # None for objects
    if assigned is None:
        into[index] = rows
    else:
        into.view(assigned)[index] = rows.view(assigned)


def require_memory(tensor: torch.Tensor) -> None:
    """Raises TypeError if a tensor does not store all its numbers in readable memory."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise TypeError("a sparse, nested or meta tensor does not store its numbers contiguously")
    if not tensor.numel():
        return
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    try:
        held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # a subclass without storage
        held = 0
    if held < needed:
        raise TypeError(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory, because it is "
            "fake, functional, or its storage was freed"
        )


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor on the CPU without conjugate or negative flag.

    The tensor is copied only if necessary.

    Raises:
        TypeError: the tensor has no readable memory (`require_memory`).
    """
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    require_memory(plain)
    return plain


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in C order, as a view of its memory if possible."""
    flat = contiguous(tensor).reshape(-1)
    if flat.stride(0) != 1:  # a single number counts as contiguous whatever its stride is
        flat = flat.new_empty(flat.shape).copy_(flat)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # of typeshed's 3.11


class _Reads(threading.local):
    """Allocator for the results of this thread's reads.

    It is thread-local because each buffer can replace it for its own reads, for example with one
    for pinned memory.
    """

    empty_like: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.empty_like)


reads = _Reads()


def has_own_allocator() -> bool:
    """True if the results of this thread's reads come from an allocator other than torch's."""
    return reads.empty_like is not torch.empty_like


@contextmanager
def use_allocator(empty_like: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Sets the allocator that `Leaves.outputs` uses in this thread within a ``with`` block."""
    before, reads.empty_like = reads.empty_like, empty_like
    try:
        yield
    finally:
        reads.empty_like = before
