"""How long does it take to sample a batch, uniformly and by priority?

The rows of a batch are at random places in the buffer, so most of them are not in a cache. With
``out=``, the caller passes the TensorDict of the previous call. "allocation" creates the tensors of
a sample and their TensorDict, without data.
"""

from __future__ import annotations

import dataclasses

from benchmarks.allocation import Allocation
from benchmarks.comparison import Setting, compare
from benchmarks.library import ARRAYS, OUT, TENSORDICT, Operation
from benchmarks.measure import Series

ITEMS = ("S", "M", "L")
COUNTS = (32, 256)
FORMS = (TENSORDICT, OUT, ARRAYS)


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    setting = dataclasses.replace(setting, libraries=[*setting.libraries, Allocation()])
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
