"""What do slices of trajectories cost after each write, and how does it grow with the buffer?

Sixteen environments write steps in turn, 32 items at a time; episodes have two hundred steps.
Between two writes 16 slices of 16 steps are drawn. The write is part of the time. Beside it
torchrl, which has no streams and takes the items as they lie; the largest buffer is ours alone.
"""

from __future__ import annotations

import dataclasses

from benchmarks.comparison import Setting, compare
from benchmarks.library import BY_PRIORITY, FRAGMENTED, UNIFORM, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256
STEPS = (10, 100, 1000)
"""Capacities, in hundredths of the setting's: 100,000 to 10,000,000."""


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    found: list[Series] = []
    for step in STEPS:
        capacity = max(2 * COUNT, setting.capacity * step // 100)
        few = [one for one in setting.libraries if step <= 100 or one.name == "shmbuffer"]
        of_this = dataclasses.replace(setting, libraries=few, capacity=capacity)
        name = f"extend(32), sample({COUNT}) in slices, of {capacity:,}"
        forms = (UNIFORM, BY_PRIORITY, FRAGMENTED)
        operations = {Operation("slices", COUNT, form): name for form in forms}
        found += compare(of_this, operations, prioritized=False)
    return found
