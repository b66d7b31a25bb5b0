"""How long does it take to sample a batch, half from a data set and half from collected items?

The data set is in memory, like the collected items, or in mapped files. A sample of the same size
from a single buffer is measured beside it.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import IN_FILES, IN_MEMORY, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    operations = {
        Operation("sample", COUNT, TENSORDICT): f"sample({COUNT}), uniform",
        **{
            Operation("mixed", COUNT, form): f"sample({COUNT}), mixed"
            for form in (IN_MEMORY, IN_FILES)
        },
    }
    return compare(setting, operations, prioritized=False)
