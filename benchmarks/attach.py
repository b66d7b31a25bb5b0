"""How long does it take to get hold of a full buffer that is there already?

In a process that has imported everything. Where nobody has it open, everybody has left in order;
after a crash it is `recover`. torchrl's nearest thing is to load a dump, which somebody has to have
made before.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import LOADS, Operation
from benchmarks.measure import Series
from benchmarks.ours import AND_SAMPLE, AT_REST, BESIDE_OTHERS

ITEMS = ("S",)


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    forms = (BESIDE_OTHERS, AND_SAMPLE, AT_REST, LOADS)
    operations = [Operation("attach", 1, form) for form in forms]
    name = f"attach to {setting.capacity:,} items"
    return compare(setting, dict.fromkeys(operations, name), prioritized=True)
