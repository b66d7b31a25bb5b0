"""The kit of tensors and TensorDicts; see `items.kit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_non_tensor

from shmbuffer._native._core import address
from shmbuffer.items.arrays import NO_ARRAY
from shmbuffer.items.kept import Kept
from shmbuffer.items.kit import Kit
from shmbuffer.items.leaves import OBJECT, Leaves, length_of
from shmbuffer.items.mismatch import not_a_tensor, refuse_leaf
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu, structure
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.tensors.form.objects import Objects, objects_in
from shmbuffer.tensors.form.tensors import (
    as_tensor,
    contiguous,
    dtype_name,
    like,
    reads,
    template,
    torch_dtype,
)

_KEPT = 64  # templates that are remembered
_TEMPLATES: Kept[tuple[str, int], torch.Tensor] = Kept(
    lambda form: template(torch_dtype(form[0]), form[1:]), _KEPT
)
_NO_BYTES = (AttributeError, RuntimeError, TypeError, ValueError)  # a list, sparse, fake


class TensorKit(Kit):
    """Tensors of torch; arrays are taken as they are, too."""

    structure = structure.STRUCTURE
    private_remedy = (
        "use a LazyStackStorage, or a LazyTensorStorage without shared_init (both for one "
        "process), or leave it out"
    )
    device = cpu.DEVICE

    def form_of(self, value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
        """See `Kit.form_of`."""
        if is_non_tensor(value):
            return OBJECT, value.batch_size
        try:
            tensor = as_tensor(value)
        except NO_ARRAY as error:
            raise TypeError(not_a_tensor(value, error)) from error
        return dtype_name(tensor.dtype), tensor.shape

    def is_leaf(self, value: Any) -> bool:
        """See `Kit.is_leaf`."""
        return super().is_leaf(value) and not is_collection(value)

    def like(self, value: Any, dtype: str) -> tuple[str, Any]:
        """See `Kit.like`; without a gradient."""
        name, tensor = like(value, dtype)
        return name, tensor.detach()

    def dtype(self, name: str) -> torch.dtype:
        """See `Kit.dtype`."""
        return torch.uint8 if name == OBJECT else torch_dtype(name)

    def wanted(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """See `Kit.wanted`; and whether a tensor may hide a flag."""
        form, size, known = self.dtype(dtype), torch.Size(shape), DTYPES.get(dtype)
        array = known.array if known and known.in_numpy else None
        # torch keeps "conjugate" and "negative" as a flag, and the bytes alone do not tell.
        # Negative are views of complex numbers, which are contiguous only where they hold one.
        flags = form.is_complex or (form.is_floating_point and size.numel() == 1)
        return size, form, array, flags

    def addresses(self, values: list[Any], wanted: list[tuple[Any, ...]]) -> list[int]:
        """See `Kit.addresses`."""
        found = []
        for value, (shape, dtype, form, flags) in zip(values, wanted, strict=True):
            try:
                if type(value) is np.ndarray:
                    fits = value.dtype is form and value.shape == shape and value.flags.c_contiguous
                    found.append(address(value) if fits else 0)
                    continue
                fits = (
                    value.dtype is dtype
                    and value.shape == shape
                    and value.is_contiguous()
                    and value.is_cpu
                    and not (flags and (value.is_neg() or value.is_conj()))
                )
                found.append(value.data_ptr() if fits else 0)
            except _NO_BYTES:
                found.append(0)
        return found

    def contiguous(self, array: Any) -> Any:
        """See `Kit.contiguous`; on the CPU, without flags."""
        return contiguous(array)

    def copied(self, array: Any) -> Any:
        """See `Kit.copied`."""
        return array.clone()

    def template(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `Kit.template`."""
        return template(self.dtype(dtype), shape)

    def outputs(self, templates: Sequence[Any]) -> tuple[list[Any], Sequence[int]]:
        """See `Kit.outputs`. Cost: 0.7 µs a tensor."""
        empty_like = reads.empty_like
        tensors = [empty_like(one) for one in templates]
        return tensors, [tensor.data_ptr() for tensor in tensors]

    def empty(self, dtype: str, count: int) -> torch.Tensor:
        """See `Kit.empty`."""
        return torch.empty_like(_TEMPLATES[dtype, count])

    def from_numpy(self, array: NDArray[Any]) -> torch.Tensor:
        """See `Kit.from_numpy`."""
        return torch.from_numpy(array)

    def as_numpy(self, array: torch.Tensor) -> NDArray[Any]:
        """See `Kit.as_numpy`."""
        return array.numpy()


TENSORS = TensorKit()


def values_of(
    leaves: Leaves, data: Any, lead: torch.Size | None = None
) -> tuple[list[Any], torch.Size]:
    """Tensors or `Objects` ``[*lead, *lanes, *shape]`` for a write that torch does.

    ``lead`` None: one dimension, of the data's length.
    """
    values = leaves.collect(data)
    if lead is None:
        lead = torch.Size((length_of(values),))
    for at, leaf in enumerate(leaves.leaves):
        shape = torch.Size((*lead, *leaves.lanes, *leaf.shape))
        if at not in leaves.objects:
            values[at] = leaves.converted(values[at], leaf, shape)
            continue
        value = values[at]
        if not is_non_tensor(value):
            refuse_leaf(leaves.where, leaf, shape, type(value).__name__)
        if value.batch_size != shape:
            refuse_leaf(leaves.where, leaf, shape, f"{OBJECT}{list(value.batch_size)}")
        values[at] = objects_in(value)
    return values, lead


def new_columns(leaves: Leaves, slots: int, device: torch.device) -> list[Any]:
    """New columns of zeros ``[slots, *lanes, *shape]`` for data that torch moves."""
    lead = (slots, *leaves.lanes)
    return [new_column(leaves, at, lead, device) for at in range(len(leaves.leaves))]


def new_column(leaves: Leaves, at: int, lead: tuple[int, ...], device: torch.device) -> Any:
    """A new column of zeros ``[*lead, *shape]`` for one leaf."""
    shape = (*lead, *leaves.leaves[at].shape)
    if at in leaves.objects:
        return Objects.of((), shape)
    with cpu.lasting():
        return torch.zeros(shape, dtype=leaves.dtypes[at], device=device)
