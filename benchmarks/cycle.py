"""How long does a learner's step take: sample by priority, then update the priorities?

With ``index``, the priorities are updated by index. With ``TensorDict``, they are in the sample,
which also has the generation of each item. Updates alone use 2000 sets of indices in turn, because
the parts of the tree that a learner updates are not in the cache either.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import Operation
from benchmarks.measure import Series

ITEMS = ("S", "M")
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    operations = {
        Operation("update", COUNT, "index"): f"update({COUNT})",
        Operation("cycle", COUNT, "index"): f"cycle({COUNT})",
        Operation("cycle", COUNT, "TensorDict"): f"cycle({COUNT})",
    }
    return compare(setting, operations, prioritized=True)
