"""What does hindsight add to a sample, while nothing is written and after each write?

Episodes have a hundred steps. "quiet" samples repeatedly. "after add(1)" includes the write of an
item before each sample, after which the sample has to find the ends of episodes again. The same
sample without hindsight is measured beside it.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import AFTER_WRITE, QUIET, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    operations = {
        Operation("sample", COUNT, TENSORDICT): f"sample({COUNT}), uniform",
        **{
            Operation("hindsight", COUNT, form): f"sample({COUNT}), hindsight"
            for form in (QUIET, AFTER_WRITE)
        },
    }
    return compare(setting, operations, prioritized=False)
