"""Items of a list as one batch, and the items of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from shmbuffer.numpy.arrays import NO_ARRAY, is_array, is_plain, named
from shmbuffer.numpy.mismatch import Numbers, not_a_tensor


def stack(items: list[Any], mapping: str) -> Any:
    """Items of one form as a batch of that form: every leaf gets a dimension in front.

    Args:
        items: at least one.
        mapping: what a plain dict is: of ``"tensordict"`` lists and tuples in it are arrays.
    """
    return _joined(items, "the item", mapping == "tensordict")


def unbound(data: Any) -> list[Any]:
    """The items of a batch.

    Raises:
        TypeError: it is no batch.
        ValueError: entries of a dict have more or fewer rows than the others.
    """
    if isinstance(data, list):
        return data
    if isinstance(data, Mapping):
        return rows_of({key: unbound(value) for key, value in data.items()})
    shape: Sequence[int] = getattr(data, "shape", ())
    if not len(shape):
        raise TypeError(
            "a batch of items of any size is a list of them, or a dict of arrays with a row for "
            f"each item; got {type(data).__name__}. add() takes one item"
        )
    if isinstance(data, np.ndarray):
        return [data[at, ...] for at in range(len(data))]
    return [data[at] for at in range(int(shape[0]))]


def rows_of(columns: Mapping[Any, list[Any]]) -> list[dict[Any, Any]]:
    """A dict of each row of these columns; ValueError where one is longer than another."""
    counts = {key: len(column) for key, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the entries of a batch have one row for each item, but these differ: {counts}; a "
            "list of dicts is a list of items"
        )
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _joined(items: list[Any], where: str, arrays: bool) -> Any:
    first, kind = items[0], _kind(items[0])
    for at, item in enumerate(items):
        if _kind(item) is not kind:
            _refuse(where, at, items)
    if kind is Mapping:
        for at, item in enumerate(items):
            if item.keys() != first.keys():
                _refuse(where, at, items)
        return {
            key: (_leaf if arrays and _kind(first[key]) is tuple else _joined)(
                [item[key] for item in items], f"entry {key!r} of {where}", arrays
            )
            for key in first
        }
    if kind is tuple:
        for at, item in enumerate(items):
            if type(item) is not type(first) or len(item) != len(first):
                _refuse(where, at, items)
        parts = [
            _joined(list(values), f"part {at} of {where}", arrays)
            for at, values in enumerate(zip(*items, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    for item in items:
        if not is_array(item):
            raise TypeError(not_a_tensor(item))
    return _leaf(items, where, arrays)


def _leaf(items: list[Any], where: str, arrays: bool) -> Any:
    if is_plain(items):
        return Numbers(items)
    parts = []
    for item in items:
        try:
            parts.append(named(item))
        except NO_ARRAY as error:
            raise TypeError(not_a_tensor(item, error)) from error
    for at, (name, array) in enumerate(parts):
        if array.shape != parts[0][1].shape or name != parts[0][0]:
            _refuse(where, at, [array for _, array in parts])
    return np.stack([array for _, array in parts])


def _kind(item: Any) -> type:
    """How items of this kind are joined."""
    if isinstance(item, Mapping):
        return Mapping
    return tuple if isinstance(item, (tuple, list)) else np.ndarray


def _form(item: Any) -> str:
    """What an item is, in few words."""
    if isinstance(item, Mapping):
        return f"a dict with the keys {list(item)}"
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)}"
    if isinstance(item, np.ndarray):
        return f"an array {item.dtype}{list(item.shape)}"
    return f"a {type(item).__name__}"


def _refuse(where: str, at: int, items: list[Any]) -> NoReturn:
    raise RuntimeError(
        f"a batch is a stack of items of one form, but {where} is {_form(items[at])} at position "
        f"{at} and {_form(items[0])} at position 0; use a buffer of records for items that differ"
    )
