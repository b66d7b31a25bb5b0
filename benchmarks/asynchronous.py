"""What does sampling by staleness, in groups and from streams cost after a write?

256 items are sampled after each write of 32 items. The time includes the write, whose own time is
the row of `extend`. Each thousand items have a version of their own, groups have eight items, and
windows of the only stream have sixteen. torchrl examines every item for each batch. Further rows
show the sample alone, while another process writes 32 items every 100 µs, or as fast as it can.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import BY_STALENESS, IN_GROUPS, IN_STREAMS, UNIFORM, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
COUNT = 256


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    operations = {
        Operation("labelled", COUNT, form): f"extend(32), sample({COUNT}) {form}"
        for form in (BY_STALENESS, IN_GROUPS, IN_STREAMS)
    }
    operations |= {
        Operation("beside", COUNT, form): f"sample({COUNT}) {form}, beside a writer"
        for form in (UNIFORM, BY_STALENESS, IN_GROUPS, IN_STREAMS)
    }
    return compare(setting, operations, prioritized=False)
