"""What `instructions.py` counts: the hot calls, in a process that valgrind runs.

    python -m benchmarks.counted REQUESTS DIRECTORY

REQUESTS is the shared object of `requests.c`. For each call a line of JSON says how it is named and
which of the files that valgrind writes is its first: of what came before, then of no call at all,
then WINDOWS of them of so many calls each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import shmbuffer
from benchmarks.library import (
    ARRAYS,
    BY_STALENESS,
    IN_GROUPS,
    IN_STREAMS,
    INDEX,
    OUT,
    TENSORDICT,
    Operation,
)
from benchmarks.ours import ShmBuffer

CALLS, WINDOWS = 32, 5
WARM = 48  # more than the interpreter needs to specialise what it runs
LARGE = 4096  # items of a batch of which so many are counted that few calls are enough
LARGE_CALLS = 2
CAPACITY = 20_000
OPERATIONS = {
    False: [
        Operation("add", 1, ARRAYS),
        Operation("add", 1, TENSORDICT),
        Operation("sample", 256, TENSORDICT),
    ],
    True: [
        Operation("extend", 1, TENSORDICT),
        Operation("extend", 32, TENSORDICT),
        Operation("extend", 32, ARRAYS),
        Operation("sample", 256, TENSORDICT),
        Operation("sample", 256, OUT),
        Operation("update", 256, INDEX),
        Operation("cycle", 256, TENSORDICT),
        Operation("reserve", 32, TENSORDICT),
        Operation("consume", 256, TENSORDICT),
        Operation("labelled", 256, BY_STALENESS),
        Operation("labelled", 256, IN_GROUPS),
        Operation("labelled", 256, IN_STREAMS),
        Operation("extend", LARGE, ARRAYS),
        Operation("sample", LARGE, TENSORDICT),
        Operation("update", LARGE, INDEX),
    ],
}


def main(requests: str, directory: str) -> None:
    """Make the calls."""
    valgrind = ctypes.CDLL(requests)
    if not valgrind.counting():
        raise SystemExit("this is to be run by valgrind: see benchmarks/instructions.py")
    shmbuffer.set_threads(1)
    gc.disable()  # it would come in the middle of some calls, and not of others
    library = ShmBuffer()
    written = 0
    for prioritized, operations in OPERATIONS.items():
        place = Path(directory) / str(prioritized)
        library.open(str(place), "S", CAPACITY, prioritized)
        for operation in operations:
            called = library.call(operation)
            if called is None:
                continue
            calls = LARGE_CALLS if operation.count == LARGE else CALLS
            _count(valgrind, *called, calls)
            how = "prioritized" if prioritized else "uniform"
            name = f"{operation.call}({operation.count}), {how}, {operation.form}"
            print(json.dumps({"name": name, "first": written + 1, "calls": calls}), flush=True)
            written += 2 + WINDOWS
        library.close()


def _count(valgrind: Any, call: Any, inputs: list[tuple[Any, ...]], calls: int) -> None:
    warm = min(WARM, 4 * calls)
    chosen = [inputs[at % len(inputs)] for at in range(warm + WINDOWS * calls)]
    for arguments in chosen[:warm]:
        call(*arguments)
    valgrind.begin()
    valgrind.write_down()  # what came before
    for first in (0, *range(warm, len(chosen), calls)):
        for arguments in chosen[first : first + calls] if first else ():
            call(*arguments)
        valgrind.write_down()
    valgrind.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
