"""Batches of records: read back from the ring, joined, and some of their rows."""

from __future__ import annotations

import numpy as np

from shmbuffer.memory.mapped.record_batch import RecordBatch


def as_read(batch: RecordBatch) -> RecordBatch:
    """A batch that was written, each record for itself, as the ring gives it back."""
    batch = batch.consolidate()
    strides = (batch.sizes + 7) & ~7
    starts = np.cumsum(strides) - strides
    data = np.zeros(int(strides.sum()), np.uint8)
    for start, origin, size in zip(starts, batch.starts, batch.sizes, strict=True):
        data[start : start + size] = batch.data[origin : origin + size]
    return RecordBatch(data, starts, batch.sizes)


def joined(*batches: RecordBatch) -> RecordBatch:
    """The records of several batches, one batch after the other."""
    ends = np.cumsum([len(batch.data) for batch in batches])
    return RecordBatch(
        np.concatenate([batch.data for batch in batches]),
        np.concatenate(
            [batch.starts + end - len(batch.data) for batch, end in zip(batches, ends, strict=True)]
        ),
        np.concatenate([batch.sizes for batch in batches]),
    )


def picked(batch: RecordBatch, rows: list[int]) -> RecordBatch:
    """Some records of a batch, in this order."""
    return as_read(RecordBatch(batch.data, batch.starts[rows], batch.sizes[rows]))
