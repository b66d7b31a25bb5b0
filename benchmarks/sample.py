"""How long does it take to draw a batch, uniformly and by priority?

The rows of a batch lie all over the buffer, so most of them are not in any cache. With ``out=`` the
caller hands in the TensorDict of the call before.
"""

from __future__ import annotations

from benchmarks.comparison import Setting, compare
from benchmarks.library import ARRAYS, OUT, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S", "M", "L")
COUNTS = (32, 256)
FORMS = (TENSORDICT, OUT, ARRAYS)


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    return [
        *compare(setting, _operations("uniform"), prioritized=False),
        *compare(setting, _operations("prioritized"), prioritized=True),
    ]


def _operations(how: str) -> dict[Operation, str]:
    return {
        Operation("sample", count, form): f"sample({count}), {how}"
        for count in COUNTS
        for form in FORMS
    }
