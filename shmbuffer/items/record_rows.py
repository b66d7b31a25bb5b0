"""Items of any size: as records into the ring, and out of it.

Loaded where a buffer has records only: zstandard is not needed for any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer.items.mover import Drawn, Mover
from shmbuffer.items.records.codec import RecordCodec
from shmbuffer.items.records.decoder import Decoder
from shmbuffer.items.records.encoder import Encoder
from shmbuffer.items.records.named import as_named
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format import recorded
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.streams import GivenStreams, of_each

_COMPRESSED = "CompressedListStorage"
_LEVEL = 3  # of zstd, where none was recorded


class RecordRows(Mover):
    """The records of a ring; where ``named``, items are dicts whose entries have names."""

    by_item = True

    def __init__(self, engine: Engine, ring: Ring, *, named: bool) -> None:
        super().__init__(ring)
        assert ring.records is not None
        self._records = ring.records
        self._named = named
        self._where = engine.where
        told = recorded.of_storage(engine.settings, engine.where)
        self._has_function = bool(told.get("own_functions"))
        compresses = told.get("kind") == _COMPRESSED and not self._has_function
        how = told if compresses else {}
        level = how.get("compression_level", _LEVEL) if compresses else None
        self._codec = RecordCodec(level, how.get("dictionary_bytes", 0))
        self._codec.encoder = Encoder(keys=how.get("compress"))
        self._codec.decoder = Decoder(self._codec.expand)
        self._codec.join(engine)

    def write(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams
    ) -> tuple[int, int]:
        """See `Mover.write`."""
        if self._has_function:
            raise TypeError(
                f"{self._where}: what is written here is compressed by a compression_fn, which is "
                "called with tensors; write with shmbuffer.attach(compression_fn=...)"
            )
        items = [data] if single else data
        its = of_each(streams, len(items))
        if self._named:
            items = list(map(as_named, items))
        batch = self._codec.encode(items[0] if single else items, single)
        return self._records.write(batch, priorities, streams=its), len(items)

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Mover.sample`."""
        found = self._records.sample(count, key, beta=beta)
        items = self._codec.decoder.items(found.batch)
        return Drawn(items, found.index, found.tickets, found.weights, items)

    def read(self, index: Ints, tickets: Ints) -> list[Any] | None:
        """See `Mover.read`."""
        found = self._records.read(index)
        if not np.array_equal(found.tickets, tickets):
            return None
        return self._codec.decoder.items(found.batch)
