"""How long does it take to write a batch with priorities?"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import Operation
from benchmarks.measure import Series

ITEMS = ("S", "M")
COUNTS = (1, 32, 256)


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    operations = {
        Operation("extend", count, form): f"extend({count}), prioritized"
        for count in COUNTS
        for form in ("arrays", "TensorDict")
    }
    operations[Operation("reserve", 32)] = "reserve(32), commit, prioritized"
    return compare(setting, operations, prioritized=True)
