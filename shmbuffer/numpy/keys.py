"""The keys that a sample adds to the data, in one place.

They are the sample's own: a batch that carries them (one that was sampled and is written again) is
stored without them.
"""

from __future__ import annotations

INDEX = "index"
"""Element index of each row: int64 ``[n]``, or ``[n, ndim]`` where the storage has ``ndim > 1``."""

GENERATION = "index_generation"
"""Ticket of the write that put each row there: int64 ``[n]``. On a shared buffer, or where
generations are tracked."""

LEASE = "index_lease"
"""Number of the lease that each row is held under, of a sample with ``lease=``: int64 ``[n]``."""

ANCHOR_GENERATION = "anchor_generation"
"""The same of the item that each row's window was drawn for."""

WEIGHT = "_weight"
"""Importance weight of each row, ``(p / p_min) ** -beta``: the name up to TorchRL 0.10."""

PRIORITY_WEIGHT = "priority_weight"
"""The same tensor under the name of TorchRL 0.11 and later, which its losses read."""

WEIGHT_KEYS = (WEIGHT, PRIORITY_WEIGHT)

OWN_KEYS = frozenset((INDEX, GENERATION, LEASE, WEIGHT, PRIORITY_WEIGHT))
