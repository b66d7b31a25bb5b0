"""How long does it take to attach to an existing full buffer?

The process has already imported all modules. If no other client is attached, all clients have
detached cleanly; `recover` measures the time after a crash. torchrl has no counterpart, so its row
shows the load of a dump that was saved before.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import LOADS, Operation
from benchmarks.measure import Series
from benchmarks.ours import AND_SAMPLE, AT_REST, BESIDE_OTHERS

ITEMS = ("S",)


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    forms = (BESIDE_OTHERS, AND_SAMPLE, AT_REST, LOADS)
    operations = [Operation("attach", 1, form) for form in forms]
    name = f"attach to {setting.capacity:,} items"
    return compare(setting, dict.fromkeys(operations, name), prioritized=True)
