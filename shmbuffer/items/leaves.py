"""The leaves of a batch: checked against the schema, and where their bytes are.

Compiled once from the schema. A leaf that lies as it has to is written as it is; another one
becomes a contiguous array first; one of another name, dtype or shape is refused before any change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Self

from shmbuffer._native._core import address
from shmbuffer.items.arrays import NO_ARRAY, named
from shmbuffer.items.kept import Kept
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.items.kit import FormOf, Kit
from shmbuffer.items.mismatch import (
    A_BATCH,
    ONE_ITEM,
    refuse_form,
    refuse_leaf,
    refuse_list,
    refuse_number,
)
from shmbuffer.items.nodes import NESTED, FormDiffersError, Node
from shmbuffer.items.structure import paths_of
from shmbuffer.memory import Leaf, Schema
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath

OBJECT = "object"
"""In place of a dtype: the leaf holds Python objects. They stay in their process."""

_SINGLE = -1  # key of the shapes of one item without a batch dimension
_KEPT_SHAPES = 64  # batch sizes whose shapes are remembered


class Leaves:
    """The leaves of one buffer, arrays or tensors as their kit says, ready for use."""

    def __init__(
        self,
        kit: Kit,
        node: Node,  # the form of the data
        leaves: tuple[Leaf, ...],  # of the schema, in the order of ``node.paths()``
        lanes: tuple[int, ...] = (),  # sizes of the storage's dimensions after the first
        where: str = "this buffer",  # the buffer's name in messages
    ) -> None:
        self.kit = kit
        self.node = node
        self.leaves = leaves
        self.lanes = lanes
        self.where = where
        self.optional = OWN_KEYS  # root keys that a batch may carry; they are not stored
        self.device = kit.device
        #: Leaves that are no arrays, by number; their dtype here means nothing.
        self.objects = frozenset(at for at, leaf in enumerate(leaves) if leaf.dtype == OBJECT)
        self.dtypes = tuple(kit.dtype(leaf.dtype) for leaf in leaves)
        #: NumPy's dtype of each leaf; None if it has none.
        known = [DTYPES.get(leaf.dtype) for leaf in leaves]
        self.arrays = tuple(one.array if one and one.in_numpy else None for one in known)
        self.is_tensordict = node.kind == "tensordict"
        #: The data are TensorDicts ``[n]``: a sample's index and weights are entries of it as they
        #: are.
        self.is_flat = self.is_tensordict and not (node.batch or lanes)
        #: The ring's own memory, once views of it have been given out, from and to: a batch that
        #: lies in there is copied first.
        self.own_memory: tuple[int, int] = (0, 0)
        self._wanted = Kept(self._want, _KEPT_SHAPES)
        self._templates = Kept(self._templates_of, _KEPT_SHAPES)

    @classmethod
    def of_schema(cls, kit: Kit, schema: Schema, where: str) -> Self:
        """Compile a schema, ours or another process's."""
        paths = [leaf.path for leaf in schema.leaves]
        node = kit.structure.of_schema(schema.structure, paths, where)
        return cls(kit, node, schema.leaves, schema.lanes, where)

    @classmethod
    def of_data(
        cls,
        kit: Kit,
        data: Any,  # a first batch; one item where ``single``
        *,
        ndim: int,  # dimensions of the storage
        single: bool = False,
        mapping: str = "dict",  # what a plain dict is: this, or ``"tensordict"``
        where: str = "this buffer",
        form: FormOf | None = None,  # None: as of the kit
    ) -> Self:
        """Say what an item is; ValueError where leaves differ in their leading dimensions."""
        dims = ndim - 1 if single else ndim
        node = kit.structure.describe(data, dims, mapping=mapping)
        values: list[Any] = []
        node.collect(kit.structure.without(data, OWN_KEYS), values)
        if not values:
            raise ValueError("the data hold no tensor, so there is nothing to store")
        paths = paths_of(node)
        forms = list(map(form or kit.form_of, values, paths))
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
        return cls(kit, node, leaves, tuple(lead if single else lead[1:]), where)

    def schema(self, capacity: int) -> Schema:
        """The schema of a storage of ``capacity`` slots of these."""
        if (reason := self.node.private()) is not None:
            raise TypeError(
                f"{self.where}: what is written {reason}, which processes cannot share; "
                f"{self.kit.private_remedy}"
            )
        return Schema(self.leaves, capacity, self.lanes, self.node.to_json())

    def allow(self, keys: frozenset[str]) -> None:
        """Let root entries come along that are no leaves."""
        self.optional = OWN_KEYS | (keys - {leaf.path[0] for leaf in self.leaves})

    def refuse_form(self, data: Any, optional: Iterable[str] = ()) -> NoReturn:
        """Raise SchemaMismatchError for data of another form."""
        kind = self.node.kind
        there = self.kit.structure.leaves_of(data, kind in NESTED)
        refuse_form(self.where, kind, self.leaves, optional, data, there)

    def new_keys(self, data: Any) -> list[KeyPath]:
        """Leaves of ``data`` that the buffer has not, in order."""
        there = self.kit.structure.leaves_of(data, self.node.kind in NESTED)
        return sorted(there.keys() - {leaf.path for leaf in self.leaves})

    def match(
        self,
        data: Any,
        single: bool = False,
        swapped: int = 0,  # the dimension of the data that becomes the first one
    ) -> tuple[list[int], list[Any], int]:
        """Check a batch: the addresses of its leaves, the objects that own them, its slots.

        Cost: 0.25 µs a leaf where nothing has to be converted.
        """
        values = self.collect(data)
        if swapped:
            values = [swap(value, swapped) for value in values]
        count = _SINGLE if single else length_of(values)
        wanted = self._wanted[count]
        addresses = self.kit.addresses(values, wanted)
        low, high = self.own_memory
        if 0 in addresses or high:
            for at, found in enumerate(addresses):
                if not found or low <= found < high:
                    values[at] = self._moved(values[at], self.leaves[at], wanted[at][0])
                    addresses[at] = address(values[at])
        return addresses, values, 1 if single else count

    def outputs(self, lead: tuple[int, ...]) -> tuple[list[Any], Sequence[int]]:
        """New arrays ``[*lead, *shape]`` for a read, and their addresses."""
        return self.kit.outputs(self._templates[lead])

    def build(self, found: list[Any], lead: tuple[int, ...]) -> Any:
        """The data in their own form, from one array ``[*lead, *shape]`` a leaf."""
        return self.node.build(iter(found), lead, self.device)

    def collect(self, data: Any) -> list[Any]:
        """The leaves of data, in order; SchemaMismatchError for data of another form."""
        values: list[Any] = []
        try:
            self.node.collect(data, values)
        except FormDiffersError:
            values.clear()
            try:
                self.node.collect(self.kit.structure.without(data, self.optional), values)
            except FormDiffersError:
                self.refuse_form(data, self.optional)
        return values

    def converted(self, value: Any, leaf: Leaf, wanted: tuple[int, ...]) -> Any:
        """A leaf of this dtype and shape; SchemaMismatchError where it is another, or none."""
        if not self.kit.is_leaf(value):
            refuse_leaf(self.where, leaf, wanted, type(value).__name__)
        try:
            dtype, found = self.kit.like(value, leaf.dtype)
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

    def _moved(self, value: Any, leaf: Leaf, shape: tuple[int, ...]) -> Any:
        """A contiguous array of this form, outside the ring's memory."""
        array = self.kit.contiguous(self.converted(value, leaf, shape))
        low, high = self.own_memory
        return self.kit.copied(array) if low <= address(array) < high else array

    def _want(self, count: int) -> list[tuple[Any, ...]]:
        """The form of each leaf in a batch of ``count`` items."""
        lead = () if count == _SINGLE else (count,)
        return [
            self.kit.wanted(leaf.dtype, (*lead, *self.lanes, *leaf.shape)) for leaf in self.leaves
        ]

    def _templates_of(self, lead: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self.kit.template(leaf.dtype, (*lead, *leaf.shape)) for leaf in self.leaves)


def swap(value: Any, dim: int) -> Any:
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
