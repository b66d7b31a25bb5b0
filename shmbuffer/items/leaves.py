"""The leaves of a batch: checked against the schema, and where their bytes are.

Compiled once from the schema. A leaf that lies as it has to is written as it is; another one
becomes a contiguous array first; one of another name, dtype or shape is refused before any change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.arrays import NO_ARRAY, is_array, like, named
from shmbuffer.items.kept import Kept
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.items.mismatch import (
    A_BATCH,
    ONE_ITEM,
    not_a_tensor,
    refuse_form,
    refuse_leaf,
    refuse_list,
    refuse_number,
)
from shmbuffer.items.nodes import NESTED, FormDiffersError, Node
from shmbuffer.items.structure import Structure, paths_of
from shmbuffer.memory import Leaf, Schema
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath

Array = np.ndarray[Any, Any]

_KEPT_SIZES = 64  # batch sizes whose shapes are remembered


FormOf = Callable[[Any, KeyPath], tuple[str, Sequence[int]]]
"""Gives dtype and shape of a leaf of a first batch; TypeError where it is no tensor."""


class SchemaLeaves:
    """The leaves of one buffer, ready for use; what arrays and tensors have in common."""

    structure: ClassVar[Structure]
    form_of: FormOf
    like: Callable[[Any, str], tuple[str, Any]]  # dtype and tensor, see `arrays.like`
    private_remedy: ClassVar[str]  # what to do with data that a file cannot hold

    def __init__(
        self,
        node: Node,  # the form of the data
        leaves: tuple[Leaf, ...],  # of the schema, in the order of ``node.paths()``
        lanes: tuple[int, ...],  # sizes of the storage's dimensions after the first
        where: str = "this buffer",  # the buffer's name in messages
    ) -> None:
        self.node = node
        self.leaves = leaves
        self.lanes = lanes
        self.where = where
        self.optional = OWN_KEYS  # root keys that a batch may carry; they are not stored

    @classmethod
    def of_schema(cls, schema: Schema, where: str) -> Self:
        """Compile a schema, ours or another process's."""
        paths = [leaf.path for leaf in schema.leaves]
        node = cls.structure.of_schema(schema.structure, paths, where)
        return cls(node, schema.leaves, schema.lanes, where)

    @classmethod
    def of_data(
        cls,
        data: Any,  # a first batch; one item where ``single``
        *,
        ndim: int,  # dimensions of the storage
        single: bool = False,
        mapping: str = "dict",  # what a plain dict is: this, or ``"tensordict"``
        where: str = "this buffer",
        form: FormOf | None = None,  # None: as of the class
    ) -> Self:
        """Say what an item is; ValueError where leaves differ in their leading dimensions."""
        dims = ndim - 1 if single else ndim
        node = cls.structure.describe(data, dims, mapping=mapping)
        values: list[Any] = []
        node.collect(cls.structure.without(data, OWN_KEYS), values)
        if not values:
            raise ValueError("the data hold no tensor, so there is nothing to store")
        paths = paths_of(node)
        forms = list(map(form or cls.form_of, values, paths))
        lead = forms[0][1][:dims]
        for path, (_, shape) in zip(paths, forms, strict=True):
            if len(shape) < dims or shape[:dims] != lead:
                refuse_list(node, path)
                raise ValueError(
                    f"leaf {'.'.join(path)!r} has shape {list(shape)}, but the storage's "
                    f"{dims} leading dimensions are {list(lead)} in leaf {'.'.join(paths[0])!r}; "
                    f"every leaf begins with the same {dims} (batch{' and lanes' * (ndim > 1)}); "
                    f"{ONE_ITEM}"
                )
        leaves = tuple(
            Leaf(path, dtype, tuple(shape[dims:]))
            for path, (dtype, shape) in zip(paths, forms, strict=True)
        )
        return cls(node, leaves, tuple(lead if single else lead[1:]), where)

    def schema(self, capacity: int) -> Schema:
        """The schema of a storage of ``capacity`` slots of these."""
        if (reason := self.node.private()) is not None:
            raise TypeError(
                f"{self.where}: what is written {reason}, which processes cannot share; "
                f"{self.private_remedy}"
            )
        return Schema(self.leaves, capacity, self.lanes, self.node.to_json())

    def allow(self, keys: frozenset[str]) -> None:
        """Let root entries come along that are no leaves."""
        self.optional = OWN_KEYS | (keys - {leaf.path[0] for leaf in self.leaves})

    def refuse_form(self, data: Any, optional: Iterable[str] = ()) -> NoReturn:
        """Raise SchemaMismatchError for data of another form."""
        kind = self.node.kind
        there = self.structure.leaves_of(data, kind in NESTED)
        refuse_form(self.where, kind, self.leaves, optional, data, there)

    def _collect(self, data: Any) -> list[Any]:
        values: list[Any] = []
        try:
            self.node.collect(data, values)
        except FormDiffersError:
            values.clear()
            try:
                self.node.collect(self.structure.without(data, self.optional), values)
            except FormDiffersError:
                self.refuse_form(data, self.optional)
        return values

    def _converted(self, value: Any, leaf: Leaf, wanted: tuple[int, ...]) -> Any:
        """A leaf of this dtype and shape; SchemaMismatchError where it is another, or none."""
        if not (is_array(value) or isinstance(value, (list, tuple))):
            refuse_leaf(self.where, leaf, wanted, type(value).__name__)
        try:
            dtype, found = type(self).like(value, leaf.dtype)
        except NO_ARRAY as error:
            refuse_leaf(self.where, leaf, wanted, f"{type(value).__name__} ({error})")
        shape = found.shape
        if dtype != leaf.dtype or shape != wanted:
            in_batch = len(wanted) > len(self.lanes) + len(leaf.shape)
            rest_fits = len(shape) == len(wanted) and shape[1:] == wanted[1:]
            if in_batch and rest_fits and shape[0] != wanted[0]:
                refuse_number(self.where, leaf, wanted[0], shape[0])
            item, remedy = (*self.lanes, *leaf.shape), "convert it"
            if in_batch and tuple(shape) == item:
                remedy = ONE_ITEM
            elif not in_batch and any(
                (*shape[:dim], *shape[dim + 1 :]) == item for dim in range(len(self.lanes) + 1)
            ):
                remedy = A_BATCH
            refuse_leaf(self.where, leaf, wanted, f"{dtype}{list(shape)}", remedy)
        return found


