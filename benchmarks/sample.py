"""How long does it take to draw a batch into a TensorDict, uniformly and by priority?

The rows of a batch lie all over the buffer, so most of them are not in any cache.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import Operation
from benchmarks.measure import Series

COUNTS = (32, 256)


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    uniform = {Operation("sample", count): f"sample({count}), uniform" for count in COUNTS}
    by_mass = {Operation("sample", count): f"sample({count}), prioritized" for count in COUNTS}
    return [
        *compare(setting, uniform, prioritized=False),
        *compare(setting, by_mass, prioritized=True),
    ]
