"""The keys that a sample adds to the data.

When a sampled batch is written back, the entries under these keys are not stored.
"""

from __future__ import annotations

INDEX = "index"
"""Element index of each row: int64 ``[n]``, or ``[n, ndim]`` for a storage with ``ndim > 1``."""

GENERATION = "index_generation"
"""Ticket of each row's write: int64 ``[n]``, with a shared buffer or tracked generations."""

LEASE = "index_lease"
"""Number of the lease of each row, in a sample with ``lease=``: int64 ``[n]``."""

ANCHOR_GENERATION = "anchor_generation"
"""`GENERATION` of the item for which each row's window was drawn."""

WEIGHT = "_weight"
"""Importance weight of each row, ``(p / p_min) ** -beta``: the name up to TorchRL 0.10."""

PRIORITY_WEIGHT = "priority_weight"
"""Importance weights under the name that TorchRL 0.11 and later and its losses use."""

WEIGHT_KEYS = (WEIGHT, PRIORITY_WEIGHT)

OWN_KEYS = frozenset((INDEX, GENERATION, LEASE, WEIGHT, PRIORITY_WEIGHT))