class ArrayLeaves(SchemaLeaves):
    """The leaves of one buffer as arrays."""

    structure = Structure()
    like = staticmethod(like)
    private_remedy = "leave it out"

    def __init__(self, node: Node, leaves: tuple[Leaf, ...], *of: Any) -> None:
        super().__init__(node, leaves, *of)
        self.dtypes = tuple(DTYPES[leaf.dtype].array for leaf in leaves)
        self._shapes = Kept(self._shapes_of, _KEPT_SIZES)

    @classmethod
    def of_arrays(
        cls,
        data: Any,
        swapped: int,  # the dimension of the data that becomes the first one
        dtypes: Mapping[KeyPath, str],  # of leaves whose arrays hold the bits of another dtype
        **of: Any,
    ) -> Self:
        """`of_data`, of which some dtypes are known."""

        def form(value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
            return _form(_swapped(value, swapped) if swapped else value, path, dtypes.get(path))

        described = cls.of_data(data, form=form, **of)
        paths = [leaf.path for leaf in described.leaves]
        if unknown := sorted(dtypes.keys() - set(paths)):
            raise KeyError(
                f"dtypes: {'.'.join(unknown[0])!r} is no leaf of this write, which has "
                f"{['.'.join(path) for path in paths]}"
            )
        return described

    def match(
        self, data: Any, single: bool = False, swapped: int = 0
    ) -> tuple[list[int], list[Array], int]:
        """Check a batch: the addresses of its leaves, the arrays that own them, its slots."""
        values = self._collect(data)
        if swapped:
            values = [_swapped(value, swapped) for value in values]
        count = 1 if single else length_of(values)
        lead = self.lanes if single else (count, *self.lanes)
        arrays = [
            self._fit(value, leaf, dtype, (*lead, *leaf.shape))
            for value, leaf, dtype in zip(values, self.leaves, self.dtypes, strict=True)
        ]
        return list(map(address, arrays)), arrays, count

    def outputs(self, count: int) -> tuple[list[Array], tuple[int, ...]]:
        """Fresh arrays ``[count, *shape]`` for a read, and their addresses."""
        empty = np.empty
        arrays = [empty(shape, dtype) for shape, dtype in self._shapes[count]]
        return arrays, tuple(map(address, arrays))

    def build(self, arrays: list[Array], count: int) -> Any:
        """The data in their own form, from one array ``[count, *shape]`` a leaf."""
        return self.node.build(iter(arrays), (count,), None)

    def _fit(self, value: Any, leaf: Leaf, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A contiguous array of this form; SchemaMismatchError where it cannot be."""
        if (
            type(value) is np.ndarray
            and value.dtype is dtype
            and value.shape == shape
            and value.flags.c_contiguous
        ):
            return value
        return np.ascontiguousarray(self._converted(value, leaf, shape)).reshape(shape)

    def _shapes_of(self, count: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [
            ((count, *leaf.shape), dtype)
            for leaf, dtype in zip(self.leaves, self.dtypes, strict=True)
        ]


def _form(value: Any, path: KeyPath, asked: str | None) -> tuple[str, tuple[int, ...]]:
    """Name of the dtype, and shape, of a leaf of a first batch."""
    try:
        name, array = named(value)
    except NO_ARRAY as error:
        raise TypeError(not_a_tensor(value, error)) from error
    if name not in DTYPES:
        raise TypeError(not_a_tensor(value, TypeError(f"its dtype is {name}")))
    if asked is not None and asked != name:
        wanted = DTYPES[asked]
        if wanted.bits != name:
            bytes_of = asked if wanted.in_numpy else f"{wanted.bits}, its bytes"
            raise SchemaMismatchError(
                f"leaf {'.'.join(path)!r} is to be {asked}, and this write has {name}; give arrays "
                f"of {bytes_of}, or another dtype",
                leaf=".".join(path),
                expected=asked,
                found=name,
            )
        name = asked
    return name, array.shape


def _swapped(value: Any, dim: int) -> Any:
    """A leaf with the dimensions 0 and ``dim`` exchanged."""
    if isinstance(value, (list, tuple)) or not hasattr(value, "swapaxes"):
        value = named(value)[1]
    return value.swapaxes(0, dim)


def length_of(values: list[Any]) -> int:
    """The number of slots of a batch, from its first leaf."""
    first = values[0]
    try:
        return int(first.shape[0])
    except (AttributeError, IndexError):  # else no batch: the shape check finds the words
        if isinstance(first, (list, tuple)):
            return len(first)
    try:
        return len(named(first)[1])
    except NO_ARRAY:
        return 0
