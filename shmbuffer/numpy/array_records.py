"""Reads and writes records for the NumPy client.

This module is imported only for buffers of records, because other buffers do not need zstandard.
"""

from __future__ import annotations

from typing import Any

from shmbuffer.items.form.kit import ARRAYS
from shmbuffer.items.record_rows import RecordRows
from shmbuffer.items.records.codec import RecordCodec
from shmbuffer.items.records.decoding.decoder import Decoder
from shmbuffer.items.records.encoder import Encoder
from shmbuffer.items.records.named import as_named
from shmbuffer.memory import Engine, RecordBatch, Ring
from shmbuffer.memory.mapped import recorded

_COMPRESSED = "CompressedListStorage"
_LEVEL = 3  # default compression level of zstd


class ClientRecords(RecordRows):
    """Reads and writes the records of a ring with the compression settings of the buffer."""

    def __init__(
        self,
        engine: Engine,
        ring: Ring,
        *,
        named: bool,  # True if items are dicts with named entries
    ) -> None:
        self._named = named
        storage_settings = recorded.read_storage_settings(engine.settings, engine.where)
        self._has_function = bool(storage_settings.get("own_functions"))
        compresses = storage_settings.get("kind") == _COMPRESSED and not self._has_function
        how = storage_settings if compresses else {}
        level = how.get("compression_level", _LEVEL) if compresses else None
        codec = RecordCodec(level, how.get("dictionary_bytes", 0))
        codec.encoder = Encoder(keys=how.get("compress"))
        codec.decoder = Decoder(codec.expand)
        super().__init__(ARRAYS, engine, ring, codec)

    def encode(self, items: list[Any], single: bool) -> RecordBatch:
        """Encodes items as records.

        Raises:
            TypeError: the buffer compresses its items with a ``compression_fn``.
        """
        if self._has_function:
            raise TypeError(
                f"{self.where}: its items are compressed with a compression_fn, which needs "
                "tensors; write with shmbuffer.attach(compression_fn=...)"
            )
        if self._named:
            items = list(map(as_named, items))
        return self.codec.encode(items[0] if single else items, single)
