"""What does a batch without replacement cost after a write, and at the beginning of a pass?

The storage is full. Before each batch, 32 items are written over the oldest ones, or a new pass
begins. The time includes this step.
"""

from __future__ import annotations

import dataclasses

from benchmarks.comparison import Setting, compare
from benchmarks.library import BEHIND_WRITES, FIRST_OF_PASS, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256
FORMS = BEHIND_WRITES, FIRST_OF_PASS
STEPS = (10, 100, 1000)
"""Capacities in percent of the setting's capacity: 100,000 to 10,000,000."""


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    few = [one for one in setting.libraries if one.name in ("shmbuffer", "torchrl")]
    found: list[Series] = []
    for step in STEPS:
        capacity = max(2 * COUNT, setting.capacity * step // 100)
        of_this = dataclasses.replace(setting, libraries=few, capacity=capacity)
        name = f"sample({COUNT}) without replacement, of {capacity:,}"
        operations = {Operation("passes", COUNT, form): name for form in FORMS}
        found += compare(of_this, operations, prioritized=False)
    return found
