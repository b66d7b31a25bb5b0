"""The leaves of a batch: checked against the schema, and where their bytes are.

For every batch there is constant work a leaf: one look at dtype, shape and contiguity, and one
address. See `items.leaves`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import is_non_tensor

from shmbuffer.items.arrays import NO_ARRAY
from shmbuffer.items.kept import Kept
from shmbuffer.items.leaves import SchemaLeaves, length_of
from shmbuffer.items.mismatch import not_a_tensor, refuse_leaf
from shmbuffer.items.nodes import Node
from shmbuffer.memory import Leaf
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu, structure
from shmbuffer.tensors.form.nodes import TensorDictNode, is_collection
from shmbuffer.tensors.form.objects import OBJECT, Objects, objects_in
from shmbuffer.tensors.form.tensors import (
    as_tensor,
    contiguous,
    dtype_name,
    like,
    reads,
    template,
    torch_dtype,
)

_from_buffer: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer
_addressof = ctypes.addressof

_Wanted = list[tuple[int, torch.Size, torch.dtype, np.dtype[Any] | None, bool]]
_NO_BYTES = (AttributeError, RuntimeError, TypeError, ValueError)  # a list, strided, read-only
_SINGLE = -1  # key of the shapes of one item without a batch dimension
_KEPT_SHAPES = 64  # batch sizes whose shapes are remembered


def form_of(value: Any, path: KeyPath) -> tuple[str, torch.Size]:
    """Name of the dtype, and shape, of a leaf of a first batch."""
    if is_non_tensor(value):
        return OBJECT, value.batch_size
    try:
        tensor = as_tensor(value)
    except NO_ARRAY as error:
        raise TypeError(not_a_tensor(value, error)) from error
    return dtype_name(tensor.dtype), tensor.shape


class Leaves(SchemaLeaves):
    """The leaves of one buffer as tensors."""

    structure = structure.STRUCTURE
    form_of = staticmethod(form_of)
    like = staticmethod(like)
    private_remedy = (
        "use a LazyStackStorage, or a LazyTensorStorage without shared_init (both for one "
        "process), or leave it out"
    )

    def __init__(self, node: Node, leaves: tuple[Leaf, ...], *of: Any) -> None:
        super().__init__(node, leaves, *of)
        #: Leaves that are no tensors, by number; their dtype here means nothing.
        self.objects = frozenset(at for at, leaf in enumerate(leaves) if leaf.dtype == OBJECT)
        self.dtypes = tuple(
            torch.uint8 if leaf.dtype == OBJECT else torch_dtype(leaf.dtype) for leaf in leaves
        )
        self.device = cpu.DEVICE
        # Our own memory, once views of it have been given out: a batch that lies in there is copied
        # first.
        self.own_memory: tuple[int, int] = (0, 0)
        self.is_tensordict = type(node) is TensorDictNode
        # The data are TensorDicts ``[n]``: a sample's index and weights are entries of it as they
        # are.
        self.is_flat = type(node) is TensorDictNode and not node.batch and not self.lanes
        # NumPy's dtype of each leaf, where it has one.
        known = [DTYPES.get(leaf.dtype) for leaf in leaves]
        self.arrays = tuple(one.array if one and one.in_numpy else None for one in known)
        self._wanted = Kept(self._want, _KEPT_SHAPES)
        self._templates = Kept(self._templates_of, _KEPT_SHAPES)

    def columns(self, slots: int, device: torch.device) -> list[Any]:
        """New columns ``[slots, *lanes, *shape]`` for data that torch moves."""
        return [self.column(at, (slots, *self.lanes), device) for at in range(len(self.leaves))]

    def column(self, at: int, lead: tuple[int, ...], device: torch.device) -> Any:
        """One of them, ``[*lead, *shape]``."""
        shape = (*lead, *self.leaves[at].shape)
        if at in self.objects:
            return Objects.of((), shape)
        with cpu.lasting():
            return torch.zeros(shape, dtype=self.dtypes[at], device=device)

    def match(self, data: Any, single: bool = False) -> tuple[list[int], list[Any], int]:
        """Check a batch: the addresses of its leaves, the objects that own them, its slots.

        Cost: 0.25 µs a leaf where nothing has to be converted.
        """
        values = self._collect(data)
        count = _SINGLE if single else length_of(values)
        wanted = self._wanted[count]
        low, high = self.own_memory
        addresses = []
        for value, (at, shape, dtype, form, flags) in zip(values, wanted, strict=True):
            try:
                if type(value) is np.ndarray:
                    fits = value.dtype is form and value.shape == shape
                    address = _addressof(_from_buffer(value)) if fits else 0
                else:
                    fits = (
                        value.dtype is dtype
                        and value.shape == shape
                        and value.is_contiguous()
                        and value.is_cpu
                        and not (flags and (value.is_neg() or value.is_conj()))
                    )
                    address = value.data_ptr() if fits else 0
            except _NO_BYTES:
                address = 0
            if not address or low <= address < high:
                address = self._convert(values, at, shape)
            addresses.append(address)
        return addresses, values, 1 if single else count

    def outputs(self, lead: tuple[int, ...]) -> tuple[list[torch.Tensor], list[int]]:
        """Fresh tensors ``[*lead, *shape]`` for a read, and their addresses: 0.7 µs a leaf."""
        empty_like = reads.empty_like
        tensors = [empty_like(one) for one in self._templates[lead]]
        return tensors, [tensor.data_ptr() for tensor in tensors]

    def build(self, tensors: list[torch.Tensor], lead: tuple[int, ...]) -> Any:
        """The data in their own form, from one tensor ``[*lead, *shape]`` a leaf."""
        return self.node.build(iter(tensors), lead, self.device)

    def values(self, data: Any, lead: torch.Size | None = None) -> tuple[list[Any], torch.Size]:
        """Tensors or `Objects` ``[*lead, *lanes, *shape]`` for a write that torch does."""
        values = self._collect(data)
        if lead is None:
            lead = torch.Size((length_of(values),))
        for at, leaf in enumerate(self.leaves):
            shape = torch.Size((*lead, *self.lanes, *leaf.shape))
            if at in self.objects:
                values[at] = self._objects(values[at], leaf, shape)
            else:
                self._convert(values, at, shape, move=False)
        return values, lead

    def new_keys(self, data: Any) -> list[KeyPath]:
        """Leaves of ``data`` that the buffer has not, in order."""
        nested = isinstance(self.node, TensorDictNode)
        return sorted(
            structure.leaves_of(data, nested).keys() - {leaf.path for leaf in self.leaves}
        )

    def _objects(self, value: Any, leaf: Leaf, shape: torch.Size) -> Objects:
        """The objects of a leaf; SchemaMismatchError where they are others, or no objects."""
        if not is_non_tensor(value):
            refuse_leaf(self.where, leaf, shape, type(value).__name__)
        if value.batch_size != shape:
            refuse_leaf(self.where, leaf, shape, f"{OBJECT}{list(value.batch_size)}")
        return objects_in(value)

    def _want(self, count: int) -> _Wanted:
        """What each leaf of a batch of ``count`` is, and whether it may hide a flag."""
        lead = () if count == _SINGLE else (count,)
        wanted = []
        for at, leaf in enumerate(self.leaves):
            dtype = self.dtypes[at]
            shape = torch.Size((*lead, *self.lanes, *leaf.shape))
            # torch keeps "conjugate" and "negative" as a flag, and the bytes alone do not tell.
            # Negative are views of complex numbers, which are contiguous only where they hold one.
            flags = dtype.is_complex or (dtype.is_floating_point and shape.numel() == 1)
            wanted.append((at, shape, dtype, self.arrays[at], flags))
        return wanted

    def _templates_of(self, lead: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            template(dtype, (*lead, *leaf.shape))
            for dtype, leaf in zip(self.dtypes, self.leaves, strict=True)
        )

    def _convert(self, values: list[Any], at: int, shape: torch.Size, *, move: bool = True) -> int:
        """Make ``values[at]`` contiguous; its address, or SchemaMismatchError."""
        value, leaf = values[at], self.leaves[at]
        if is_collection(value):
            refuse_leaf(self.where, leaf, shape, type(value).__name__)
        tensor: torch.Tensor = self._converted(value, leaf, shape).detach()
        if move:
            tensor = contiguous(tensor)
            low, high = self.own_memory
            if low <= tensor.data_ptr() < high:
                tensor = tensor.clone()
        values[at] = tensor
        return tensor.data_ptr()
