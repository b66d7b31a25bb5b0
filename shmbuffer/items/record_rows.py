"""Reads and writes items of any size as records of a ring.

This module is imported only for buffers of records, because other buffers do not need zstandard.
"""

from __future__ import annotations

from typing import Any

from shmbuffer.items.form.kit import Kit
from shmbuffer.items.mover import Drawn, Mover
from shmbuffer.items.records.codec import RecordCodec
from shmbuffer.memory import Engine, RecordBatch, Ring
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.format.streams import GivenStreams, expand_streams


class RecordRows(Mover):
    """Writes and reads the records of a ring."""

    by_item = True

    def __init__(self, kit: Kit, engine: Engine, ring: Ring, codec: RecordCodec) -> None:
        assert ring.records is not None
        self.kit = kit
        self.ring = ring
        self.records = ring.records
        self.codec = codec
        self.where = engine.where
        codec.join(engine)

    def write(
        self, items: Any, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Appends one or more encoded items. Returns the first ticket and the number of items."""
        numbers = expand_streams(streams, len(items))
        return self.records.write(items, priorities, streams=numbers), len(items)

    def read(self, index: Any) -> tuple[RecordBatch, Any, int]:
        """Copies records.

        Returns the copies, the tickets (-1 if there is no item), and the number of missing items.
        """
        drawn = self.records.read(self.kit.as_numpy(index))
        missing = int((drawn.tickets < 0).sum())
        return drawn.batch, self.kit.from_numpy(drawn.tickets), missing

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws, copies and validates records. Draws uniformly if ``beta`` is None."""
        drawn = self.records.sample(count, key, beta=beta)
        as_own = self.kit.from_numpy
        weights = None if drawn.weights is None else as_own(drawn.weights)
        return drawn.batch, as_own(drawn.index), as_own(drawn.tickets), weights

    def build(self, found: RecordBatch, lead: tuple[int, ...]) -> Any:
        """Decodes records, and returns a list of items. ``lead`` is not used."""
        return self.codec.decoder.items(found)
