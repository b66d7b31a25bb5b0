"""Computes the expected content of a label index by examining every slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuffer import EmptyBufferError
from shmbuffer.samplers.labelled.index import LabelIndex

Listed = dict[int, list[int]]


def by_age(ring: Any) -> np.ndarray[Any, Any]:
    """Returns the elements that hold an item, beginning with the oldest slot."""
    held = np.flatnonzero(ring.live.holds())
    first = ring.head % ring.capacity
    held = held[np.argsort((held - first) % ring.capacity)]
    return (held[:, None] * ring.width + np.arange(ring.width)).ravel()


def expected(ring: Any, labels: np.ndarray[Any, Any]) -> Listed:
    """Returns the items of each label, oldest first, computed from the ring itself."""
    found: Listed = {}
    for element in by_age(ring).tolist():
        found.setdefault(int(labels[element]), []).append(element)
    return found


def listed(table: Any) -> Listed:
    """Returns the items of each label, oldest first, from an index table."""
    labels, counts = (np.frombuffer(each, np.int64) for each in table.order())
    assert (np.diff(labels) > 0).all()
    assert counts.sum() == table.items
    found = {}
    for at, label in enumerate(labels.tolist()):
        weights = np.zeros(len(labels))
        weights[at] = 1.0
        elements = np.empty(int(counts[at]) + 1, np.int64)
        count = table.list_freshest(weights.ctypes.data, len(elements), elements.ctypes.data)
        assert count == counts[at]
        found[label] = elements[:count][::-1].tolist()
    return found


def looked(index: LabelIndex, storage: Any) -> Listed | None:
    """Updates a label index and returns its items, or None if the storage is empty."""
    with index.lock:
        try:
            index.update(storage)
        except EmptyBufferError:
            return None
        return listed(index.table)
