"""How does the cost of a call grow with the buffer?

More items are more levels of the tree, and fewer of them lie in a cache. Against the libraries that
are filled in a moment.
"""

from __future__ import annotations

import dataclasses

from benchmarks.comparison import Setting, compare
from benchmarks.library import ARRAYS, INDEX, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
STEPS = (1, 10, 100, 1000)
"""Capacities, in hundredths of the setting's: 10,000 to 10,000,000."""
AGAINST = ("shmbuffer", "bound", "torchrl", "cpprb", "tianshou")
OPERATIONS = {
    "extend(32), prioritized": [Operation("extend", 32, form) for form in (TENSORDICT, ARRAYS)],
    "sample(256), prioritized": [Operation("sample", 256, form) for form in (TENSORDICT, ARRAYS)],
    "cycle(256)": [Operation("cycle", 256, INDEX)],
}


def run(setting: Setting) -> list[Series]:
    """Measure it."""
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
    """Of a figure, in a table."""
    return f"{operation}, of {capacity:,}"
