"""Checks that the data that a user saves with a buffer can be stored without pickle.

A save without pickle runs no code when it is loaded. A value that could only be pickled is rejected
before anything is written, and the message says where it is in the data.
"""

from __future__ import annotations

from typing import Any

import torch

from shmbuffer.items.form import labels
from shmbuffer.items.form.arrays import is_plain_array
from shmbuffer.saves.values import is_scalar
from shmbuffer.tensors.form.tensor_containers import take_of

_MOST_LEVELS = 128  # JSON is written and read recursively on the caller's stack
_MOST_BITS = 14_284  # 4,300 digits, which is Python's default limit for conversion to text


def require_plain(value: Any, place: str = "extra", around: tuple[int, ...] = ()) -> None:
    """Raises TypeError or ValueError if a value cannot be saved without pickle.

    Args:
        value: The value.
        place: The path of the value in the user's data, for messages.
        around: The `id` of each container that contains the value, outermost first.
    """
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if not plain or value.device.type == "meta":
            raise TypeError(
                f"{place} is a tensor of layout {value.layout} on {value.device}, which cannot be "
                "saved; convert it to a dense tensor. Nothing was written"
            )
        return
    if is_plain_array(value):
        return
    if isinstance(value, bytes) or is_scalar(value):
        _require_digits(value, place)
        return
    take = take_of(type(value))
    if take is None:
        raise TypeError(
            f"{place} is {value!r:.60} of type {type(value).__qualname__}, which could only be "
            "saved by pickle; leave it out, or save its state_dict(), or tensors, numbers, "
            "strings, and lists and dicts of them. Nothing was written"
        )
    if id(value) in around:
        raise TypeError(f"{place} contains itself; leave it out. Nothing was written")
    if len(around) == _MOST_LEVELS:
        raise ValueError(
            f"{place:.60}... is nested deeper than {_MOST_LEVELS} levels; leave it out, or save a "
            "flat list or dict. Nothing was written"
        )
    _, _, _, keys, parts = take(value)
    mapping = isinstance(keys, tuple)
    for at, part in enumerate(parts):
        key = keys[at] if isinstance(keys, tuple) else at
        for element in key if type(key) is tuple else (key,):
            _require_digits(element, f"a key of {place}")
        if mapping and not labels.is_json(key):
            raise TypeError(
                f"{place} has the key {key!r:.60} of type {type(key).__qualname__}; keys must be "
                "strings, numbers, None or tuples of them. Nothing was written"
            )
        require_plain(part, place if keys is None else f"{place}[{key!r}]", (*around, id(value)))


def _require_digits(value: Any, place: str) -> None:
    """Raises ValueError if a value is an int that is too large to be saved as text."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(
            f"{place} is an int of {value.bit_length():,} bits, but only ints of at most "
            f"{_MOST_BITS:,} bits can be saved; save the bytes of int.to_bytes(). Nothing was "
            "written"
        )
