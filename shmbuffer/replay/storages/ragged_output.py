"""Output of a storage for items that differ in shape: padded, or nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from shmbuffer.replay.records import ragged
from shmbuffer.replay.storages.record_codec import RawBatch

PadOutput = float | Literal["nested"] | Mapping[str, Any] | None
"""None; the number behind the end of what is shorter; ``"nested"``; or the arguments of
`ragged.pad` (``value``, ``mask_key``) or of `ragged.densify` (``keys``) by name."""

_PAD, _NEST = {"value", "mask_key"}, {"keys"}


class RaggedOutput:
    """Makes batches as ``pad_output`` says; TypeError where that is no `PadOutput`."""

    def __init__(self, asked: PadOutput) -> None:
        self._nested = False
        self._how: dict[str, Any] = {}
        if asked == "nested":
            self._nested = True
        elif isinstance(asked, (int, float)):
            self._how = {"value": asked}
        elif isinstance(asked, Mapping) and (asked.keys() <= _PAD or asked.keys() <= _NEST):
            self._nested = "keys" in asked
            self._how = dict(asked)
        else:
            raise TypeError(
                "pad_output is a number, 'nested', {'value': ..., 'mask_key': ...} or "
                f"{{'keys': [...]}}, got {asked!r}"
            )

    def __call__(self, items: Any) -> Any:
        """A batch of a list of TensorDicts, of a lazy stack of them, or of records."""
        if not isinstance(items, RawBatch):
            return (ragged.densify if self._nested else ragged.pad)(items, **self._how)
        make = ragged.nested if self._nested else ragged.padded
        return make(items.decoder, items.batch, **self._how)
