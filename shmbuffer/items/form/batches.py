"""Stacks a list of items to a batch, and splits a batch into items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shmbuffer.items.form.arrays import NO_ARRAY, is_array, is_plain, named
from shmbuffer.items.form.mismatch import Numbers, not_a_tensor


def stack(items: list[Any], mapping: str) -> Any:
    """Stacks one or more items of the same structure.

    If ``mapping`` is "tensordict", lists in dicts are stacked as arrays.
    """
    return Stacking(mapping == "tensordict").join(items)


def unbound(data: Any) -> list[Any]:
    """Splits a batch into a list of items. Raises ValueError if its entries differ in length."""
    if isinstance(data, list):
        return data
    shape: Sequence[int] = getattr(data, "shape", ())
    if isinstance(data, Mapping):
        if len(shape) and not data.keys():  # a NonTensorStack
            return data.tolist()  # type: ignore[attr-defined, no-any-return]
        return rows_of({key: unbound(value) for key, value in data.items()})
    if not len(shape):
        raise TypeError(
            "a batch of items of any size must be a list of items, or a dict of arrays with one "
            f"row for each item; got {type(data).__name__}. To write a single item, call add()"
        )
    if isinstance(data, np.ndarray):
        return plain_values(data) or [data[at, ...] for at in range(len(data))]
    return [data[at] for at in range(int(shape[0]))]


def plain_values(column: NDArray[Any]) -> list[Any] | None:
    """Returns the Python values of a one-dimensional array of str, bytes or objects.

    Returns None for any other array.
    """
    return column.tolist() if column.ndim == 1 and column.dtype.kind in "SUO" else None


def rows_of(columns: Mapping[Any, list[Any]]) -> list[dict[Any, Any]]:
    """Returns one dict per row of the columns. Raises ValueError if their lengths differ."""
    counts = {key: len(column) for key, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            "the entries of a batch must have one row for each item, but their lengths differ: "
            f"{counts}; a list of dicts is a list of items"
        )
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def one_of_each(items: Iterable[Any]) -> list[Any]:
    """Returns the first item of each run of items of the same type.

    This suffices for checks that depend only on the type.
    """
    return [next(run) for _, run in groupby(items, type)]


class Stacking:
    """Stacks items of one structure. With ``arrays``, lists in dicts are stacked as arrays."""

    instead = "use a buffer of records for items that differ"
    numbers = True  # plain numbers are converted to `Numbers`
    # Errors that are replaced by a message of this package.
    refused: tuple[type[Exception], ...] = NO_ARRAY
    named: Callable[[Any], tuple[object, Any]] = staticmethod(named)
    stacked: Callable[[list[Any]], Any] = staticmethod(np.stack)

    def __init__(self, arrays: bool) -> None:
        self._arrays = arrays

    def join(self, items: list[Any], where: str = "the item") -> Any:
        """Stacks items, or the values that all items have at the position ``where``."""
        first, kind = items[0], self.kind(items[0])
        if any(self.kind(one) is not kind for one in one_of_each(items)):
            at = next(at for at, item in enumerate(items) if self.kind(item) is not kind)
            return self.mixed(items, where, at)
        if kind is Mapping:
            for at, item in enumerate(items):
                if item.keys() != first.keys():
                    self.refuse(items, where, at)
            return {
                key: self._entry([item[key] for item in items], f"entry {key!r} of {where}")
                for key in first
            }
        if kind is not tuple:
            return self.leaves(items, where, kind)
        for at, item in enumerate(items):
            if type(item) is not type(first) or len(item) != len(first):
                self.refuse(items, where, at)
        parts = [
            self.join(list(values), f"part {at} of {where}")
            for at, values in enumerate(zip(*items, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    def _entry(self, values: list[Any], where: str) -> Any:
        if self._arrays and self.kind(values[0]) is tuple:
            return self.leaf(values, where)
        return self.join(values, where)

    def refuse(self, items: list[Any], where: str, at: int) -> NoReturn:
        """Raises RuntimeError, because the item at position ``at`` differs from the first one."""
        raise RuntimeError(
            f"all items of a batch must have the same form, but {where} is {self.form(items[at])} "
            f"at position {at} and {self.form(items[0])} at position 0; {self.instead}"
        )

    def form(self, item: Any) -> str:
        """Returns a short description of an item for error messages."""
        if isinstance(item, Mapping):
            return f"a dict with the keys {list(item)}"
        if isinstance(item, (tuple, list)):
            return f"a {type(item).__name__} of length {len(item)}"
        if isinstance(item, np.ndarray):
            return f"an array {item.dtype}{list(item.shape)}"
        return f"a {type(item).__name__}"

    # Methods that a subclass may override.

    def kind(self, item: Any) -> type:
        """Returns the class that determines how an item is stacked.

        The class is Mapping for mappings, tuple for lists and tuples, and another class for leaves.
        """
        if isinstance(item, Mapping):
            return Mapping
        return tuple if isinstance(item, (tuple, list)) else np.ndarray

    def mixed(self, items: list[Any], where: str, at: int) -> Any:
        """Stacks items for which `kind` returns several classes. The base class refuses them."""
        self.refuse(items, where, at)

    def leaves(self, items: list[Any], where: str, kind: type) -> Any:
        """Stacks items of one kind that are not mappings, lists or tuples."""
        for one in one_of_each(items):
            if not is_array(one):
                raise TypeError(not_a_tensor(one))
        return self.leaf(items, where)

    def leaf(self, items: list[Any], where: str) -> Any:
        """Stacks numbers or arrays of one dtype and shape. Plain numbers become `Numbers`."""
        if self.numbers and is_plain(items):
            return Numbers(items)
        parts = []
        for item in items:
            try:
                parts.append(self.named(item))
            except self.refused as error:
                raise TypeError(not_a_tensor(item, error)) from error
        arrays = [array for _, array in parts]
        for at, (name, array) in enumerate(parts):
            if array.shape != arrays[0].shape or name != parts[0][0]:
                self.refuse(arrays, where, at)
        return self.stacked(arrays)
