"""Items with named entries, as a client with TensorDicts stores them: made of dicts of arrays.

{"obs": array, "text": "..."}  ──▶  a TensorDict of a tensor and of NonTensorData
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shmbuffer.memory.leaf import ITEMSIZES
from shmbuffer.numpy.arrays import DTYPES, NO_ARRAY, is_array
from shmbuffer.numpy.arrays import named as named_array
from shmbuffer.numpy.keys import OWN_KEYS
from shmbuffer.numpy.mismatch import no_names
from shmbuffer.numpy.nodes import nest
from shmbuffer.numpy.records import forms
from shmbuffer.numpy.records.containers import Taken


class _Fields:
    """What a TensorDict holds."""

    __slots__ = ("entries",)

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries


class _Numbers(NamedTuple):
    """What becomes a tensor."""

    dtype: str
    array: np.ndarray[Any, Any]


class _Object(NamedTuple):
    """What becomes NonTensorData."""

    value: Any


class _Objects(NamedTuple):
    """What becomes a NonTensorStack."""

    values: list[Any]


def as_named(item: Any) -> Any:
    """An item, as `forms.describe` takes it: its dicts are TensorDicts.

    Raises:
        TypeError: it has no names, or a key is no text.
    """
    if isinstance(item, (tuple, list)):
        raise TypeError(no_names(item))
    if not isinstance(item, Mapping):
        return item
    return _fields({key: value for key, value in item.items() if key not in OWN_KEYS})


def _fields(entries: Mapping[Any, Any]) -> _Fields:
    found = {}
    for key, value in nest(entries).items():
        if not isinstance(key, str):
            raise TypeError(
                f"the key {key!r} in the data is no text, and a TensorDict has no other keys; "
                "rename it, or use a ReplayBuffer, which keeps a dict as it is"
            )
        found[key] = _fields(value) if isinstance(value, Mapping) else _entry(value)
    return _Fields(found)


def _entry(value: Any) -> _Numbers | _Object | _Objects:
    if isinstance(value, (list, tuple)) or is_array(value):
        try:
            name, array = named_array(value)
        except NO_ARRAY:  # a list of text and numbers, for instance
            name = ""
        if name in DTYPES:
            return _Numbers(name, array)
    return _Objects(value) if type(value) is list else _Object(value)


def _take_fields(item: _Fields) -> Taken:
    return "tensordict", (), (None, None), tuple(item.entries), item.entries.values()


def _take_object(item: _Object) -> Taken:
    return "object", (), (), None, (item.value,)


def _take_objects(item: _Objects) -> Taken:
    return "objects", (), (0,), len(item.values), list(map(_Object, item.values))


def _token(dtype: str) -> str:
    """What stands for a dtype in a key: no other token is like it."""
    return f"tensor of {dtype}"


def _numbers(item: _Numbers, out: forms.Walk) -> None:
    array = item.array
    out.key += (_token(item.dtype), array.ndim)
    out.dims.extend(array.shape)
    out.leaves.append(np.ascontiguousarray(array).reshape(array.shape).view(np.ndarray))


forms.know(
    {
        _Numbers: _numbers,
        _Fields: forms.containing(_take_fields),
        _Object: forms.containing(_take_object),
        _Objects: forms.containing(_take_objects),
    },
    tensors={_token(dtype): dtype for dtype in ITEMSIZES},
)
