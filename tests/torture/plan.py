"""The plan of a round of kills: size of the ring, processes, and kinds of items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shmbuffer.memory import Leaf, Schema, Settings

#: Largest size of a ring in bytes. The forks of a round copy none of them.
RING_BYTES = 8 * 2**20
BATCH_BYTES = 2**18


@dataclass(frozen=True)
class Plan:
    """Parameters of a round, drawn from a seed.

    Attributes:
        capacity: number of slots.
        item_bytes: size of the largest leaf of a row, or mean size of a record.
        batch: number of items in the largest write.
        record_bytes: size of the byte ring, or 0 if items are rows.
        writers, learners: number of processes with each role.
        alpha: priority exponent.
    """

    capacity: int
    item_bytes: int
    batch: int
    record_bytes: int
    writers: int
    learners: int
    alpha: float

    @classmethod
    def drawn(cls, rng: np.random.Generator, *, records: bool) -> Plan:
        """Draws 8 to 4096 slots, items of 8 bytes to 64 KiB, and batches up to half of the ring."""
        item_bytes = int(2 ** rng.uniform(3, 16))
        capacity = int(2 ** rng.uniform(3, np.log2(min(4096, RING_BYTES // item_bytes))))
        batch = max(1, min(capacity // 2, BATCH_BYTES // item_bytes))
        room = int(rng.uniform(batch + 1, 1.5 * capacity)) * (2 * item_bytes + 64)
        return cls(
            capacity,
            item_bytes,
            int(rng.integers(1, batch + 1)),
            room if records else 0,
            int(rng.integers(1, 5)),
            int(rng.integers(1, 3)),
            float(rng.choice((0.0, 0.5, 0.6, 1.0))),
        )

    @property
    def mean_words(self) -> int:
        """The mean number of words in a record's body."""
        return max(1, self.item_bytes // 8)

    @property
    def leaf_bytes(self) -> tuple[int, ...]:
        """The sizes of the leaves of a row."""
        return (16, self.item_bytes, 5)

    @property
    def settings(self) -> Settings:
        return Settings(self.capacity, alpha=self.alpha, eps=0.0, record_bytes=self.record_bytes)

    @property
    def schema(self) -> Schema:
        if self.record_bytes:
            record_bytes = self.settings.record_bytes
            return Schema((), self.capacity, (), {"kind": "records"}, record_bytes)
        names = (("key",), ("next", "obs"), ("done",))
        leaves = [
            Leaf(name, "uint8", (size,)) for name, size in zip(names, self.leaf_bytes, strict=True)
        ]
        return Schema(tuple(leaves), self.capacity)
