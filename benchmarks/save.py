"""How long does a checkpoint of a full buffer take?

"In place" means that the storage is in the directory of the checkpoint, so that its files are
synced but not copied. "Elsewhere" means that all files are copied. torchrl does not sync files, so
its rows include an ``fsync`` of each file. If the files are in memory (tmpfs), no sync is needed,
and the time is that of the other work.
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
    """Runs the benchmark."""
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
