"""Output of a storage for items that differ in shape: padded, or nested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from shmbuffer.tensors.records.ragged import densify, pad

PadOutput = float | Literal["nested"] | Mapping[str, Any] | None
"""None; the number behind the end of what is shorter; ``"nested"``; or the arguments of
`pad` (``value``, ``mask_key``) or of `densify` (``keys``) by name."""

_PAD, _NEST = {"value", "mask_key"}, {"keys"}


def ragged_output(asked: object) -> Callable[[Any], Any] | None:
    """The function that makes such batches; TypeError if the argument is no `PadOutput`."""
    if asked is None:
        return None
    if asked == "nested":
        return densify
    if isinstance(asked, (int, float)):
        return partial(pad, value=asked)
    if isinstance(asked, Mapping) and (asked.keys() <= _PAD or asked.keys() <= _NEST):
        return partial(densify if "keys" in asked else pad, **asked)
    raise TypeError(
        "pad_output is a number, 'nested', {'value': ..., 'mask_key': ...} or "
        f"{{'keys': [...]}}, got {asked!r}"
    )
