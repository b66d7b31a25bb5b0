"""Builds padded or nested batches from items of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from shmbuffer.tensors.records.ragged import densify, pad

PadOutput = float | Literal["nested"] | Mapping[str, Any] | None
"""None, a number that pads shorter entries, ``"nested"``, or the keyword arguments of `pad`
(``value``, ``mask_key``) or `densify` (``keys``)."""

_PAD, _NEST = {"value", "mask_key"}, {"keys"}


def ragged_output(asked: object) -> Callable[[Any], Any] | None:
    """Returns the function that builds batches in the requested form, or None if it is None.

    Raises TypeError if ``asked`` is not a `PadOutput`.
    """
    if asked is None:
        return None
    if asked == "nested":
        return densify
    if isinstance(asked, (int, float)):
        return partial(pad, value=asked)
    if isinstance(asked, Mapping) and (asked.keys() <= _PAD or asked.keys() <= _NEST):
        return partial(densify if "keys" in asked else pad, **asked)
    raise TypeError(
        "pad_output must be a number, 'nested', {'value': ..., 'mask_key': ...} or {'keys': "
        f"[...]}}, got {asked!r}"
    )
