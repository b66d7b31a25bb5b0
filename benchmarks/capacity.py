"""How does the cost of a call grow with the size of the buffer?

More items need more levels of the tree, and a smaller part of them is in a cache. Only libraries
that can be filled quickly are compared.
"""

from __future__ import annotations

import dataclasses

from benchmarks.comparison import Setting, compare
from benchmarks.library import ARRAYS, INDEX, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
STEPS = (1, 10, 100, 1000)
"""Capacities in percent of the setting's capacity: 10,000 to 10,000,000."""
AGAINST = ("shmbuffer", "bound", "torchrl", "cpprb", "tianshou")
OPERATIONS = {
    "extend(32), prioritized": [Operation("extend", 32, form) for form in (TENSORDICT, ARRAYS)],
    "sample(256), prioritized": [Operation("sample", 256, form) for form in (TENSORDICT, ARRAYS)],
    "cycle(256)": [Operation("cycle", 256, INDEX)],
}


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    few = tuple(library for library in setting.libraries if library.name in AGAINST)
    found: list[Series] = []
    for capacity in sorted({max(256, setting.capacity * step // 100) for step in STEPS}):
        of_this = dataclasses.replace(setting, libraries=few, capacity=capacity)
        operations = {
            operation: title(name, capacity)
            for name, operations in OPERATIONS.items()
            for operation in operations
        }
        found += compare(of_this, operations, prioritized=True)
    return found


def title(operation: str, capacity: int) -> str:
    """Returns the title of a plot in the table."""
    return f"{operation}, of {capacity:,}"
