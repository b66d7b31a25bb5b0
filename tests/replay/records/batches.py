"""Reads batches of records back from the ring, joins them, and picks rows from them."""

from __future__ import annotations

import numpy as np

from shmbuffer.memory.mapped.record_batch import RecordBatch


def as_read(batch: RecordBatch) -> RecordBatch:
    """Converts a batch that was written into the form in which the ring returns its records."""
    batch = batch.consolidate()
    strides = (batch.sizes + 7) & ~7
    starts = np.cumsum(strides) - strides
    data = np.zeros(int(strides.sum()), np.uint8)
    for start, origin, size in zip(starts, batch.starts, batch.sizes, strict=True):
        data[start : start + size] = batch.data[origin : origin + size]
    return RecordBatch(data, starts, batch.sizes)


def joined(*batches: RecordBatch) -> RecordBatch:
    """Concatenates the records of several batches."""
    ends = np.cumsum([len(batch.data) for batch in batches])
    return RecordBatch(
        np.concatenate([batch.data for batch in batches]),
        np.concatenate(
            [batch.starts + end - len(batch.data) for batch, end in zip(batches, ends, strict=True)]
        ),
        np.concatenate([batch.sizes for batch in batches]),
    )


def picked(batch: RecordBatch, rows: list[int]) -> RecordBatch:
    """Returns some records of a batch, in this order."""
    return as_read(RecordBatch(batch.data, batch.starts[rows], batch.sizes[rows]))
