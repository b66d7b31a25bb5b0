"""What does hindsight add to a sample, while nothing is written and after each write?

Episodes have a hundred steps. "quiet" draws again and again; "after add(1)" writes an item first,
which is part of the time, and has the sample look where episodes end. Beside it the same draw
without hindsight.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import AFTER_WRITE, QUIET, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    operations = {
        Operation("sample", COUNT, TENSORDICT): f"sample({COUNT}), uniform",
        **{
            Operation("hindsight", COUNT, form): f"sample({COUNT}), hindsight"
            for form in (QUIET, AFTER_WRITE)
        },
    }
    return compare(setting, operations, prioritized=False)
