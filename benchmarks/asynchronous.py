"""What do draws by staleness, in groups and of streams cost after a write, with a million items?

Between two writes of 32 items 256 are drawn. The write is part of the time; without the draw it is
the row of `extend`. Every thousand items are of one version, so a thousand versions are there;
groups have eight items, and windows of the one stream sixteen. Beside it torchrl, which looks at
every item for each batch. Then the draw alone, while another process writes 32 items every 100 µs,
or as fast as it can.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import BY_STALENESS, IN_GROUPS, IN_STREAMS, UNIFORM, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    operations = {
        Operation("labelled", COUNT, form): f"extend(32), sample({COUNT}) {form}"
        for form in (BY_STALENESS, IN_GROUPS, IN_STREAMS)
    }
    operations |= {
        Operation("beside", COUNT, form): f"sample({COUNT}) {form}, beside a writer"
        for form in (UNIFORM, BY_STALENESS, IN_GROUPS, IN_STREAMS)
    }
    return compare(setting, operations, prioritized=False)
