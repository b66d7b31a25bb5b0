"""How long does a checkpoint of a full buffer take?

"In place", the storage has its files where they are saved, so that they are made durable and not
copied; "elsewhere" all of them are copied. torchrl leaves it to the kernel when files reach the
disk: its rows include the ``fsync`` of each. With the files in memory (tmpfs) there is nothing to
make durable, and what is left is the rest of the work.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

from benchmarks.comparison import Setting, compare
from benchmarks.library import ELSEWHERE, IN_PLACE, Operation
from benchmarks.measure import Series

ITEMS = ("S",)
_MEMORY = Path("/dev/shm")
_COPIES = 12  # files, indices and checkpoints of all libraries together, generously


def run(setting: Setting) -> list[Series]:
    """Measure it."""
    what = f"save {setting.capacity:,} items"
    on_disk = {Operation("save", 1, form): what for form in (IN_PLACE, ELSEWHERE)}
    found = compare(setting, on_disk, prioritized=True)
    needed = _COPIES * setting.capacity * setting.kind.nbytes
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > needed:
        with tempfile.TemporaryDirectory(prefix="shmbuffer-bench-", dir=_MEMORY) as directory:
            in_memory = dataclasses.replace(setting, directory=Path(directory))
            operation = Operation("save", 1, IN_PLACE)
            found += compare(in_memory, {operation: f"{what}, in memory"}, prioritized=True)
    return found
