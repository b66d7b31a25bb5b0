"""How long does one item take to be written?

Without priorities: what a collector does in every step if it does not gather batches.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import Operation
from benchmarks.measure import Series

ITEMS = ("S", "M")


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    operations = [Operation("add", 1, form) for form in ("arrays", "TensorDict")]
    return compare(setting, dict.fromkeys(operations, "add(1)"), prioritized=False)
