"""Converts numbers, lists, and objects with ``__array__`` or DLPack to arrays.

NumPy lacks some of torch's dtypes, such as bfloat16. For these, arrays contain the bits as unsigned
integers of the same size (`DType.array`). ml_dtypes, JAX and torch can convert them with ``view``.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.format.dtypes import DTYPES

_core.register_arrays(*(np.zeros((2, 3), dtype) for dtype in (np.float32, np.float64, np.int64)))

NO_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError, BufferError)
"""Errors that `named` raises for a value that cannot be converted to an array."""

PLAIN_KINDS = "biufcSUmM"
"""Kind codes of the NumPy dtypes for numbers, bytes, text and times.

The value of such an array consists of its bytes alone.
"""

_PLAIN = (bool, int, float, complex, np.generic)
_PYTHONS = frozenset((bool, int, float, complex))
_RANKS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
_SHORTER = {"float64": np.float32, "complex128": np.complex64}
"""The dtypes that NumPy gives to Python numbers, and the shorter ones that torch gives them."""


def is_plain_array(value: Any) -> bool:
    """True for an unmasked NumPy array or scalar of numbers, text, bytes or times."""
    return (
        isinstance(value, (np.ndarray, np.generic))
        and value.dtype.kind in PLAIN_KINDS
        and not isinstance(value, np.ma.MaskedArray)
    )


def is_array(value: Any) -> bool:
    """True for an array, a number, or an object with ``__array__`` or ``__dlpack__``."""
    kind = type(value)
    return (
        isinstance(value, (np.ndarray, *_PLAIN))
        or hasattr(kind, "__array__")
        or hasattr(kind, "__dlpack__")
    )


def is_plain(value: Any) -> bool:
    """True for a number, or for a nested list or tuple of numbers."""
    if isinstance(value, (list, tuple)):
        return _PYTHONS.issuperset(map(type, value)) or all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def _is_double(value: Any) -> bool:
    """True if a plain value contains a float64 or complex128 number of NumPy.

    Like torch, `named` does not shorten these.
    """
    if isinstance(value, (list, tuple)):
        return not _PYTHONS.issuperset(map(type, value)) and any(map(_is_double, value))
    return isinstance(value, (np.float64, np.complex128))


def named(value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """Converts a value to an array. Returns the dtype name and the array.

    The array shares the memory of the value if possible.
    """
    if type(value) is not np.ndarray:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return _of_torch(value, torch)
        if isinstance(value, (list, tuple)) and not is_plain(value):
            parts = [named(part) for part in value]
            if len(names := sorted({name for name, _ in parts})) > 1:
                raise TypeError(f"a list of {' and '.join(names)} cannot be converted to an array")
            return names[0], np.stack([array for _, array in parts])
        if hasattr(type(value), "__array__") or not hasattr(type(value), "__dlpack__"):
            array = np.asarray(value)
        else:
            array = np.from_dlpack(value)
        if not _is_double(value) and is_plain(value):
            with np.errstate(over="ignore"):
                array = array.astype(_SHORTER.get(array.dtype.name, array.dtype), copy=False)
        value = array
    name = value.dtype.name
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    found = DTYPES.get(name)
    return name, value if found is None or found.in_numpy else value.view(found.array)


def like(value: Any, dtype: str) -> tuple[str, np.ndarray[Any, Any]]:
    """Converts a value like `named`, and casts plain numbers to ``dtype`` if possible.

    Integers can be cast to any float dtype. A float can be cast to a smaller dtype if the result is
    finite. If NumPy lacks the dtype, the array contains the bits as unsigned integers.
    """
    wanted = DTYPES[dtype].array
    limits = _limits(dtype).get(type(value))
    if limits is not None and limits[0] <= value <= limits[1]:
        return dtype, np.array(value, wanted)
    name, array = named(value)
    if not DTYPES[dtype].in_numpy:
        bits = array.dtype == wanted and name == wanted.name and not is_plain(value)
        return dtype if bits else name, array
    if not is_plain(value):
        return name, array
    exact = np.asarray(value)
    if not _RANKS.get(exact.dtype.kind, 9) <= _RANKS[wanted.kind] or (
        wanted.kind == "b" and exact.dtype.kind != "b"
    ):
        return name, array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = exact.astype(wanted)
    if wanted.kind in "fc":
        is_exact = np.isfinite(cast) | ~np.isfinite(exact.astype(np.complex128))
    else:
        is_exact = cast == exact
    if is_exact.all():
        return dtype, cast
    return (name, array) if name != dtype else (exact.dtype.name, exact)


@cache
def _limits(dtype: str) -> dict[type, tuple[Any, Any]]:
    """Returns the range of numbers that a dtype can represent, for each Python class of numbers."""
    kind = DTYPES[dtype].array.kind
    if not DTYPES[dtype].in_numpy or kind == "c":
        return {}
    if kind == "b":
        return {bool: (False, True)}
    if kind == "f":
        most = float(np.finfo(dtype).max)
        return {bool: (False, True), int: (-int(most), int(most)), float: (-most, most)}
    bounds = np.iinfo(dtype)
    return {bool: (False, True), int: (int(bounds.min), int(bounds.max))}


def _of_torch(tensor: Any, torch: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """Converts a tensor to an array. ``torch`` is the torch module, which is already imported."""
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    found = DTYPES.get(name)
    if found is not None and not found.in_numpy:
        tensor = tensor.contiguous()
        rows = tensor.reshape(-1).view(torch.uint8).numpy()
        return name, rows.view(found.array).reshape(tuple(tensor.shape))
    return name, tensor.numpy()
