"""How long does a learner's step take: draw by priority, then send new priorities back?

With ``index`` the priorities go back by index, with ``TensorDict`` in the sample itself, which here
also says which write every row came from. Updates alone take turns with 2000 sets of indices: a
learner does not find the last ones' part of the tree in the cache either.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import Operation
from benchmarks.measure import Series

ITEMS = ("S", "M")
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    operations = {
        Operation("update", COUNT, "index"): f"update({COUNT})",
        Operation("cycle", COUNT, "index"): f"cycle({COUNT})",
        Operation("cycle", COUNT, "TensorDict"): f"cycle({COUNT})",
    }
    return compare(setting, operations, prioritized=True)
