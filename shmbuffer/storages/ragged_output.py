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


def ragged_output(requested: object) -> Callable[[Any], Any] | None:
    """Returns the function that builds batches in the requested form.

    Returns None if ``requested`` is None. Raises TypeError if it is not a `PadOutput`.
    """
    if requested is None:
        return None
    if requested == "nested":
        return densify
    if isinstance(requested, (int, float)):
        return partial(pad, value=requested)
    if isinstance(requested, Mapping) and (requested.keys() <= _PAD or requested.keys() <= _NEST):
        return partial(densify if "keys" in requested else pad, **requested)
    raise TypeError(
        "pad_output must be a number, 'nested', {'value': ..., 'mask_key': ...} or {'keys': "
        f"[...]}}, got {requested!r}"
    )
