"""Items of a list as one batch."""

from __future__ import annotations

from collections.abc import Mapping
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
