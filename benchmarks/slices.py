"""What do slices of trajectories cost after each write, and how does the cost grow?

Sixteen environments write 32 items in turn, and episodes have two hundred steps. After each write,
16 slices of 16 steps are sampled. The time includes the write. torchrl has no streams, so its
slices follow the order of the items. Only shmbuffer is measured with the largest buffer.
"""

from __future__ import annotations

import dataclasses

from benchmarks.comparison import Setting, compare
from benchmarks.library import BY_PRIORITY, FRAGMENTED, UNIFORM, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256
STEPS = (10, 100, 1000)
"""Capacities in percent of the setting's capacity: 100,000 to 10,000,000."""


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
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
