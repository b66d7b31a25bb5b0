"""Converts dicts of arrays to items with named entries, as a client with TensorDicts stores them.

{"obs": array, "text": "..."}  ──▶  a TensorDict of a tensor and of NonTensorData
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from shmbuffer.items.form.arrays import NO_ARRAY, is_array
from shmbuffer.items.form.arrays import named as named_array
from shmbuffer.items.form.mismatch import no_names
from shmbuffer.items.form.nodes import named_entries
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.items.records import forms
from shmbuffer.items.records.containers import Taken
from shmbuffer.memory.format.dtypes import DTYPES


class _Taken(NamedTuple):
    """The result of splitting a container into its entries."""

    taken: Taken


class _Numbers(NamedTuple):
    """An array that is stored as a tensor, with the name of its dtype."""

    dtype: str
    array: np.ndarray[Any, Any]


def as_named(item: Any) -> Any:
    """Converts an item so that `forms.describe` describes its dicts as TensorDicts.

    Raises:
        TypeError: the item is a list or tuple, or a key is not a string.
    """
    if isinstance(item, (tuple, list)):
        raise TypeError(no_names(item))
    if not isinstance(item, Mapping):
        return item
    return _fields({key: value for key, value in item.items() if key not in OWN_KEYS})


def _fields(entries: Mapping[Any, Any]) -> _Taken:
    named = named_entries(entries)
    parts = [_fields(one) if isinstance(one, Mapping) else _entry(one) for one in named.values()]
    return _Taken(("tensordict", (), (None, None), tuple(named), parts))


def _entry(value: Any) -> _Numbers | _Taken:
    if isinstance(value, (list, tuple)) or is_array(value):
        try:
            name, array = named_array(value)
        except NO_ARRAY:  # for example, a list of strings and numbers
            name = ""
        if name in DTYPES:
            return _Numbers(name, array)
    if type(value) is list:
        return _Taken(("objects", (), (0,), len(value), list(map(_object, value))))
    return _object(value)


def _object(value: Any) -> _Taken:
    return _Taken(("object", (), (), None, (value,)))


def _token(dtype: str) -> str:
    """Returns the token for tensors of a dtype in a `Kind.key`, which differs from other tokens."""
    return f"tensor of {dtype}"


def _numbers(item: _Numbers, out: forms.Walk) -> None:
    array = item.array
    out.key += (_token(item.dtype), array.ndim)
    out.dims.extend(array.shape)
    out.leaves.append(np.ascontiguousarray(array).reshape(array.shape).view(np.ndarray))


forms.know(
    {_Numbers: _numbers, _Taken: forms.containing(attrgetter("taken"))},
    tensors={_token(dtype): dtype for dtype in DTYPES},
)
