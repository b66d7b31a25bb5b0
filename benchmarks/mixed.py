"""How long does it take to draw a batch, half of a data set and half of what was collected?

The data set is in memory, as what is collected, or in files that are mapped; beside it a draw from
one buffer, as large as both parts of the batch together.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import IN_FILES, IN_MEMORY, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    operations = {
        Operation("sample", COUNT, TENSORDICT): f"sample({COUNT}), uniform",
        **{
            Operation("mixed", COUNT, form): f"sample({COUNT}), mixed"
            for form in (IN_MEMORY, IN_FILES)
        },
    }
    return compare(setting, operations, prioritized=False)
