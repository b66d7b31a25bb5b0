"""The kit for tensors and TensorDicts (`items.form.kit`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_non_tensor

from shmbuffer._native._core import address
from shmbuffer.items.form.arrays import NO_ARRAY
from shmbuffer.items.form.kit import Kit
from shmbuffer.items.form.leaves import OBJECT, Leaves, length_of
from shmbuffer.items.form.mismatch import not_a_tensor, refuse_leaf
from shmbuffer.items.kept import Kept
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu, tensor_structure
from shmbuffer.tensors.form.objects import Objects, objects_in
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.form.tensors import (
    as_tensor,
    contiguous,
    dtype_name,
    like,
    reads,
    template,
    torch_dtype,
)

_KEPT = 64  # number of cached templates
_TEMPLATES: Kept[tuple[str, int], torch.Tensor] = Kept(
    lambda form: template(torch_dtype(form[0]), form[1:]), _KEPT
)
# Errors for values without accessible memory, such as lists and sparse or fake tensors.
_NO_BYTES = (AttributeError, RuntimeError, TypeError, ValueError)


class TensorKit(Kit):
    """Kit for tensors of torch. It also accepts NumPy arrays."""

    structure = tensor_structure.STRUCTURE
    private_remedy = (
        "use a LazyStackStorage, or a LazyTensorStorage without shared_init (both are for one "
        "process), or leave it out"
    )
    device = cpu.DEVICE

    def form_of(self, value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
        """Returns the dtype name and shape of a value at ``path``.

        Raises:
            TypeError: the value cannot be converted to a tensor.
        """
        if is_non_tensor(value):
            return OBJECT, value.batch_size
        try:
            tensor = as_tensor(value)
        except NO_ARRAY as error:
            raise TypeError(not_a_tensor(value, error)) from error
        return dtype_name(tensor.dtype), tensor.shape

    def is_leaf(self, value: Any) -> bool:
        """True if a value is a leaf and not a container."""
        return super().is_leaf(value) and not is_collection(value)

    def like(self, value: Any, dtype: str) -> tuple[str, Any]:
        """Returns the dtype name of a value, and the value as a detached tensor."""
        name, tensor = like(value, dtype)
        return name, tensor.detach()

    def dtype(self, name: str) -> torch.dtype:
        """Returns the torch dtype with this name, or uint8 for objects."""
        return torch.uint8 if name == OBJECT else torch_dtype(name)

    def wanted(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the shape and dtypes that the C core accepts for a leaf.

        The last element of the tuple is True if the core must check the conjugate and negative
        flags of a tensor.
        """
        form, size, known = self.dtype(dtype), torch.Size(shape), DTYPES.get(dtype)
        array = known.array if known and known.in_numpy else None
        # torch stores the conjugate and the negative of a tensor as flags. Without flags, the bytes
        # are the numbers. Real tensors with a negative flag are views of complex tensors, so they
        # are contiguous only if they have one element.
        flags = form.is_complex or (form.is_floating_point and size.numel() == 1)
        return size, form, array, flags

    def addresses(self, values: list[Any], wanted: list[tuple[Any, ...]]) -> list[int]:
        """Returns the address of each value, or 0 if its bytes cannot be copied unchanged."""
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
        """Returns a contiguous tensor on the CPU without conjugate or negative flag."""
        return contiguous(array)

    def copied(self, array: Any) -> Any:
        """Returns a copy of a tensor."""
        return array.clone()

    def template(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a template for `outputs`: a tensor with the dtype and shape of new tensors."""
        return template(self.dtype(dtype), shape)

    def outputs(self, templates: Sequence[Any]) -> tuple[list[Any], Sequence[int]]:
        """Returns new tensors like the templates, and their addresses. Cost: 0.7 µs per tensor."""
        empty_like = reads.empty_like
        tensors = [empty_like(one) for one in templates]
        return tensors, [tensor.data_ptr() for tensor in tensors]

    def empty(self, dtype: str, count: int) -> torch.Tensor:
        """Returns a new tensor of ``count`` elements with arbitrary contents."""
        return torch.empty_like(_TEMPLATES[dtype, count])

    def from_numpy(self, array: NDArray[Any]) -> torch.Tensor:
        """Returns a tensor over the memory of an array."""
        return torch.from_numpy(array)

    def as_numpy(self, array: torch.Tensor) -> NDArray[Any]:
        """Returns an array over the memory of a tensor."""
        return array.numpy()


TENSORS = TensorKit()


def values_of(
    leaves: Leaves, data: Any, lead: torch.Size | None = None
) -> tuple[list[Any], torch.Size]:
    """Collects the leaves of ``data`` for a write with torch, and checks their shapes.

    Args:
        leaves: leaves of the storage.
        data: one item or a batch.
        lead: leading dimensions. None stands for one dimension with the length of the data.

    Returns:
        One tensor or `Objects` ``[*lead, *lanes, *shape]`` per leaf, and the leading dimensions.
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
    """Returns a column of zeros ``[slots, *lanes, *shape]`` for each leaf."""
    lead = (slots, *leaves.lanes)
    return [new_column(leaves, at, lead, device) for at in range(len(leaves.leaves))]


def new_column(leaves: Leaves, at: int, lead: tuple[int, ...], device: torch.device) -> Any:
    """Returns a column of zeros ``[*lead, *shape]`` for the leaf with number ``at``."""
    shape = (*lead, *leaves.leaves[at].shape)
    if at in leaves.objects:
        return Objects.of((), shape)
    with cpu.without_inference_mode():
        return torch.zeros(shape, dtype=leaves.dtypes[at], device=device)
