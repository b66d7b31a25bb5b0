"""Forms of items that may contain tensors and TensorDicts (`items.records.forms`)."""

from __future__ import annotations

import torch

from shmbuffer.items.records import forms
from shmbuffer.items.records.forms import STORABLE, RefusedError, Walk
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.tensors.form.tensor_containers import TAKES, take_of
from shmbuffer.tensors.form.tensors import contiguous, dtype_name

#: Names of the torch dtypes that can be stored.
NAMES = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_FLOATS = frozenset(dtype for dtype in NAMES if dtype.is_floating_point)
_INTEGERS = frozenset(dtype for dtype in NAMES if not dtype.is_complex) - _FLOATS


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous, detached plain tensor on the CPU, whose bytes can be stored.

    Raises:
        RefusedError: the tensor is nested or sparse, or its dtype cannot be stored.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in NAMES:
        nested = "nested " if tensor.is_nested else ""
        words = f"{nested}{dtype_name(tensor.dtype)} tensor ({tensor.layout})"
        raise RefusedError(f"is a {words}, which has no plain bytes: {STORABLE}")
    return contiguous(tensor.detach().as_subclass(torch.Tensor))


def _tensor(item: torch.Tensor, out: Walk) -> None:
    dtype = item.dtype
    try:
        # The bytes of a tensor with a negative flag are not its numbers. Such a tensor is a view of
        # a complex tensor, and therefore contiguous only if it has one element.
        has_plain_bytes = (
            item.is_contiguous()
            and item.is_cpu
            and (dtype in _INTEGERS or (dtype in _FLOATS and not item.is_neg()))
        )
        shape = item.shape
    except RuntimeError:  # nested, or a layout without strides
        has_plain_bytes = False
    if not has_plain_bytes:
        item = plain(item)
        shape = item.shape
    out.key.append(dtype)
    out.key.append(len(shape))
    out.dims.extend(shape)
    out.leaves.append(item)


def _subclass(item: torch.Tensor, out: Walk) -> None:
    """Adds a parameter, memory-mapped tensor or other subclass. It is decoded as a plain tensor."""
    _tensor(plain(item), out)


forms.know(
    {torch.Tensor: _tensor, **{kind: forms.containing(take) for kind, take in TAKES.items()}},
    {torch.Tensor: _subclass},
    take_of,
    tensors=NAMES,
)
