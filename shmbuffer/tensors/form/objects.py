"""Columns of text and other Python objects in a tensor storage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection

from shmbuffer.tensors.form import cpu


class Objects:
    """Array of Python objects with the methods of a tensor that the storages use."""

    __slots__ = ("array",)

    is_cuda = False
    device = cpu.DEVICE

    def __init__(self, array: np.ndarray[Any, np.dtype[np.object_]]) -> None:
        self.array = array

    @classmethod
    def of(cls, values: Iterable[Any], shape: Iterable[int]) -> Objects:
        """Arranges values in an array of this shape in C order. Without values it contains None."""
        array = np.empty(tuple(shape), dtype=object)
        flat = array.reshape(-1)
        for at, value in enumerate(values):
            flat[at] = value  # one at a time, because numpy would convert a list
        return cls(array)

    @property
    def shape(self) -> torch.Size:
        """Shape of the array of objects."""
        return torch.Size(self.array.shape)

    def tolist(self) -> list[Any]:
        """Returns a flat list of the objects in C order.

        Unlike `torch.Tensor.tolist` it is not nested, because an object may itself be a list.
        """
        return list(self.array.reshape(-1))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Objects:
        return Objects(self.array[_index(index)])

    def __setitem__(self, index: Any, value: Objects) -> None:
        self.array[_index(index)] = value.array

    def index_select(self, dim: int, index: torch.Tensor) -> Objects:
        """Returns the objects at ``index`` in a new array."""
        return Objects(np.take(self.array, index.numpy(), axis=dim))

    def view(self, *shape: Any) -> Objects:
        """Returns the objects in an array of another shape."""
        return Objects(self.array.reshape(_sizes(shape)))

    reshape = view

    def expand(self, *shape: Any) -> Objects:
        """Repeats the objects along dimensions of size 1 and along new leading dimensions."""
        try:
            return Objects(np.broadcast_to(self.array, _sizes(shape)))
        except ValueError as error:
            raise RuntimeError(str(error)) from None  # the error that a tensor raises

    def transpose(self, one: int, other: int) -> Objects:
        """Exchanges two dimensions."""
        return Objects(self.array.swapaxes(one, other))

    def unsqueeze(self, dim: int) -> Objects:
        """Inserts a dimension of size 1."""
        return Objects(np.expand_dims(self.array, dim))

    def clone(self) -> Objects:
        """Returns a new array of the same objects."""
        return Objects(self.array.copy())

    def copy_(self, other: Objects) -> Objects:
        """Copies the objects from ``other``, which has the same shape, and returns self."""
        self.array[...] = other.array
        return self

    def to(self, device: Any) -> Objects:
        """Returns self, because objects have no device."""
        return self

    def as_subclass(self, cls: type) -> Objects:
        """Returns self, because objects have no tensor class."""
        return self


def objects_in(data: Any) -> Objects:
    """Returns the objects of a NonTensorData or NonTensorStack, one per element of its batch."""
    shape = data.batch_size
    if not isinstance(data, NonTensorStack):
        return Objects.of([data.data] * shape.numel(), shape)
    array = np.empty(tuple(shape), dtype=object)
    for at, part in enumerate(data.tensordicts):
        array[(slice(None),) * data.stack_dim + (at, ...)] = objects_in(part).array
    return Objects(array)


def as_objects(value: Any, shape: tuple[int, ...]) -> Objects:
    """Returns a value as `Objects` of this shape.

    A nested list supplies one object per element. Any other value is repeated.

    Raises:
        RuntimeError: a list has the wrong length.
    """
    if is_non_tensor(value):
        return objects_in(value).expand(*shape)
    if not isinstance(value, list) or not shape:
        return Objects.of([value], ()).expand(*shape)
    if len(value) != shape[0]:
        raise RuntimeError(f"{len(value)} objects cannot be assigned to {shape[0]} elements")
    parts = [as_objects(part, shape[1:]).array for part in value]
    return Objects(np.stack(parts)) if parts else Objects.of((), shape)


def non_tensor(objects: Objects) -> Any:
    """Converts objects to NonTensorData, or to a NonTensorStack if they have a dimension."""
    array = objects.array
    if not array.ndim:
        return NonTensorData(data=array[()])
    if not array.size:
        return NonTensorData(data=None, batch_size=array.shape)
    if array.ndim > 1:
        return NonTensorStack(*(non_tensor(Objects(part)) for part in array))
    return NonTensorStack(
        *(NonTensorData(data=one) if is_tensor_collection(one) else one for one in array)
    )


def _index(index: Any) -> tuple[Any, ...]:
    """Converts an index of a tensor to an index of a NumPy array.

    The ellipsis at its end makes NumPy return an array even for a single object.
    """
    parts = index if isinstance(index, tuple) else (index,)
    plain = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in parts)
    return plain if any(part is Ellipsis for part in plain) else (*plain, ...)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
