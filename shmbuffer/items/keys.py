"""The keys that a sample adds to the data.

When a sampled batch is written back, the entries under these keys are not stored.
"""

from __future__ import annotations

INDEX = "index"
"""Element index of each row: int64 ``[n]``, or ``[n, ndim]`` for a storage with ``ndim > 1``."""

GENERATION = "index_generation"
"""Ticket of the write that stored each row: int64 ``[n]``.

Samples contain this entry if the buffer is shared or its storage tracks generations.
"""

LEASE = "index_lease"
"""Number of each row's lease, in samples that were drawn with ``lease=``: int64 ``[n]``."""

ANCHOR_GENERATION = "anchor_generation"
"""`GENERATION` of the item that was drawn for each row, if the row is a window of steps."""

WEIGHT = "_weight"
"""Importance weight of each row, ``(p / p_min) ** -beta``, under TorchRL's name up to 0.10."""

PRIORITY_WEIGHT = "priority_weight"
"""Importance weights under the name that TorchRL and its losses use since version 0.11."""

WEIGHT_KEYS = (WEIGHT, PRIORITY_WEIGHT)

OWN_KEYS = frozenset((INDEX, GENERATION, LEASE, WEIGHT, PRIORITY_WEIGHT))
